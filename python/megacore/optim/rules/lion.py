"""Lion: the sign of a mean of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megacore.optim.update_rule import MomentDtype, StateTensor, UpdateRule
from megacore.options import check_values

if TYPE_CHECKING:
    from torch import Tensor

    from megacore.optim.update_piece import Rates


@dataclass(frozen=True, kw_only=True)
class Lion(UpdateRule):
    """Lion with decoupled weight decay; it needs about a third to a tenth of AdamW's rate.

    Attributes:
        beta1: Weight of the mean in the direction of a step, against the gradient.
        beta2: Decay of the mean of gradients.
        moments_dtype: Number format of the mean.

    Raises:
        ValueError: If a value is not valid.

    Source:
        Chen et al., arXiv:2302.06675.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    moments_dtype: MomentDtype = "float32"

    def __post_init__(self) -> None:
        check_values(self, least={"beta1": 0, "beta2": 0}, below={"beta1": 1, "beta2": 1})

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """Mean of gradients."""
        return (StateTensor(name="exp_avg", dtype=self.moments_dtype),)

    def step(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], rates: Rates) -> None:
        """Update some elements in place."""
        mean = state["exp_avg"]
        direction = (mean * self.beta1).add_(grad * (1.0 - self.beta1)).sign_()
        param.mul_(rates.keep).sub_(direction.mul_(rates.lr))
        mean.mul_(self.beta2).add_(grad.mul_(1.0 - self.beta2))
