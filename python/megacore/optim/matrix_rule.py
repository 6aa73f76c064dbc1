"""Protocol of optimizers that compute with whole matrices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megacore.optim.update_rule import UpdateRule

if TYPE_CHECKING:
    from torch import Tensor

    from megacore.optim.newton_schulz import CutMatrix
    from megacore.parallel.process_groups import Group


class MatrixRule(UpdateRule):
    """Base class of optimizers whose update of a matrix depends on the whole matrix.

    The state is element-wise, and sharded as that of others. A step has three parts: each rank
    computes a :meth:`direction` for its elements; the owner of each matrix, a data-parallel rank,
    receives the whole of it and computes its :meth:`transform`; each rank subtracts the result,
    times the learning rate, from its parameters. Weight decay is decoupled.
    """

    @abstractmethod
    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Update the state and return the direction of some elements, all fp32 and flat.

        Args:
            grad: Averaged and clipped gradients, a copy that may be overwritten.
            state: Values of :attr:`state` by name, changed in place.
        """

    @abstractmethod
    def transform(self, matrices: Sequence[CutMatrix], group: Group) -> list[Tensor]:
        """Return the updates of matrices for a learning rate of 1.

        Args:
            matrices: Directions; matrices of which ranks of ``group`` have parts are listed by all
                of them, in the same order.
            group: Tensor-parallel ranks.

        Returns:
            The part of this rank of each update, in the shape of its values.
        """

    @abstractmethod
    def cost(self, rows: int, columns: int) -> float:
        """Return the floating point operations for a matrix."""
