"""Clone exchange by point-to-point messages, one per clone and projection.

Only slots in use are sent. Both ends know the plan, so requests are unnecessary and ranks without
clones do not participate. Messages between two ranks match by order: all ranks of a group run their
layers and backward passes in the same order. The host has to read the plan, which is a host sync;
:mod:`megacore.moe.echo.memory` avoids it.

Shapes: L home experts, k slots, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.moe.echo.clones import CloneExchange, set_of_turn
from megacore.moe.echo.memory import CloneMemory, make_clone_memory
from megacore.moe.echo.plan import OffloadPlan
from megacore.parallel.process_groups import Group


@dataclass(frozen=True, kw_only=True)
class CloneRoutes:
    """Part of a plan that concerns this rank's experts and slots.

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
        """Extract the routes of the rank at ``group.position``."""
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


class WeightSlots:
    """Set of spare slots for weights, with one owner at a time.

    Args:
        num_slots: k.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._weights: dict[int, Tensor] = {}
        # Owner of the clones present or in flight, and the transfers in flight, by projection.
        self._owner: object = None
        self._arriving: dict[int, list[dist.Work]] = {}
        self._leaving: list[dist.Work] = []

    def bring(
        self, owner: object, routes: CloneRoutes, weights: dict[int, Tensor], order: tuple[int, ...]
    ) -> int:
        """Start filling the slots with the clones of ``owner``, unless they are already present.

        Args:
            owner: Identity of the user: clones are reused if the owner is the same object.
            routes: The clones to transfer.
            weights: The home experts, ``(L, N, K)``, by projection.
            order: Order of the projections.

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
            slots = _buffer(self._weights, projection, self._num_slots, weight, weight.dtype)
            sent = [(rank, weight[expert]) for rank, expert in routes.outgoing]
            received = [(rank, slots[slot]) for slot, rank in routes.incoming]
            leaving, self._arriving[projection] = _post(sent, received, routes.group, projection)
            self._leaving += leaving
            num_bytes += _bytes_of(sent)
        return num_bytes

    def weights(self, projection: int, num_used: int) -> Tensor:
        """Wait for the clones in the first slots, ``(num_used, N, K)``."""
        _wait(self._arriving.pop(projection, []))
        return self._weights[projection][:num_used]

    def finish(self) -> None:
        """Wait for all weights in flight, including unused ones."""
        for projection in list(self._arriving):
            _wait(self._arriving.pop(projection))
        _wait(self._leaving)
        self._leaving = []
        self._owner = None

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._weights.values())


class SlotBuffers:
    """Spare slots of a rank: memory for clones, shared by all layers.

    Weights are in use from before the dispatch until the multiplication, so interleaved
    microbatches need separate sets. Gradients are written and sent without yielding to the other
    microbatch, so one set is sufficient.

    Args:
        num_slots: k.
        num_sets: Microbatches that may be inside layers at a time: 2 if they are interleaved.

    Attributes:
        num_slots: k.
        sets: Slots for weights that are sent as messages.
    """

    def __init__(self, num_slots: int, num_sets: int = 1) -> None:
        self.num_slots = num_slots
        self.sets = tuple(WeightSlots(num_slots) for _ in range(num_sets))
        self._grads: dict[int, Tensor] = {}
        self._grads_leaving: dict[int, list[dist.Work]] = {}
        self._memory: tuple[CloneMemory, ...] | None = None

    def memory(self, group: Group, fc1: Tensor, fc2: Tensor) -> tuple[CloneMemory, ...]:
        """Get the slots in peer memory for layers with these weights, ``(L, N, K)``.

        Returns:
            ``num_sets`` sets, the first with gradients; an empty tuple on all ranks if they cannot
            access each other's memory.

        Sync:
            The first call is collective.
        """
        if self._memory is None:
            self._memory = make_clone_memory(
                group, self.num_slots, fc1, fc2, num_sets=len(self.sets)
            )
        return self._memory

    def check(self) -> None:
        """Raise an error if waiting for a rank timed out; see `CloneMemory.check`."""
        for memory in self._memory or ():
            memory.check()

    def grads(self, projection: int, like: Tensor, num_used: int) -> Tensor:
        """Get gradient buffers of the first slots; waits until earlier sends from them are done."""
        _wait(self._grads_leaving.pop(projection, []))
        dtype = torch.promote_types(like.dtype, torch.float32)
        return _buffer(self._grads, projection, self.num_slots, like, dtype)[:num_used]

    def exchange_grads(
        self, projection: int, routes: CloneRoutes, staging: Tensor
    ) -> tuple[list[dist.Work], int]:
        """Start sending the gradients in :meth:`grads` home, and receiving those of remote clones.

        Args:
            projection: Index of the projection.
            routes: The clones.
            staging: Receive buffer for the gradients of remote clones, in the order of
                ``outgoing``.

        Returns:
            Work handles to wait for before reading ``staging``, and the bytes that this rank sends.
        """
        sent = [(rank, self._grads[projection][slot]) for slot, rank in routes.incoming]
        received = [(rank, staging[i]) for i, (rank, _) in enumerate(routes.outgoing)]
        leaving, arriving = _post(sent, received, routes.group, 2 + projection)
        # Extend rather than replace: earlier sends may be in flight if this call sends nothing,
        # and gloo cancels a message whose work handle is released, which would hang the receiver.
        self._grads_leaving.setdefault(projection, []).extend(leaving)
        return arriving, _bytes_of(sent)

    def num_bytes(self) -> int:
        """Count the bytes allocated so far; the first forward and backward passes allocate."""
        shared = sum(memory.num_bytes for memory in self._memory or ())
        grads = sum(tensor.numel() * tensor.element_size() for tensor in self._grads.values())
        return shared + grads + sum(each.num_bytes for each in self.sets)


class MessageClones(CloneExchange):
    """Clones of one layer in one forward pass and its backward pass, sent as messages.

    Args:
        slots: The rank's spare slots.
        routes: The clones of this rank.
        owner: Identity of the forward pass; the same object when it is recomputed.
        fc1: Weights of the home experts, ``(L, ..., K)``.
        fc2: Weights of the home experts, ``(L, ..., K)``.
        on_sent: Callback with the bytes of each send of this rank.
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
        super().__init__(fc1=fc1, fc2=fc2)
        self._slots = slots
        self._filled = slots.sets[0]  # the set that has the clones, from `bring` on
        self._owner, self._routes = owner, routes
        self._on_sent = on_sent
        self._coming_home: dict[int, tuple[Tensor, list[dist.Work]]] = {}

    def bring(self, order: tuple[int, ...]) -> None:
        """Start sending weights, unless the slots still hold them. See `CloneExchange`."""
        self._filled = set_of_turn(self._slots.sets)
        self._on_sent(self._filled.bring(self._owner, self._routes, self.home_weights(), order))

    def multiply(
        self, projection: int, rows: Tensor, m_splits: Tensor, num_local: int, out: Tensor
    ) -> None:
        """Wait for the clones in use, even without rows for them. See `CloneExchange`."""
        self._multiply(torch.ops.megacore.grouped_gemm, projection, rows, m_splits, num_local, out)

    def multiply_back(
        self, projection: int, grad: Tensor, m_splits: Tensor, num_local: int, out: Tensor
    ) -> None:
        """Compute the input gradient of the clones' rows. See `CloneExchange`."""
        product = torch.ops.megacore.grouped_gemm_input_grad
        self._multiply(product, projection, grad, m_splits, num_local, out)

    def _multiply(
        self,
        product: Callable[..., Tensor],
        projection: int,
        rows: Tensor,
        m_splits: Tensor,
        num_local: int,
        out: Tensor,
    ) -> None:
        if self._routes.num_used:
            num_home, splits = self._clone_rows(m_splits, num_local)
            clones = self._filled.weights(projection, self._routes.num_used)
            more = () if product is torch.ops.megacore.grouped_gemm_input_grad else (None, True)
            out[num_home:] = product(
                rows[num_home:], clones, splits, *more, expected_rows=self.expected_rows
            )

    def start_weight_grads(
        self, projection: int, grad: Tensor, rows: Tensor, m_splits: Tensor, like: Tensor
    ) -> None:
        """Compute the gradients of this rank's clones and send them. See `CloneExchange`."""
        routes = self._routes
        if routes.num_used:
            num_home, splits = self._clone_rows(m_splits, like.shape[0])
            grads = self._slots.grads(projection, like, routes.num_used)
            torch.ops.megacore.grouped_gemm_weight_grad_(
                grad[num_home:],
                rows[num_home:],
                splits,
                grads,
                False,
                expected_rows=self.expected_rows,
            )
        dtype = torch.promote_types(like.dtype, torch.float32)
        staging = like.new_empty(len(routes.outgoing), *like.shape[1:], dtype=dtype)
        arriving, num_bytes = self._slots.exchange_grads(projection, routes, staging)
        self._coming_home[projection] = staging, arriving
        self._on_sent(num_bytes)

    def add_to_home(self, projection: int, total: Tensor) -> None:
        """Wait for the remote gradients and add them. See `CloneExchange`."""
        if projection not in self._coming_home:
            return
        staging, works = self._coming_home.pop(projection)
        _wait(works)
        for value, (_, expert) in zip(staging, self._routes.outgoing, strict=True):
            total[expert].add_(value)

    def _clone_rows(self, m_splits: Tensor, num_local: int) -> tuple[int, Tensor]:
        """Compute the rows of all home experts, and the rows of each slot in use."""
        clones = m_splits[num_local : num_local + self._routes.num_used]
        return int(m_splits[:num_local].sum()), clones


def _post(
    sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]], group: Group, tag: int
) -> tuple[list[dist.Work], list[dist.Work]]:
    """Start one message per tensor, to or from the group position paired with it.

    Messages are batched in one call: NCCL would serialize individual messages, and two ranks that
    both send first would deadlock.

    Returns:
        Work handles to wait for before writing sent tensors, and before reading received tensors.
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


def _buffer(
    buffers: dict[int, Tensor], projection: int, num_slots: int, like: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the buffer for this projection, reallocated if the expert shape changed."""
    shape = (num_slots, *like.shape[1:])
    buffer = buffers.get(projection)
    if buffer is None or buffer.shape != shape or buffer.dtype != dtype:
        buffer = buffers[projection] = like.new_empty(shape, dtype=dtype)
    return buffer


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _bytes_of(tensors: list[tuple[int, Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
