"""Spare slots of a rank, and messages that fill them.

Where ranks cannot access each other's memory, clones are sent by point-to-point messages, one per
clone and projection. Only slots in use are sent. Both ends know the plan, so requests are
unnecessary and ranks without clones do not participate. Messages between two ranks match by order:
all ranks of a group run their layers and backward passes in the same order. The host has to read
the plan, which is a host sync; :mod:`megacore.moe.echo.memory` avoids it.

Shapes: L home experts, k slots, N output features, K input features.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megacore import host_values
from megacore.moe.echo.memory import CloneMemory, make_clone_memory
from megacore.moe.echo.memory_trial import clone_fault
from megacore.parallel.process_groups import Group

# After those of weights and gradients of two projections.
_ROWS_TAG = 4


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
    def of(cls, slot_expert: npt.NDArray[np.int64], num_local: int, group: Group) -> CloneRoutes:
        """Extract the routes of the rank at ``group.position``.

        Args:
            slot_expert: The expert cloned into each slot of each rank; -1 where a slot is unused.
            num_local: L.
            group: The ranks of the plan.
        """
        held = slot_expert[group.position]
        used = np.flatnonzero(held >= 0)
        home = slot_expert // num_local
        outgoing = np.argwhere((slot_expert >= 0) & (home == group.position))
        return cls(
            group=group,
            num_used=int(used[-1]) + 1 if used.size else 0,
            incoming=tuple((int(slot), int(held[slot]) // num_local) for slot in used),
            outgoing=tuple(
                (int(rank), int(slot_expert[rank, slot]) % num_local) for rank, slot in outgoing
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

    def fill(
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
        return sum(tensor.nbytes for tensor in self._weights.values())


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
        self._rows: SlotBuffers | None = None

    def rows(self) -> SlotBuffers:
        """Return the slots for rows of small weights of experts, such as adapters."""
        if self._rows is None:
            self._rows = SlotBuffers(self.num_slots, len(self.sets))
        return self._rows

    def memory(self, group: Group, fc1: Tensor, fc2: Tensor) -> tuple[CloneMemory, ...]:
        """Get the slots in peer memory for layers with these weights, ``(L, N, K)``.

        Returns:
            ``num_sets`` sets, the first with gradients; an empty tuple on all ranks if they cannot
            access each other's memory.

        Sync:
            The first call is collective, and moves a pattern through the memory.
        """
        if self._memory is None:
            memory = make_clone_memory(group, self.num_slots, fc1, fc2, num_sets=len(self.sets))
            tried = memory if host_values.has_data(fc1) else ()
            faults = [fault for each in tried if (fault := clone_fault(each, fc1, fc2))]
            if faults:
                text = f"group {group.name} exchanges clones by messages, not in memory of peers"
                warnings.warn(f"{text}: {faults[0]}", stacklevel=2)
            self._memory = () if faults else memory
        return self._memory

    def check(self) -> None:
        """Raise an error if waiting for a rank timed out; see `CloneMemory.check`."""
        for memory in self._memory or ():
            memory.check()
        if self._rows is not None:
            self._rows.check()

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
        grads = sum(tensor.nbytes for tensor in self._grads.values())
        rows = 0 if self._rows is None else self._rows.num_bytes()
        return shared + grads + rows + sum(each.num_bytes for each in self.sets)


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


def exchange_rows(
    sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]], group: Group
) -> None:
    """Send and receive one message per tensor, to or from the group position paired with it.

    Sync:
        Waits for the messages; on gloo the host waits.
    """
    leaving, arriving = _post(sent, received, group, _ROWS_TAG)
    _wait(arriving)
    _wait(leaving)


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
    return sum(tensor.nbytes for _, tensor in tensors)
