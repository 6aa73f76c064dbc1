"""Stochastic gradient descent."""

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
class SGD(UpdateRule):
    """Gradient descent with momentum, as ``torch.optim.SGD``: weight decay is in the gradient.

    Attributes:
        momentum: Decay of the sum of gradients; 0 for no state.
        nesterov: Look ahead by one step of the momentum.
        moments_dtype: Number format of the sum.

    Raises:
        ValueError: If a value is not valid.

    Example:
        >>> SGD().state_bytes, SGD(momentum=0.0).state_bytes
        (Fraction(4, 1), Fraction(0, 1))
    """

    momentum: float = 0.9
    nesterov: bool = False
    moments_dtype: MomentDtype = "float32"

    def __post_init__(self) -> None:
        check_values(self, least={"momentum": 0}, below={"momentum": 1})

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """Sum of gradients, if there is momentum."""
        if self.momentum == 0.0:
            return ()
        return (StateTensor(name="momentum", dtype=self.moments_dtype),)

    def step(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], rates: Rates) -> None:
        """Update some elements in place."""
        grad.add_(param * rates.weight_decay)
        if self.momentum != 0.0:
            total = state["momentum"].mul_(self.momentum).add_(grad)
            grad = grad.add_(total * self.momentum) if self.nesterov else total
        param.sub_(grad * rates.lr)
