"""The ``[graphs]`` section: the parts of a step that are captured as CUDA graphs."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from megacore.config.base import Section

SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")


class GraphsConfig(Section):
    """``[graphs]``: CUDA graphs of parts of layers, or of a whole step."""

    mode: Literal["off", "partial", "full", "full_step"] = Field(
        default="off",
        description="`partial` captures parts of layers (`scopes`); `full` all forward and "
        "backward passes of a step, and those of a validation; `full_step` the optimizer step, "
        "too, with the collectives before and after it: skipping, clipping and the loss scale are "
        "decided on the device. Results are bitwise equal to those without.",
    )
    scopes: str | None = Field(
        default=None,
        min_length=1,
        description="For `partial`, comma-separated: `attn` (attention with norm and dropout), "
        "`mlp` (dense MLPs with norm and dropout), `moe` (whole MoE layers; needs the dispatcher "
        "`static`), `moe_router` (MoE layers up to the choice of experts), `moe_preprocess` (up "
        "to the dispatch plan; with `moe_router`). Default: `attn`, `mlp`, `moe_router` and "
        "`moe_preprocess`, as far as the model has them; without `attn` if `data.document_mask` is "
        "on, without `moe_preprocess` if experts are cloned.",
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
    def scope_names(self) -> tuple[str, ...]:
        """The scopes as a tuple.

        Example:
            >>> GraphsConfig(mode="partial", scopes="attn,mlp").scope_names
            ('attn', 'mlp')
        """
        return tuple(self.scopes.split(",")) if self.scopes else ()

    @field_validator("scopes")
    @classmethod
    def _check_scopes(cls, scopes: str | None) -> str | None:
        names = scopes.split(",") if scopes else []
        for name in names:
            if name not in SCOPES:
                raise ValueError(
                    f'scopes must be some of {", ".join(SCOPES)}, joined by commas, got "{name}"'
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
        return scopes

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scopes is not None and self.is_full:
            raise ValueError(
                f'scopes are parts of layers, but mode = "{self.mode}" records the whole step; '
                'leave scopes out, or set mode = "partial"'
            )
        return self
