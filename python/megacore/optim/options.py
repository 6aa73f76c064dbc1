"""Options of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacore.options import check_values


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW, clipping, loss scale, and communication that overlaps with compute.

    Attributes:
        weight_decay: Decoupled decay of parameters whose ``ParamInfo.weight_decay`` is set.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        clip_grad: Largest global gradient norm; 0 for no clipping.
        moments_dtype: Number format of both moments.
        overlap: Reduction of gradients during the backward pass (``"grads"``), gather of parameters
            during the next forward pass (``"params"``), both (``"all"``), or none of them.
        loss_scale: Initial loss scale of float16 training, adapted later; a power of two.
        loss_scale_interval: Steps without overflow after which the loss scale doubles.

    Raises:
        ValueError: If a value is not valid.
    """

    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    overlap: Literal["none", "grads", "params", "all"] = "none"
    loss_scale: float = 65536.0
    loss_scale_interval: int = 1000

    def __post_init__(self) -> None:
        least = {"weight_decay": 0, "beta1": 0, "beta2": 0, "eps": 0, "clip_grad": 0}
        check_values(
            self,
            least={**least, "loss_scale": 1, "loss_scale_interval": 1},
            below={"beta1": 1, "beta2": 1},
        )

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

    Attributes:
        lr: Highest rate.
        min_lr: Rate after the decay. Default: a tenth of ``lr``.
        warmup_steps: Steps of linear rise.
        schedule: Shape after the warmup.
        decay_steps: ``cosine``: the step at which ``min_lr`` is reached; ``wsd``: length of the
            final decay. Default: the whole run; a fifth of it.

    Raises:
        ValueError: If a value is not valid.
    """

    lr: float
    min_lr: float | None = None
    warmup_steps: int = 0
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        check_values(self, least={"lr": 0, "min_lr": 0, "warmup_steps": 0, "decay_steps": 0})
