"""Adam, with weight decay as a part of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megacore.optim.rules.adamw import AdamW

if TYPE_CHECKING:
    from torch import Tensor

    from megacore.optim.update_piece import Rates, UpdatePiece


@dataclass(frozen=True, kw_only=True)
class Adam(AdamW):
    """Adam, which adds the weight decay to the gradient; without one it is :class:`AdamW`.

    Source:
        Kingma and Ba, arXiv:1412.6980.
    """

    def update(self, piece: UpdatePiece, control: Tensor) -> None:
        """Update a piece; without weight decay by the kernel."""
        if piece.weight_decay == 0.0:
            super().update(piece, control)
        else:
            piece.apply(self.step, control)

    def step(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], rates: Rates) -> None:
        """Update some elements in place."""
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        grad.add_(param * rates.weight_decay)
        exp_avg.add_((grad - exp_avg).mul_(1.0 - self.beta1))
        exp_avg_sq.mul_(self.beta2).add_(grad.square_().mul_(1.0 - self.beta2))
        root = exp_avg_sq.sqrt().div_(rates.bias_correction2.sqrt().float()).add_(self.eps)
        param.sub_((exp_avg / root).mul_((rates.lr / rates.bias_correction1).float()))
