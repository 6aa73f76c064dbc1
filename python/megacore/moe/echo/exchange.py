"""Weights travel from home experts to their clones, gradients of the clones travel home.

A clone is no parameter. It exists from the moment its weights arrive in a spare slot until the next
layer needs the slot, and again in the backward pass. Its weight gradient is computed in float32
into a buffer of the slot and brought home, where one writer adds it to the gradient of the home
expert, in the order of (rank, slot). Only then does autograd get to see that the parameter's
gradient is there.

How they travel is for :mod:`megacore.moe.echo.memory` and
:mod:`megacore.moe.echo.message_exchange`; here is what autograd sees of it.

Shapes: M rows of this rank's experts, L home experts, k slots, N output features, K input features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megacore.ops.gemm import main_grad_of
from megacore.parallel.turns import running_place

FC1, FC2 = 0, 1

_Set = TypeVar("_Set")


def set_of_turn(sets: Sequence[_Set]) -> _Set:
    """The set of spare slots that the running function may fill.

    Of two microbatches that are computed in turns, each has its own: clones of one stay where they
    are while the other one has its turn.

    Raises:
        ValueError: If there is one set for both.
    """
    place = running_place()
    if place >= len(sets):
        raise ValueError(
            f"two microbatches are computed in turns, but spare slots have {len(sets)} set; make "
            "them with SlotBuffers(num_slots, num_sets=2)"
        )
    return sets[place]


class CloneExchange(ABC):
    """Clones of one layer in one forward pass and its backward pass.

    Make it and call :meth:`start` before tokens are dispatched: in the backward pass gradients of
    clones travel until all that came after it is done. Then :meth:`product` for each projection,
    and :meth:`watch` around the layer's result.

    Args:
        fc1: Weights of the home experts, ``(L, ..., K)``.
        fc2: Weights of the home experts, ``(L, ..., K)``.
    """

    def __init__(self, *, fc1: nn.Parameter, fc2: nn.Parameter) -> None:
        self._params = {FC1: fc1, FC2: fc2}
        self._weights: dict[int, Tensor] = {}
        for projection, param in self._params.items():
            self._weights[projection] = _Collect.apply(param, self, projection)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Start to send weights, which must be current."""
        self.bring((FC1, FC2))

    def product(self, projection: int, rows: Tensor, m_splits: Tensor) -> Tensor:
        """Multiply rows of home experts and clones, ``(M, K)``, by their weights: ``(M, N)``.

        Clones come last, so their weights may still be under way while home experts are computed.
        """
        result: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            rows, self._weights[projection], m_splits, self, projection
        )
        return result

    def watch(self, result: Tensor) -> Tensor:
        """Return the layer's result; its backward pass brings the clones' weights back."""
        watched: Tensor = _Watch.apply(result, self)  # type: ignore[no-untyped-call]
        return watched

    def home_weights(self) -> dict[int, Tensor]:
        """The home experts, ``(L, N, K)``, by projection."""
        return {key: param.detach().flatten(1, -2) for key, param in self._params.items()}

    def home_weight_grad(
        self, projection: int, grad: Tensor, rows: Tensor, m_splits: Tensor, weight: Tensor
    ) -> Tensor:
        """The gradient of the home experts for autograd; nothing of weight if it has gone already.

        Where the parameter has a ``main_grad``, the gradient is added to it here. The result then
        only says that there was one.
        """
        add_to = torch.ops.megacore.grouped_gemm_weight_grad_
        main_grad = main_grad_of(self._params[projection])
        if main_grad is not None:
            total = main_grad.flatten(1, -2)
            add_to(grad, rows, m_splits, total, True)
            self.finish_weight_grads(projection, total)
            return weight.new_zeros(()).expand(weight.shape)
        wide = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        add_to(grad, rows, m_splits, wide, False)
        self.finish_weight_grads(projection, wide)
        return wide.to(weight.dtype)

    @abstractmethod
    def bring(self, order: tuple[int, ...]) -> None:
        """Start to send weights, projections in this order."""

    @abstractmethod
    def multiply(
        self, projection: int, rows: Tensor, m_splits: Tensor, num_local: int, out: Tensor
    ) -> None:
        """Multiply the rows of clones by their weights, for which it waits, into ``out``.

        Args:
            projection: Of which product.
            rows: Of home experts and clones, ``(M, K)``.
            m_splits: How many rows each home expert and each slot has.
            num_local: L.
            out: ``(M, N)``; rows of clones are written.
        """

    @abstractmethod
    def multiply_back(
        self, projection: int, grad: Tensor, m_splits: Tensor, num_local: int, out: Tensor
    ) -> None:
        """The same for the gradient of the rows: from ``(M, N)`` to ``(M, K)``."""

    @abstractmethod
    def start_weight_grads(
        self, projection: int, grad: Tensor, rows: Tensor, m_splits: Tensor, like: Tensor
    ) -> None:
        """Compute the weight gradients of the clones here, and let all begin to travel home.

        Args:
            projection: Of which product.
            grad: Gradient of the product, ``(M, N)``.
            rows: What was multiplied, ``(M, K)``.
            m_splits: How many rows each home expert and each slot has.
            like: The home experts.
        """

    def finish_weight_grads(self, projection: int, total: Tensor) -> None:  # noqa: B027
        """Add gradients of clones elsewhere to those of the home experts, if it must be now.

        Args:
            projection: Of which product.
            total: Gradients of the home experts, ``(L, N, K)``, with their own part.
        """

    def add_to_home(self, projection: int, total: Tensor) -> None:  # noqa: B027
        """The same as late as possible: when autograd is about to report the parameter."""


class _Collect(torch.autograd.Function):
    """A parameter as the products see it; its gradient is complete with those of its clones."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, exchange: CloneExchange, projection: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.exchange, ctx.projection, ctx.param = exchange, projection, param
        return param.flatten(1, -2).view_as(param.flatten(1, -2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        exchange, projection, param = ctx.exchange, ctx.projection, ctx.param
        if grad is None:
            return None, None, None
        main_grad = main_grad_of(param)
        if main_grad is not None:
            exchange.add_to_home(projection, main_grad.flatten(1, -2))
            return None, None, None
        total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        exchange.add_to_home(projection, total)
        return total.to(param.dtype).view_as(param), None, None


class _Product(torch.autograd.Function):
    """A grouped product whose last groups have their weights in the slots."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        m_splits: Tensor,
        exchange: CloneExchange,
        projection: int,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, m_splits)
        ctx.exchange, ctx.projection = exchange, projection
        num_local = weight.shape[0]
        product = torch.ops.megacore.grouped_gemm
        result: Tensor = product(rows, weight, m_splits[:num_local], None, True)
        exchange.multiply(projection, rows, m_splits, num_local, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, m_splits = ctx.saved_tensors
        exchange, projection = ctx.exchange, ctx.projection
        grad = grad.contiguous()
        num_local = weight.shape[0]
        home_splits = m_splits[:num_local]
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.ops.megacore.grouped_gemm_input_grad(grad, weight, home_splits)
            exchange.multiply_back(projection, grad, m_splits, num_local, grad_rows)
        if ctx.needs_input_grad[1]:
            # Home experts meanwhile: the gradients of the clones travel.
            exchange.start_weight_grads(projection, grad, rows, m_splits, weight)
            grad_weight = exchange.home_weight_grad(projection, grad, rows, home_splits, weight)
        return grad_rows, grad_weight, None, None, None


class _Watch(torch.autograd.Function):
    """Notices the beginning of a layer's backward pass."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, exchange: CloneExchange) -> Tensor:
        ctx.exchange = exchange
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.bring((FC2, FC1))  # the last projection is needed first
        return grad, None
