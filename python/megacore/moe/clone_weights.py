"""Weights travel from home experts to their clones, gradients of the clones travel home.

A clone is no parameter. It exists from the moment its weights arrive in a spare slot until the next
layer needs the slot, and again in the backward pass. Its weight gradient is computed in float32
into a buffer of the slot and sent home, where one writer adds it to the gradient of the home
expert, in the order of (rank, slot). Only then does autograd get to see that the parameter's
gradient is there.

Only slots in use travel, each as one message from rank to rank. Both ends know the plan, so nobody
asks and nobody who has nothing to send takes part. Messages between two ranks match by their order:
all ranks of a group run their layers and backward passes in the same one.

Shapes: M rows of this rank's experts, L home experts, k slots, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.moe.offload_plan import OffloadPlan
from megacore.ops.gemm import main_grad_of
from megacore.parallel.process_groups import Group

FC1, FC2 = 0, 1


@dataclass(frozen=True, kw_only=True)
class CloneRoutes:
    """The part of a plan that is about this rank's experts and slots.

    Attributes:
        group: The ranks of the plan, by position.
        num_used: Slots up to the last one in use.
        incoming: Slot and home rank of every clone held here, by slot.
        outgoing: Rank and local home expert of every clone held elsewhere, by rank and slot.
    """

    group: Group
    num_used: int
    incoming: tuple[tuple[int, int], ...]
    outgoing: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, plan: OffloadPlan, group: Group) -> CloneRoutes:
        """The routes of the rank at ``group.position``."""
        local, me = plan.num_experts // plan.num_ranks, group.position
        held = plan.slot_expert[me]
        used = np.flatnonzero(held >= 0)
        home = plan.slot_expert // local
        outgoing = np.argwhere((plan.slot_expert >= 0) & (home == me))
        return cls(
            group=group,
            num_used=int(used[-1]) + 1 if used.size else 0,
            incoming=tuple((int(slot), int(held[slot]) // local) for slot in used),
            outgoing=tuple(
                (int(rank), int(plan.slot_expert[rank, slot]) % local) for rank, slot in outgoing
            ),
        )


class SlotBuffers:
    """The spare slots of a rank: memory for clones, shared by all layers, one user at a time.

    Args:
        num_slots: k.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._weights: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        # Whose clones are here or on their way, and what is under way, by projection.
        self._owner: object = None
        self._arriving: dict[int, list[dist.Work]] = {}
        self._leaving: list[dist.Work] = []
        self._grads_leaving: dict[int, list[dist.Work]] = {}

    def bring(
        self, owner: object, routes: CloneRoutes, weights: dict[int, Tensor], order: tuple[int, ...]
    ) -> int:
        """Start to fill the slots with the clones of ``owner``; if they are here, do nothing.

        Args:
            owner: Who uses the slots: the same object finds its clones still there.
            routes: Which clones.
            weights: The home experts, ``(L, N, K)``, by projection.
            order: In which order projections travel.

        Returns:
            Bytes that this rank sends.
        """
        if self._owner is owner:
            return 0
        self.finish()
        self._owner = owner
        num_bytes = 0
        for projection in order:
            weight = weights[projection]
            slots = self._buffer(self._weights, projection, weight, weight.dtype)
            sent = [(rank, weight[expert]) for rank, expert in routes.outgoing]
            received = [(rank, slots[slot]) for slot, rank in routes.incoming]
            leaving, self._arriving[projection] = _post(sent, received, routes.group, projection)
            self._leaving += leaving
            num_bytes += _bytes_of(sent)
        return num_bytes

    def weights(self, projection: int, num_used: int) -> Tensor:
        """Clones in the first slots, ``(num_used, N, K)``; waits until they have arrived."""
        _wait(self._arriving.pop(projection, []))
        return self._weights[projection][:num_used]

    def grads(self, projection: int, like: Tensor, num_used: int) -> Tensor:
        """Memory for gradients of the first slots; waits until those before have left it."""
        _wait(self._grads_leaving.pop(projection, []))
        dtype = torch.promote_types(like.dtype, torch.float32)
        return self._buffer(self._grads, projection, like, dtype)[:num_used]

    def exchange_grads(
        self, projection: int, routes: CloneRoutes, staging: Tensor
    ) -> tuple[list[dist.Work], int]:
        """Start to send what lies in :meth:`grads` home, and to receive what lies elsewhere.

        Args:
            projection: Of which product.
            routes: Which clones.
            staging: Where gradients of clones held elsewhere go, in the order of ``outgoing``.

        Returns:
            What to wait for before ``staging`` is read, and the bytes that this rank sends.
        """
        sent = [(rank, self._grads[projection][slot]) for slot, rank in routes.incoming]
        received = [(rank, staging[i]) for i, (rank, _) in enumerate(routes.outgoing)]
        leaving, arriving = _post(sent, received, routes.group, 2 + projection)
        # Those before may still be on their way if none leave now: gloo forgets a message whose
        # work is let go of, and the other rank would wait for ever.
        self._grads_leaving.setdefault(projection, []).extend(leaving)
        return arriving, _bytes_of(sent)

    def finish(self) -> None:
        """Wait for all weights under way, also those that nobody came to use."""
        for projection in list(self._arriving):
            _wait(self._arriving.pop(projection))
        _wait(self._leaving)
        self._leaving = []
        self._owner = None

    def num_bytes(self) -> int:
        """Memory held so far; the first forward and backward passes allocate it."""
        tensors = [*self._weights.values(), *self._grads.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _buffer(
        self, buffers: dict[int, Tensor], projection: int, like: Tensor, dtype: torch.dtype
    ) -> Tensor:
        shape = (self.num_slots, *like.shape[1:])
        buffer = buffers.get(projection)
        if buffer is None or buffer.shape != shape or buffer.dtype != dtype:
            buffer = buffers[projection] = like.new_empty(shape, dtype=dtype)
        return buffer


class CloneExchange:
    """Clones of one layer in one forward pass and its backward pass.

    Make it and call :meth:`start` before tokens are dispatched: in the backward pass gradients of
    clones travel until all that came after it is done. Then :meth:`product` for each projection,
    and :meth:`watch` around the layer's result.

    Args:
        slots: The rank's spare slots.
        routes: Which clones there are.
        owner: What is the same object if the forward pass runs again.
        fc1: Weights of the home experts, ``(L, ..., K)``.
        fc2: Weights of the home experts, ``(L, ..., K)``.
        on_sent: Gets the bytes that this rank sends, as it sends them.
    """

    def __init__(
        self,
        slots: SlotBuffers,
        routes: CloneRoutes,
        *,
        owner: object,
        fc1: nn.Parameter,
        fc2: nn.Parameter,
        on_sent: Callable[[int], None],
    ) -> None:
        self._slots = slots
        self._owner, self.routes = owner, routes
        self._on_sent = on_sent
        self._params = {FC1: fc1, FC2: fc2}
        self._weights: dict[int, Tensor] = {}
        for projection, param in self._params.items():
            self._weights[projection] = _Collect.apply(param, self, projection)  # type: ignore[no-untyped-call]
        self._coming_home: dict[int, tuple[Tensor, list[dist.Work]]] = {}

    def start(self) -> None:
        """Start to send weights, which must be current."""
        self._bring((FC1, FC2))

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

    def _bring(self, order: tuple[int, ...]) -> None:
        weights = {key: param.detach().flatten(1, -2) for key, param in self._params.items()}
        self._on_sent(self._slots.bring(self._owner, self.routes, weights, order))

    def bring_back(self) -> None:
        """Start to send weights again, unless they are still there; the last projection first."""
        self._bring((FC2, FC1))

    def clone_weights(self, projection: int) -> Tensor:
        """Weights of the clones here, ``(num_used, N, K)``; waits for them."""
        return self._slots.weights(projection, self.routes.num_used)

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
            add_to(grad, rows, m_splits, main_grad.flatten(1, -2), True)
            return weight.new_zeros(()).expand(weight.shape)
        wide = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        add_to(grad, rows, m_splits, wide, False)
        return wide.to(weight.dtype)

    def add_weight_grads(
        self, projection: int, grad: Tensor, rows: Tensor, m_splits: Tensor, like: Tensor
    ) -> None:
        """Compute the gradients of the clones here and start to send all of them home.

        Args:
            projection: Of which product.
            grad: Gradient of the clones' results.
            rows: Rows of the clones.
            m_splits: How many of them each slot in use has.
            like: The home experts.
        """
        routes = self.routes
        if routes.num_used:
            grads = self._slots.grads(projection, like, routes.num_used)
            torch.ops.megacore.grouped_gemm_weight_grad_(grad, rows, m_splits, grads, False)
        dtype = torch.promote_types(like.dtype, torch.float32)
        staging = like.new_empty(len(routes.outgoing), *like.shape[1:], dtype=dtype)
        arriving, num_bytes = self._slots.exchange_grads(projection, routes, staging)
        self._coming_home[projection] = staging, arriving
        self._on_sent(num_bytes)

    def add_to_home(self, projection: int, total: Tensor) -> None:
        """Add the clones' gradients to those of the home experts, by rank and slot."""
        if projection not in self._coming_home:
            return
        staging, works = self._coming_home.pop(projection)
        _wait(works)
        for value, (_, expert) in zip(staging, self.routes.outgoing, strict=True):
            total[expert].add_(value)


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
        num_home, clone_splits = _clone_rows(m_splits, weight, exchange)
        home_splits = m_splits[: weight.shape[0]]
        product = torch.ops.megacore.grouped_gemm
        result: Tensor = product(rows, weight, home_splits, None, True)
        # Waited for even if there is no row for a clone: what is sent is received.
        clones = exchange.clone_weights(projection) if exchange.routes.num_used else None
        if clones is not None:
            result[num_home:] = product(rows[num_home:], clones, clone_splits, None, True)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, m_splits = ctx.saved_tensors
        exchange, projection = ctx.exchange, ctx.projection
        grad = grad.contiguous()
        num_home, clone_splits = _clone_rows(m_splits, weight, exchange)
        home_splits = m_splits[: weight.shape[0]]
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            product = torch.ops.megacore.grouped_gemm_input_grad
            grad_rows = product(grad, weight, home_splits)
            if exchange.routes.num_used:
                clones = exchange.clone_weights(projection)
                grad_rows[num_home:] = product(grad[num_home:], clones, clone_splits)
        if ctx.needs_input_grad[1]:
            # Home experts meanwhile: the gradients of the clones travel.
            exchange.add_weight_grads(
                projection, grad[num_home:], rows[num_home:], clone_splits, weight
            )
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
        ctx.exchange.bring_back()
        return grad, None


def _clone_rows(m_splits: Tensor, weight: Tensor, exchange: CloneExchange) -> tuple[int, Tensor]:
    """Rows of home experts, and how many each slot in use has."""
    num_local = weight.shape[0]
    clones = m_splits[num_local : num_local + exchange.routes.num_used]
    return (int(m_splits[:num_local].sum()) if exchange.routes.num_used else 0), clones


def _post(
    sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]], group: Group, tag: int
) -> tuple[list[dist.Work], list[dist.Work]]:
    """Start one message per tensor, to or from the position that stands with it.

    All in one call: NCCL would run messages one after another, and two ranks that both send first
    would wait for each other.

    Returns:
        What to wait for before tensors that were sent are written, and before received ones are
        read.
    """
    messages = [(dist.isend, *each) for each in sent] + [(dist.irecv, *each) for each in received]
    if not messages:
        return [], []
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(kind, tensor, group.ranks[position], group.handle, tag)
            for kind, position, tensor in messages
        ]
    )
    if len(works) < len(messages):  # one for all of them
        return works, works
    return works[: len(sent)], works[len(sent) :]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _bytes_of(tensors: list[tuple[int, Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
