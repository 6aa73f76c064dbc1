"""The experts of one rank: two grouped GEMMs with an activation in between.

Shapes: M rows of all local experts, L local experts, F inner width of an expert on this rank (its
shard, if etp splits experts), H hidden.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from megacore.moe.dispatchers import ExpertRows
from megacore.moe.echo.exchange import FC1, FC2, CloneExchange
from megacore.ops.activations import gelu, swiglu
from megacore.ops.gemm import grouped_gemm, main_grad_of

Activation = Literal["swiglu", "gelu"]


class GroupedExperts(nn.Module):
    """Grouped MLP ``fc2(activation(fc1(x)))`` over each expert's rows, times each row's weight.

    The weight is applied between the two products, where rows are narrow; since ``fc2`` is linear
    and has no bias, this is equivalent to weighting the result.

    Args:
        fc1: ``(L, 2, F, H)`` for SwiGLU, gate first; ``(L, F, H)`` for GELU.
        fc2: ``(L, H, F)``.
        activation: Activation between ``fc1`` and ``fc2``.

    Raises:
        ValueError: If the shapes are inconsistent.
    """

    def __init__(self, fc1: nn.Parameter, fc2: nn.Parameter, *, activation: Activation) -> None:
        super().__init__()
        num_local, hidden, width = fc2.shape
        inner = (2, width) if activation == "swiglu" else (width,)
        if tuple(fc1.shape) != (num_local, *inner, hidden):
            raise ValueError(
                f"fc1 has shape {tuple(fc1.shape)}, but {activation} before fc2 "
                f"{tuple(fc2.shape)} needs {(num_local, *inner, hidden)}"
            )
        self.fc1 = fc1
        self.fc2 = fc2
        self.activation = activation

    def forward(self, arrived: ExpertRows, clones: CloneExchange | None = None) -> Tensor:
        """Compute the expert outputs.

        Args:
            arrived: Rows of the local experts, followed by the rows of ``clones``.
            clones: Clone exchange of this layer: clones of this rank's experts on other ranks, and
                of other ranks' experts here.

        Returns:
            ``(M, H)``; a partial sum if etp splits experts.
        """
        activate = swiglu if self.activation == "swiglu" else gelu
        rows, probs, m_splits = arrived.rows, arrived.probs, arrived.m_splits
        if clones is not None:
            inner = clones.product(FC1, rows, m_splits)
            return clones.product(FC2, activate(inner, probs), m_splits)
        return _product(activate(_product(rows, self.fc1, m_splits), probs), self.fc2, m_splits)


def _product(rows: Tensor, weight: nn.Parameter, m_splits: Tensor) -> Tensor:
    main_grad = main_grad_of(weight)
    return grouped_gemm(
        rows,
        weight.flatten(1, -2),
        m_splits,
        main_grad=None if main_grad is None else main_grad.flatten(1, -2),
    )
