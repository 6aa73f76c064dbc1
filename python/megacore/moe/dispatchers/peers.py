"""Peer memory of a group, which every member can write and read.

Rows are exchanged by one-sided access instead of collectives: a member *pushes* its rows into the
buffers of others and sets a flag, or publishes its rows for the others to *pull*. Push and pull are
each other's gradient. Row positions follow from counts that the members exchange first
(``cpp/include/megacore/moe/peer_rows.h``).

Shapes: T tokens of this rank, k experts per token, E experts, L experts of this rank, G members of
the group, C rows of a member's receive buffer, H hidden.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megacore._core import (
    PEER_SLOTS,
    PEER_WINDOW_PARTS,
    HostDtype,
    PeerExchange,
    PeerLayout,
    PeerShape,
)
from megacore.errors import ConfigError, MegacoreError
from megacore.moe.dispatchers.base import ExpertPlacement, constant
from megacore.parallel.host_memory import HOST_DTYPES
from megacore.parallel.process_groups import Group
from megacore.parallel.turns import running_place


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerPlan:
    """Row assignment of a member, computed from the counts of all members.

    Attributes:
        rows: Where this rank's copies go, as in `CopyMap`.
        kept: Copies of this rank that have a row, ``(E,)`` int64.
        m_splits: Rows received for each local expert, ``(L,)`` int64.
        totals: Rows received; copies of this rank that are not sent; of them those for lack of
            room, ``(3,)`` int64.
    """

    rows: Tensor
    kept: Tensor
    m_splits: Tensor
    totals: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyMap:
    """Locations of the copies of this rank's tokens.

    Attributes:
        rows: ``(T, k * r)`` int64, where ``r`` members share an expert, and each gets a copy: -1
            for a copy that is not sent; ``a``, its row's address ``member * C + row``, for a copy
            that travels; ``-2 - a`` for a copy whose row is that of an earlier copy of the token on
            the same member.
        num_choices: k.
        capacity: C.
        num_arrived: Rows that this member receives, int64 scalar.
    """

    rows: Tensor
    num_choices: int
    capacity: int
    num_arrived: Tensor

    @property
    def repeats(self) -> int:
        """Number of members that share an expert."""
        return self.rows.shape[1] // self.num_choices if self.num_choices else 1


class Peers(ABC):
    """Peer memory of a group of at least two members, shared by all layers of a model.

    Members call all methods in the same order, with tensors of the same shapes. At most
    ``PEER_SLOTS`` row exchanges are in flight at a time.

    Args:
        group: The members.
        row_bytes: Size of the largest row, if known; avoids growing the buffers later.

    Attributes:
        group: The members.
    """

    def __init__(self, group: Group, *, row_bytes: int = 0) -> None:
        self.group = group
        self._row_bytes = row_bytes
        # Pulls that are reserved and not started, by the place of their microbatch.
        self._reserved: dict[int, PendingPull] = {}

    @abstractmethod
    def plan_copies(self, ids_Tk: Tensor, placement: ExpertPlacement, capacity: int) -> PeerPlan:
        """Exchange the copies per expert with all members, and assign rows.

        Args:
            ids_Tk: Expert of each copy, ``(T, k)`` int64; -1 for a copy that is not sent.
            placement: Placement of the experts.
            capacity: C.
        """

    @abstractmethod
    def start_push(self, x_TH: Tensor, probs_Tk: Tensor | None, copies: CopyMap) -> PendingTransfer:
        """Start pushing tokens, and a number per copy, to the members of their experts."""

    @abstractmethod
    def finish_push(
        self, ticket: PendingTransfer, rows_CH: Tensor, probs_C: Tensor | None, copies: CopyMap
    ) -> None:
        """Wait for pushed rows and copy them to ``rows_CH``; the others are not written."""

    @abstractmethod
    def reserve_pull(self, copies: CopyMap, like: Tensor) -> PendingPull:
        """Reserve a slot, and wait until all members have read its previous rows.

        Args:
            copies: Locations of the copies of this rank's tokens.
            like: A tensor with the width and dtype of the rows.
        """

    @abstractmethod
    def start_pull(
        self,
        pull: PendingPull,
        rows_CH: Tensor,
        probs_C: Tensor | None,
        x_TH: Tensor,
        probs_Tk: Tensor | None,
    ) -> None:
        """Publish rows, and a number per row, and start pulling those of this rank's tokens.

        Args:
            pull: From `reserve_pull`.
            rows_CH: Results of this rank's experts. If they are ``pull.rows``, nothing is copied.
            probs_C: Number per row, float32.
            x_TH: Receives the sum of each token's rows, in order of choices, by `finish_pull`.
            probs_Tk: Receives the number of each copy.
        """

    @abstractmethod
    def finish_pull(self, pull: PendingPull) -> None:
        """Wait for the sums of `start_pull`."""

    def _keep_reserved(self, pull: PendingPull) -> PendingPull:
        self._reserved[running_place()] = pull
        return pull

    def _starts_reserved(self, pull: PendingPull) -> None:
        reserved = self._reserved.pop(running_place(), None)
        assert reserved is pull, "nothing is exchanged between a reservation and its start"

    def _abandon_reserved(self) -> None:
        """Free the slot of a pull that was not started, before the microbatch's next exchange.

        The second run of a recomputed function ends after its last saved tensor, which may be
        between a product that writes to a slot and the pull. A pull of nothing then keeps others
        from writing to the slot before this rank's product has.
        """
        pull = self._reserved.get(running_place())
        if pull is not None:
            pull.copies = replace(pull.copies, rows=pull.copies.rows[:0])
            self.start_pull(pull, pull.rows, None, pull.rows[:0], None)
            self.finish_pull(pull)

    @abstractmethod
    def forget_exchanges(self) -> None:
        """Free all slots after all members have aborted the same capture.

        Exchanges that a capture started and did not finish never ran, but occupy slots, possibly
        different slots on each member.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise an error if waiting for a peer timed out.

        Raises:
            PeerLostError: With the rank of the peer.

        Sync:
            Waits for a GPU, whose kernels cannot raise errors themselves.
        """


class Slots:
    """Free list of the slots of one memory. All members take and free slots in the same order.

    Example:
        >>> slots = Slots()
        >>> first, second = slots.take(), slots.take()
        >>> slots.free(second)
        >>> first, second, slots.take()
        (0, 1, 1)
    """

    def __init__(self) -> None:
        self.free_all()

    def take(self) -> int:
        """Take the least recently used free slot.

        Raises:
            RuntimeError: If no slot is free.
        """
        if not self._free:
            raise RuntimeError(
                f"more than {PEER_SLOTS} exchanges of rows are under way in one group; finish one "
                "first, or set debug.static_transport = collective"
            )
        return self._free.pop(0)

    def free(self, slot: int) -> None:
        """Mark a slot as free."""
        self._free.append(slot)

    @property
    def any_taken(self) -> bool:
        """Return whether an exchange is in flight."""
        return len(self._free) < PEER_SLOTS

    def free_all(self) -> None:
        """Free all slots and restore the initial order."""
        self._free = list(range(PEER_SLOTS))


class PendingTransfer:
    """Row exchange in flight.

    Args:
        memory: Memory of the exchange, referenced until the exchange is finished.
        slots: The slots of that memory.
    """

    def __init__(self, memory: object, slots: Slots) -> None:
        self.memory = memory
        self.slot = slots.take()
        self._slots = slots

    def finish(self) -> None:
        """Free the slot."""
        self._slots.free(self.slot)


class PendingPull(PendingTransfer):
    """Pull for which a slot is reserved.

    Args:
        memory: As of `PendingTransfer`.
        slots: The slots of that memory.
        copies: Locations of the copies of this rank's tokens.

    Attributes:
        copies: As given.
        rows: This rank's rows in the slot, ``(C, H)``: memory that others read once the pull has
            started. The product that computes the rows may write them there.
    """

    rows: Tensor

    def __init__(self, memory: object, slots: Slots, copies: CopyMap) -> None:
        super().__init__(memory, slots)
        self.copies = copies

    def holds(self, rows_CH: Tensor) -> bool:
        """Return whether these rows are in the slot."""
        return rows_CH.data_ptr() == self.rows.data_ptr()


class _HostMemory:
    def __init__(self, exchange: PeerExchange, layout: PeerLayout) -> None:
        self.exchange = exchange
        self.layout = layout
        self.slots = Slots()

    def rows_at(self, address: int, num_rows: int, like: Tensor) -> Tensor:
        """Make a tensor of rows that are in this memory, and keep the memory while it is used."""
        numel = num_rows * like.shape[1]
        if numel == 0:
            return like.new_empty(num_rows, like.shape[1])
        memory = (ctypes.c_uint8 * (numel * like.element_size())).from_address(address)
        memory.owner = self.exchange  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=like.dtype).view(num_rows, -1)


class HostPeers(Peers):
    """Shared host memory between processes of one host.

    Every wait is bounded by the group's timeout and then raises a ``RuntimeError`` with the missing
    rank.

    Raises:
        ConfigError: If the group has no shared memory.
    """

    def __init__(self, group: Group, *, row_bytes: int = 0) -> None:
        super().__init__(group, row_bytes=row_bytes)
        if group.host is None:
            raise ConfigError(no_peers(group.describe()))
        self._host = group.host
        self._memory: _HostMemory | None = None
        # Tensors that pulls in flight write.
        self._sums: dict[PendingPull, tuple[Tensor, Tensor | None]] = {}

    def plan_copies(self, ids_Tk: Tensor, placement: ExpertPlacement, capacity: int) -> PeerPlan:
        """Exchange counts through shared memory; waits for all members. See `Peers`.

        Raises:
            ValueError: On every member, if capacities differ. This is detected before memory for
                rows is allocated, which is collective.
        """
        num_experts, num_local = placement.num_experts, placement.num_local
        exchange = self._reserve(num_experts, 0, self._row_bytes).exchange
        shape = PeerShape(
            num_members=self.group.size,
            position=self.group.position,
            num_experts=num_experts,
            num_parts=placement.ep_size,
            part=placement.ep_position,
            capacity=capacity,
        )
        ids_Tk, members = ids_Tk.contiguous(), constant(placement.members, ids_Tk.device)
        num_tokens, num_choices = ids_Tk.shape
        plan = PeerPlan(
            rows=ids_Tk.new_empty(num_tokens, num_choices * members.shape[1]),
            kept=ids_Tk.new_empty(num_experts),
            m_splits=ids_Tk.new_empty(num_local),
            totals=ids_Tk.new_empty(3),
        )
        exchange.plan_copies(
            shape=shape,
            experts=ids_Tk.data_ptr(),
            members=members.data_ptr(),
            num_tokens=num_tokens,
            num_choices=num_choices,
            repeats=members.shape[1],
            row_map=plan.rows.data_ptr(),
            kept=plan.kept.data_ptr(),
            m_splits=plan.m_splits.data_ptr(),
            totals=plan.totals.data_ptr(),
        )
        return plan

    def start_push(self, x_TH: Tensor, probs_Tk: Tensor | None, copies: CopyMap) -> PendingTransfer:
        """Write each copy to its row in the peers' buffers. See `Peers`."""
        self._abandon_reserved()
        x_TH, probs_Tk = x_TH.contiguous(), _contiguous(probs_Tk)
        memory = self._reserve(0, copies.capacity, row_bytes_of(x_TH))
        ticket = PendingTransfer(memory, memory.slots)
        memory.exchange.start_push(
            slot=ticket.slot,
            tokens=x_TH.data_ptr(),
            probs=0 if probs_Tk is None else probs_Tk.data_ptr(),
            width=x_TH.shape[1],
            dtype=_dtype(x_TH),
            **_map(copies),
        )
        return ticket

    def finish_push(
        self, ticket: PendingTransfer, rows_CH: Tensor, probs_C: Tensor | None, copies: CopyMap
    ) -> None:
        """Copy the received rows. See `Peers`."""
        _exchange_of(ticket).finish_push(
            slot=ticket.slot,
            rows=rows_CH.data_ptr(),
            probs=0 if probs_C is None else probs_C.data_ptr(),
            width=rows_CH.shape[1],
            dtype=_dtype(rows_CH),
            num_arrived=_number(copies.num_arrived),
            capacity=copies.capacity,
        )
        _finish(ticket, rows_CH, probs_C)

    def reserve_pull(self, copies: CopyMap, like: Tensor) -> PendingPull:
        """Wait for a slot of shared memory. See `Peers`."""
        self._abandon_reserved()
        memory = self._reserve(0, copies.capacity, row_bytes_of(like))
        pull = PendingPull(memory, memory.slots, copies)
        address = memory.exchange.reserve_pull(slot=pull.slot)
        pull.rows = memory.rows_at(address, copies.capacity, like)
        return self._keep_reserved(pull)

    def start_pull(
        self,
        pull: PendingPull,
        rows_CH: Tensor,
        probs_C: Tensor | None,
        x_TH: Tensor,
        probs_Tk: Tensor | None,
    ) -> None:
        """Publish rows in shared memory. See `Peers`."""
        self._starts_reserved(pull)
        rows_CH, probs_C = rows_CH.contiguous(), _contiguous(probs_C)
        _exchange_of(pull).start_pull(
            slot=pull.slot,
            rows=0 if pull.holds(rows_CH) else rows_CH.data_ptr(),
            probs=0 if probs_C is None else probs_C.data_ptr(),
            width=rows_CH.shape[1],
            dtype=_dtype(rows_CH),
            num_rows=_number(pull.copies.num_arrived),
        )
        self._sums[pull] = x_TH, probs_Tk

    def finish_pull(self, pull: PendingPull) -> None:
        """Sum rows directly from shared memory. See `Peers`."""
        x_TH, probs_Tk = self._sums.pop(pull)
        _exchange_of(pull).finish_pull(
            slot=pull.slot,
            tokens=x_TH.data_ptr(),
            probs=0 if probs_Tk is None else probs_Tk.data_ptr(),
            width=x_TH.shape[1],
            dtype=_dtype(x_TH),
            **_map(pull.copies),
        )
        _finish(pull, x_TH, probs_Tk)

    def forget_exchanges(self) -> None:
        """Free all slots. See `Peers`."""
        self._reserved.clear()
        self._sums.clear()
        if self._memory is not None:
            self._memory.slots.free_all()

    def check(self) -> None:
        """Do nothing: every wait on the host raises its own error."""

    def _reserve(self, num_experts: int, capacity: int, row_bytes: int) -> _HostMemory:
        """Return the memory, reallocated if it is too small; reallocation is collective."""
        old = self._memory
        sizes = (num_experts, capacity, row_bytes)
        if old is not None:
            had = (old.layout.max_experts, old.layout.max_capacity, old.layout.max_row_bytes)
            if all(size <= limit for size, limit in zip(sizes, had, strict=True)):
                return old
            sizes = (max(num_experts, had[0]), max(capacity, had[1]), max(row_bytes, had[2]))
        layout = PeerLayout(
            num_members=self.group.size,
            max_experts=sizes[0],
            max_capacity=sizes[1],
            max_row_bytes=sizes[2],
        )
        window = self._host.make_window(layout.bytes, num_parts=PEER_WINDOW_PARTS)
        if window is None:
            raise MegacoreError(
                f"group {self.group.name}: not every rank has {layout.bytes:,} bytes of shared "
                "memory for rows of peers; lower moe.static_budget, or set "
                "debug.static_transport = collective"
            )
        self._memory = _HostMemory(PeerExchange(window, layout), layout)
        return self._memory


def no_peers(note: str) -> str:
    """Error message for a group without access to peer memory."""
    return (
        "debug.static_transport = peer needs ranks that reach each other's memory, but here is "
        f"{note}; set it to auto or collective, and capture no clones (graphs.mode)"
    )


def _exchange_of(ticket: PendingTransfer) -> PeerExchange:
    assert isinstance(ticket.memory, _HostMemory)
    return ticket.memory.exchange


def _finish(ticket: PendingTransfer, *written: Tensor | None) -> None:
    ticket.finish()
    for tensor in written:
        if tensor is not None:
            increment_version(tensor)


def _number(value: Tensor) -> int:
    """Read an int64 scalar through its pointer: a graph could not record a torch operation."""
    return ctypes.c_int64.from_address(value.data_ptr()).value


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def row_bytes_of(rows: Tensor) -> int:
    """Return the size of a row of a matrix."""
    return rows.shape[1] * rows.element_size()


def _dtype(tensor: Tensor) -> HostDtype:
    return HOST_DTYPES[tensor.dtype]


def _map(copies: CopyMap) -> dict[str, int]:
    return {
        "row_map": copies.rows.data_ptr(),
        "num_tokens": copies.rows.shape[0],
        "num_choices": copies.num_choices,
        "repeats": copies.repeats,
        "capacity": copies.capacity,
    }
