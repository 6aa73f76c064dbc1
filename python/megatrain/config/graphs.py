"""The ``[graphs]`` section: the parts of a step that are captured as CUDA graphs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from megatrain.config.base import Section

MODES = ("off", "partial", "full", "full_step")
SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")


class GraphsConfig(Section):
    """``[graphs]``: CUDA graphs of parts of layers, or of a whole step."""

    mode: str = Field(
        default="off",
        description="`off`; `full`, all forward and backward passes of a step, and those of a "
        "validation; `full_step`, the optimizer step, too, with the collectives before and after "
        "it: skipping, clipping and the loss scale are decided on the device; or parts of layers, "
        "comma-separated: `attn` (attention with norm and dropout), `mlp` (dense MLPs with norm "
        "and dropout), `moe` (whole MoE layers; needs the dispatcher `static`), `moe_router` (MoE "
        "layers up to the choice of experts), `moe_preprocess` (up to the dispatch plan; with "
        "`moe_router`). `partial` is `attn`, `mlp`, `moe_router` and `moe_preprocess`, as far as "
        "the model has them; without `attn` if `data.document_mask` is on, without "
        "`moe_preprocess` if experts are cloned. Results are bitwise equal to those without.",
    )
    on_failure: Literal["error", "recapture", "eager"] = Field(
        default="error",
        description="Reaction to a step that differs from the capture, for example in the shape of "
        "a batch, and to a failed capture: `error` ends the run; `recapture` captures a step that "
        "differs; `eager` does so, too, and continues without graphs if a capture fails.",
    )

    @property
    def is_full(self) -> bool:
        """Return whether all passes of a step are captured."""
        return self.mode in ("full", "full_step")

    @property
    def is_partial(self) -> bool:
        """Return whether parts of layers are captured."""
        return self.mode not in ("off", "full", "full_step")

    @property
    def named_scopes(self) -> tuple[str, ...]:
        """The parts of layers that ``mode`` names; none for ``partial``.

        Example:
            >>> [GraphsConfig(mode=mode).named_scopes for mode in ("attn,mlp", "partial")]
            [('attn', 'mlp'), ()]
        """
        return () if self.mode in MODES else tuple(self.mode.split(","))

    @field_validator("mode")
    @classmethod
    def _check_mode(cls, mode: str) -> str:
        if mode in MODES:
            return mode
        names = mode.split(",")
        for name in names:
            if name not in SCOPES:
                raise ValueError(
                    f"must be {', '.join(MODES)}, or some of {', '.join(SCOPES)}, joined by "
                    f'commas, got "{name}"'
                )
        if "moe_preprocess" in names and "moe_router" not in names:
            raise ValueError(
                "moe_preprocess works on what the router has just chosen, so a capture of it "
                "begins with the router; add moe_router"
            )
        if "moe" in names and "moe_router" in names:
            raise ValueError(
                "moe captures MoE layers whole, and moe_router only their beginning; leave one out"
            )
        return mode
