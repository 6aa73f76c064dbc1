"""Exchange of clone weights and clone gradients, and its integration in autograd.

A clone is not a parameter. It exists from the transfer of its weights into a spare slot until the
next layer needs the slot, and again in the backward pass. Its weight gradient is computed in
float32 into a buffer of the slot and sent to the home rank, where a single writer adds it to the
gradient of the home expert, in the order of (rank, slot). Autograd reports the parameter's gradient
only after that.

The transports are in :mod:`megacore.moe.echo.transports`; this module contains the autograd
functions.

Shapes: M rows of this rank's experts, L home experts, k slots, N output features, K input features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from megacore.ops.gemm import main_grad_of, product_into
from megacore.ops.grouped_product import grouped_product
from megacore.parallel.interleave import turn_index

FC1, FC2 = 0, 1

_Set = TypeVar("_Set")
# Returns memory for the rows of a product.
ResultMemory: TypeAlias = Callable[[], Tensor] | None


def set_of_turn(sets: Sequence[_Set]) -> _Set:
    """Select the set of spare slots for the running microbatch.

    Two interleaved microbatches use separate sets, so that the clones of one microbatch are
    preserved while the other microbatch runs.

    Raises:
        ValueError: If two microbatches are interleaved, but there is only one set.
    """
    index = turn_index()
    if index >= len(sets):
        raise ValueError(
            f"two microbatches are computed in turns, but spare slots have {len(sets)} set; make "
            "them with SlotBuffers(num_slots, num_sets=2)"
        )
    return sets[index]


class LayerClones(ABC):
    """Clones of one layer in one forward pass and its backward pass.

    Construct it and call :meth:`send_weights` before tokens are dispatched: the backward pass then
    overlaps the gradient transfers of clones with everything after that point of the forward pass.
    Then call :meth:`product` for each projection, and :meth:`send_again_in_backward` on the layer's
    result.

    Args:
        fc1: Weights of the home experts, ``(L, ..., K)``.
        fc2: Weights of the home experts, ``(L, ..., K)``.

    Attributes:
        expected_rows: Expected rows of a home expert or clone, from :meth:`product`.
    """

    def __init__(self, *, fc1: nn.Parameter, fc2: nn.Parameter) -> None:
        self._params = {FC1: fc1, FC2: fc2}
        self._weights: dict[int, Tensor] = {}
        self.expected_rows = 0
        for projection, param in self._params.items():
            self._weights[projection] = _Collect.apply(param, self, projection)  # type: ignore[no-untyped-call]

    def product(
        self,
        projection: int,
        rows: Tensor,
        m_splits: Tensor,
        *,
        clear_padding: bool = True,
        expected_rows: int = 0,
        out: ResultMemory = None,
        grad_out: ResultMemory = None,
    ) -> Tensor:
        """Multiply rows of home experts and clones, ``(M, K)``, by their weights: ``(M, N)``.

        Clones are computed last, so their weights may be in flight while home experts are computed.
        For the hints, of which ``expected_rows`` is the same for all projections, and the memory of
        the result and the gradient see :func:`megacore.ops.grouped_gemm`.
        """
        self.expected_rows = expected_rows
        weight, memory = self._weights[projection], (out, grad_out)
        result: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            rows, weight, m_splits, self, projection, clear_padding, memory
        )
        return result

    def send_again_in_backward(self, result: Tensor) -> Tensor:
        """Return ``result``; its backward pass starts with :meth:`send_weights`."""
        returned: Tensor = _SendAgain.apply(result, self)  # type: ignore[no-untyped-call]
        return returned

    def home_weights(self) -> dict[int, Tensor]:
        """Collect the weights of the home experts, ``(L, N, K)``, by projection."""
        return {key: param.detach().flatten(1, -2) for key, param in self._params.items()}

    def home_weight_grad(
        self, projection: int, grad: Tensor, rows: Tensor, m_splits: Tensor, weight: Tensor
    ) -> Tensor:
        """Compute the weight gradient of the home experts for autograd.

        If the parameter has a ``main_grad``, the gradient is accumulated into ``main_grad`` here,
        and the result is a placeholder of zeros.
        """
        main_grad = main_grad_of(self._params[projection])
        if main_grad is None:
            wide = torch.promote_types(weight.dtype, torch.float32)
            total = torch.empty_like(weight, dtype=wide)
        else:
            total = main_grad.flatten(1, -2)
        grouped_product(
            "weight_grad",
            grad,
            rows,
            m_splits,
            out=total,
            accumulate=main_grad is not None,
            expected_rows=self.expected_rows,
        )
        self.finish_weight_grads(projection, total)
        if main_grad is None:
            return total.to(weight.dtype)
        return weight.new_zeros(()).expand(weight.shape)

    @abstractmethod
    def send_weights(self, order: tuple[int, ...] = (FC1, FC2)) -> None:
        """Start sending weights, projections in this order; the parameters must be up to date."""

    @abstractmethod
    def multiply(
        self,
        projection: int,
        rows: Tensor,
        m_splits: Tensor,
        num_local: int,
        out: Tensor,
        *,
        is_backward: bool,
    ) -> None:
        """Wait for the clones' weights and multiply the clones' rows by them into ``out``.

        Args:
            projection: Index of the projection.
            rows: Rows of home experts and clones, ``(M, K)``; their gradients, ``(M, N)``, in the
                backward pass.
            m_splits: Number of rows of each home expert and each slot.
            num_local: L.
            out: ``(M, N)``, or the gradients of the input, ``(M, K)``; rows of clones are written.
            is_backward: Compute the gradient of the input.
        """

    @abstractmethod
    def start_weight_grads(
        self, projection: int, grad: Tensor, rows: Tensor, m_splits: Tensor, like: Tensor
    ) -> None:
        """Compute the weight gradients of this rank's clones, and start sending them home.

        Args:
            projection: Index of the projection.
            grad: Gradient of the product, ``(M, N)``.
            rows: Input rows of the product, ``(M, K)``.
            m_splits: Number of rows of each home expert and each slot.
            like: Weights of the home experts.
        """

    def finish_weight_grads(self, projection: int, total: Tensor) -> None:  # noqa: B027
        """Add remote clones' gradients to those of the home experts, if it must happen now.

        Args:
            projection: Index of the projection.
            total: Gradients of the home experts, ``(L, N, K)``, including the local contribution.
        """

    def add_to_home(self, projection: int, total: Tensor) -> None:  # noqa: B027
        """Add remote clones' gradients as late as possible, before autograd reports the sum."""


class _Collect(torch.autograd.Function):
    """Identity on a parameter whose backward pass adds the gradients of the clones."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, clones: LayerClones, projection: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.clones, ctx.projection, ctx.param = clones, projection, param
        return param.flatten(1, -2).view_as(param.flatten(1, -2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        clones, projection, param = ctx.clones, ctx.projection, ctx.param
        if grad is None:
            return None, None, None
        main_grad = main_grad_of(param)
        if main_grad is not None:
            clones.add_to_home(projection, main_grad.flatten(1, -2))
            return None, None, None
        total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        clones.add_to_home(projection, total)
        return total.to(param.dtype).view_as(param), None, None


class _Product(torch.autograd.Function):
    """Grouped GEMM whose last groups take their weights from the spare slots."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        m_splits: Tensor,
        clones: LayerClones,
        projection: int,
        clear_padding: bool,
        memory: tuple[ResultMemory, ResultMemory],
    ) -> Tensor:
        # Only the gradient of the weights needs the rows.
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight, m_splits)
        ctx.clones, ctx.projection = clones, projection
        ctx.clear_padding = clear_padding
        out, ctx.grad_out = memory
        num_local = weight.shape[0]
        hints = clear_padding, clones.expected_rows
        splits = m_splits[:num_local]
        result = product_into(out, "forward", rows, weight, splits, *hints)
        clones.multiply(projection, rows, m_splits, num_local, result, is_backward=False)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, m_splits = ctx.saved_tensors
        clones, projection = ctx.clones, ctx.projection
        grad = grad.contiguous()
        num_local = weight.shape[0]
        home_splits = m_splits[:num_local]
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            hints = ctx.clear_padding, clones.expected_rows
            operands = grad, weight, home_splits
            grad_rows = product_into(ctx.grad_out, "input_grad", *operands, *hints)
            clones.multiply(projection, grad, m_splits, num_local, grad_rows, is_backward=True)
        if ctx.needs_input_grad[1]:
            # The transfer of clone gradients overlaps with the home experts' gradients.
            clones.start_weight_grads(projection, grad, rows, m_splits, weight)
            grad_weight = clones.home_weight_grad(projection, grad, rows, home_splits, weight)
        return grad_rows, grad_weight, *(None,) * 5


class _SendAgain(torch.autograd.Function):
    """Identity that starts sending the clones' weights at the beginning of the backward pass."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, clones: LayerClones) -> Tensor:
        ctx.clones = clones
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.clones.send_weights((FC2, FC1))  # the last projection is needed first
        return grad, None
