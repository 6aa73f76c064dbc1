"""Options of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megacore.optim.rules.adamw import AdamW
from megacore.optim.update_rule import UpdateRule
from megacore.options import check_options, check_values


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Update rule, clipping, loss scale, and communication that overlaps with compute.

    Attributes:
        rule: The optimizer itself: its state and its arithmetic.
        weight_decay: Weight decay of parameters whose ``ParamInfo.weight_decay`` is set.
        clip_grad: Largest global gradient norm; 0 for no clipping.
        overlap: Reduction of gradients during the backward pass (``"grads"``), gather of parameters
            during the next forward pass (``"params"``), both (``"all"``), or none of them.
        loss_scale: Initial loss scale of float16 training, adapted later; a power of two.
        loss_scale_interval: Steps without overflow after which the loss scale doubles.

    Raises:
        ValueError: If a value is not valid.
    """

    rule: UpdateRule = field(default_factory=AdamW)
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    overlap: Literal["none", "grads", "params", "all"] = "none"
    loss_scale: float = 65536.0
    loss_scale_interval: int = 1000

    def __post_init__(self) -> None:
        check_options(self.rule, UpdateRule, "rule")
        least = {"weight_decay": 0, "clip_grad": 0, "loss_scale": 1, "loss_scale_interval": 1}
        check_values(self, least=least)

    @property
    def overlaps_grads(self) -> bool:
        """True if gradients are reduced during the backward pass."""
        return self.overlap in ("grads", "all")

    @property
    def overlaps_params(self) -> bool:
        """True if parameters are gathered during the forward pass."""
        return self.overlap in ("params", "all")


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """Shape of the learning rate over a run; see `megacore.optim.learning_rate`.

    Lengths are in steps, samples or tokens, one unit for all of them.

    Attributes:
        lr: Highest rate.
        min_lr: Rate after the decay. Default: a tenth of ``lr``.
        schedule: Shape after the warmup.
        warmup: Length of the linear rise to ``lr``.
        warmup_from: Rate at which the rise starts.
        decay_end: Length of the run at which ``min_lr`` is reached. Default: the whole run.
        tail_length: Length of the decay of ``wsd``. Default: a fifth of ``decay_end``, or
            what the warmup leaves of it, if that is less.
        tail_shape: Shape of the decay of ``wsd``.

    Raises:
        ValueError: If a value is not valid.
    """

    lr: float
    min_lr: float | None = None
    schedule: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = "cosine"
    warmup: int = 0
    warmup_from: float = 0.0
    decay_end: int | None = None
    tail_length: int | None = None
    tail_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"

    def __post_init__(self) -> None:
        least = {"lr": 0, "min_lr": 0, "warmup": 0, "warmup_from": 0, "tail_length": 0}
        check_values(self, least={**least, "decay_end": 1})
