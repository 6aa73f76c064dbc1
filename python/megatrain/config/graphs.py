"""The ``[graphs]`` section: the parts of a step that are captured as CUDA graphs."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from megatrain.config.base import Section


class GraphsConfig(Section):
    """``[graphs]``: CUDA graphs of parts of layers, or of a whole step."""

    mode: Literal["off", "partial", "full", "full_step"] = Field(
        default="off",
        description="`partial`, the parts of layers in `scopes`; `full`, all forward and backward "
        "passes of a step, and those of a validation; `full_step`, the optimizer step, too, with "
        "the collectives before and after it: skipping, clipping and the loss scale are decided on "
        "the device. Results are bitwise equal to those without.",
    )
    scopes: list[Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess"]] = Field(
        default=[],
        description="Parts of layers that `partial` captures: `attn` (attention with norm and "
        "dropout), `mlp` (dense MLPs with norm and dropout), `moe` (whole MoE layers; needs the "
        "dispatcher `static`), `moe_router` (MoE layers up to the choice of experts), "
        "`moe_preprocess` (up to the dispatch plan; with `moe_router`). Default: `attn`, `mlp`, "
        "`moe_router` and `moe_preprocess`, as far as the model has them; without `attn` if "
        "`data.document_mask` is on, without `moe_preprocess` if experts are cloned.",
    )
    backend: Literal["auto", "cuda", "emulated", "transformer_engine"] = Field(
        default="auto",
        description="`cuda` for real graphs; `emulated` runs the captured code again, on any "
        "device, and checks that a real graph would do the same; `transformer_engine` delegates "
        "captures of parts to that package. `auto`: `cuda` or `emulated`, by the device.",
    )
    warmup_steps: int = Field(
        default=3,
        ge=1,
        description="Steps without graphs, after a start or a resume, before the capture.",
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
        return self.mode == "partial"

    @model_validator(mode="after")
    def _check_scopes(self) -> Self:
        if "moe_preprocess" in self.scopes and "moe_router" not in self.scopes:
            raise ValueError(
                "moe_preprocess works on what the router has just chosen, so a capture of it "
                "begins with the router; add moe_router to scopes"
            )
        if "moe" in self.scopes and "moe_router" in self.scopes:
            raise ValueError(
                "moe captures MoE layers whole, and moe_router only their beginning; leave one "
                "out of scopes"
            )
        return self
