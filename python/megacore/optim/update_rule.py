"""Protocol of optimizers: the state that they keep for parameters, and how they update values.

Everything else is the same for all optimizers and knows none of them: reduction of gradients, norm,
clipping, skipped steps, main parameters in fp32, gather of weights, checkpoints and resharding.
Without torch, so that predictions can count bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from megacore.optim.update_piece import Rates, UpdatePiece
    from megacore.parallel.param_info import ParamInfo

MomentDtype = Literal["float32", "bfloat16"]
StateDtype = Literal[MomentDtype, "uint8"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor of an optimizer's state, zero at first: a value for each element or block.

    Attributes:
        name: Its name in checkpoints.
        dtype: Number format in memory. A step computes with fp32 values and rounds them back.
        elements: Elements of a parameter for each value; above 1 see :attr:`UpdateRule.unit`.
    """

    name: str
    dtype: StateDtype = "float32"
    elements: int = 1

    @property
    def bytes_per_element(self) -> Fraction:
        """Bytes per element of a parameter."""
        return Fraction(1 if self.dtype == "uint8" else DTYPE_BYTES[self.dtype], self.elements)


class UpdateRule(ABC):
    """Base class of optimizers: frozen dataclasses whose fields are hyperparameters.

    An element-wise optimizer defines :attr:`state` and :meth:`step`. Its elements must not depend
    on one another: a rank has a range of elements that cuts through parameters, and gives them to
    :meth:`step` in blocks.

    Example:
        >>> class SignSGD(UpdateRule):
        ...     state = ()
        ...     def step(self, param, grad, state, rates):
        ...         param.sub_(grad.sign_().mul_(rates.lr))
        >>> SignSGD().state_bytes
        Fraction(0, 1)
    """

    @property
    @abstractmethod
    def state(self) -> tuple[StateTensor, ...]:
        """Tensors of the state, in the order of their memory."""

    @property
    def decays(self) -> tuple[float, float]:
        """Decays of first and second moment, for the bias corrections of :class:`Rates`."""
        return 0.0, 0.0

    @property
    def unit(self) -> int:
        """Elements of the last dimension that ranks do not divide; a power of two."""
        return 1

    @property
    def state_bytes(self) -> Fraction:
        """Bytes of state per element."""
        return sum((tensor.bytes_per_element for tensor in self.state), Fraction(0))

    def rules_by_kind(self) -> dict[str, UpdateRule]:
        """Return the rules that :meth:`rule_for` can return, by the kind of parameters."""
        return {"parameters": self}

    def rule_for(self, info: ParamInfo) -> tuple[UpdateRule, float]:
        """Return the rule of a parameter, with a factor on its learning rate.

        A rule that is for certain parameters only names that of the others here.
        """
        del info
        return self, 1.0

    def step(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], rates: Rates) -> None:
        """Update some elements in place; all tensors are fp32 and flat, of one size.

        Args:
            param: Parameters.
            grad: Their averaged and clipped gradients, a copy that may be overwritten.
            state: Values of :attr:`state` by name.
            rates: Learning rate, weight decay and bias corrections.

        Sync:
            Must be none on CUDA, and no decision may depend on a value.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step, or update in its place")

    def update(self, piece: UpdatePiece, control: Tensor) -> None:
        """Update a piece unless the step is skipped; the default calls :meth:`step`.

        Args:
            piece: Consecutive elements that share their settings.
            control: The decision of :func:`megacore.ops.optim.decide_step_`.
        """
        piece.apply(self.step, control)
