"""AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megacore.optim.update_rule import MomentDtype, StateTensor, UpdateRule
from megacore.options import check_values

if TYPE_CHECKING:
    from torch import Tensor

    from megacore.optim.update_piece import UpdatePiece


@dataclass(frozen=True, kw_only=True)
class AdamW(UpdateRule):
    """AdamW with decoupled weight decay; bits as :func:`megacore.ops.optim.adamw_step_`.

    Attributes:
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        moments_dtype: Number format of both moments.

    Raises:
        ValueError: If a value is not valid.

    Source:
        Loshchilov and Hutter, arXiv:1711.05101.

    Example:
        >>> AdamW(moments_dtype="bfloat16").state_bytes
        Fraction(4, 1)
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    moments_dtype: MomentDtype = "float32"

    def __post_init__(self) -> None:
        least = {"beta1": 0, "beta2": 0, "eps": 0}
        check_values(self, least=least, below={"beta1": 1, "beta2": 1})

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """First and second moment."""
        return tuple(
            StateTensor(name=name, dtype=self.moments_dtype) for name in ("exp_avg", "exp_avg_sq")
        )

    @property
    def decays(self) -> tuple[float, float]:
        """Decays of both moments."""
        return self.beta1, self.beta2

    def update(self, piece: UpdatePiece, control: Tensor) -> None:
        """Update a piece by the kernel of the device, which reads the decision itself."""
        converts = piece.grad.dtype != piece.param.dtype or self.moments_dtype != "float32"
        for part in piece.blocks() if converts else (piece,):
            self._update_at_once(part, control)

    def _update_at_once(self, piece: UpdatePiece, control: Tensor) -> None:
        from megacore.ops.optim import AdamWSettings, adamw_step_

        settings = AdamWSettings(
            step=1,  # replaced by that of the control
            lr=piece.lr_scale,  # multiplied by that of the control
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=piece.weight_decay,
        )
        # float() returns the tensor itself if it is fp32 already.
        exp_avg, exp_avg_sq = (piece.state[name].float() for name in ("exp_avg", "exp_avg_sq"))
        adamw_step_(
            piece.param,
            piece.grad.float(),
            exp_avg,
            exp_avg_sq,
            settings,
            copy_out=piece.copy_out,
            control=control,
        )
        for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            if moment is not piece.state[name]:
                piece.state[name].copy_(moment)
