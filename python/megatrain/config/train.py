"""The ``[train]`` section: steps, batches, number format, recomputation, validation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from megatrain.config.base import Section
from megatrain.config.user_objects import check_object_name

RECOMPUTE_MODULES = ("norm", "attention", "activation", "mlp", "moe")

# Names of several parts.
_RECOMPUTE_GROUPS = {"full": ("layer",), "selective": ("norm", "attention", "activation")}


class TrainSectionConfig(Section):
    """``[train]``: steps, batch sizes, number format, seed, validation."""

    steps: int = Field(default=100, ge=1, description="Number of optimizer steps.")
    microbatch_size: int = Field(
        default=4, ge=1, description="Sequences per forward pass of one rank."
    )
    global_batch_size: int = Field(
        default=32, ge=1, description="Sequences per optimizer step, all ranks."
    )
    loss_normalization: Literal["microbatch", "token"] | None = Field(
        default=None,
        description="Reduction of token losses: the mean over each microbatch, then over "
        "microbatches; or the mean over all tokens of the global batch. Both are equal unless "
        "some tokens are ignored (labels below 0). Default: `token` if the data have such tokens, "
        "and for `data.factory`.",
    )
    loss: str | None = Field(
        default=None,
        description="Function that computes the loss from the output of the last stage, as "
        "`package.module:name`, see own-model.md. Default: cross entropy of the next token.",
    )
    callbacks: list[str] = Field(
        default=[],
        description="Classes with methods that are called during training, each as "
        "`package.module:name`, see own-model.md.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="Number format of weights and activations; main weights are float32. Also "
        "`bf16`, `fp16` and `fp32`. Default: `bfloat16` on GPUs (`run.backend` is `nccl`), "
        "`float32` on CPUs.",
    )
    fp8: Literal["off", "blockwise"] = Field(
        default="off",
        description="Operands of the products in linear layers and experts: those of `dtype`, or "
        "8-bit floats with a scale per 128 elements of activations and per 128 x 128 of weights. "
        "Inputs of layers are kept in 8 bits, and weights too, rounded once per step, if a step "
        "has several microbatches (2 bytes per weight). GPUs of compute capability 9.0 have "
        "kernels for `bfloat16` (not run yet); elsewhere the products are emulated, which shows "
        "the effect on the loss and is slower than `dtype` alone.",
    )
    recompute: list[
        Literal["full", "selective", "norm", "attention", "activation", "mlp", "moe"]
    ] = Field(
        default=[],
        description="Activations that are recomputed in the backward pass instead of kept: "
        "`full`, all of a layer but its input; or parts: `norm` (those before matrix products), "
        "`attention` (all between its two products), `activation` (SwiGLU of dense MLPs), `mlp` "
        "(whole dense MLPs), `moe` (whole MoE layers). `selective` is `norm`, `attention` and "
        "`activation`, which recomputes no product with a weight. Results are bitwise equal.",
    )
    recompute_keep: int = Field(
        default=0,
        ge=0,
        description="Number of microbatches in flight, per chunk of a pipeline rank, that keep "
        "all activations; only the others are recomputed.",
    )
    seed: int = Field(default=1234, ge=0, description="Seed of weights, data order and dropout.")
    on_spike: Literal["ignore", "warn", "skip", "stop"] = Field(
        default="warn",
        description="Reaction to a loss far above those of the last 100 steps: none; a note; no "
        "update from that step; or the end of the run with exit code 1.",
    )
    max_skipped_steps: int = Field(
        default=20,
        ge=0,
        description="Steps in a row whose update is skipped because of a non-finite gradient, "
        "after which the run ends with exit code 1; 0 for no limit.",
    )
    eval_interval: int = Field(
        default=50, ge=0, description="Steps between validations; 0 turns them off."
    )
    eval_steps: int = Field(default=4, ge=1, description="Global batches per validation.")

    @property
    def recomputed(self) -> frozenset[str]:
        """Recomputed parts: ``{"layer"}``, or parts of layers.

        Example:
            >>> sorted(TrainSectionConfig(recompute=["selective", "moe"]).recomputed)
            ['activation', 'attention', 'moe', 'norm']
        """
        return frozenset(
            part for name in self.recompute for part in _RECOMPUTE_GROUPS.get(name, (name,))
        )

    _check_loss = field_validator("loss")(check_object_name)

    @field_validator("callbacks")
    @classmethod
    def _check_callbacks(cls, names: list[str]) -> list[str]:
        for name in names:
            check_object_name(name)
        return names

    @model_validator(mode="after")
    def _check_recompute(self) -> Self:
        if "full" in self.recompute and len(set(self.recompute)) > 1:
            raise ValueError(
                "recompute names full, which is all of a layer, beside parts of it; use "
                'recompute = ["full"], or leave full out'
            )
        if self.recompute_keep > 0 and not self.recompute:
            raise ValueError(
                f"recompute_keep = {self.recompute_keep} exempts microbatches from recomputation, "
                'but recompute = []; set it to ["selective"] or ["full"], or recompute_keep to 0'
            )
        return self
