"""Memory of the members of a group that each one writes into and reads from.

Rows travel without a call that all members make together: a member *pushes* its rows to where
others need them and raises a flag, or shows its rows and lets the others *pull* them. Push and pull
are each other's derivative. Where a row lies follows from counts that the members exchange first
(``cpp/include/megacore/moe/peer_rows.h``).

Shapes: T tokens of this rank, k experts per token, E experts, L experts of this rank, G members of
the group, C rows that a member has room for, H hidden.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass

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
from megacore.moe.dispatchers.base import ExpertPlacement
from megacore.parallel.host_memory import HOST_DTYPES
from megacore.parallel.process_groups import Group


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerCounts:
    """What a member learns from the counts of all.

    Attributes:
        shift: What to add to the row of a copy, sorted by expert, to get its row in the buffer of
            the ranks of its expert, ``(E,)`` int64. There is no row from ``C`` on.
        kept: Copies of this rank that there is a row for, ``(E,)`` int64.
        arriving: Rows that arrive here from each member for each local expert, ``(G, L)`` int64.
    """

    shift: Tensor
    kept: Tensor
    arriving: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyMap:
    """Where the copies of this rank's tokens lie.

    Attributes:
        rows: ``member * C + row`` of each copy, ``(T, k * r)`` int64, -1 for none: ``r`` members
            share an expert, and each gets a copy.
        num_choices: k.
        capacity: C.
        num_arrived: Rows that arrive here, int64 scalar.
    """

    rows: Tensor
    num_choices: int
    capacity: int
    num_arrived: Tensor

    @property
    def repeats(self) -> int:
        """How many members share an expert."""
        return self.rows.shape[1] // self.num_choices if self.num_choices else 1


class Peers(ABC):
    """The memory of a group of at least two. All layers of a model share it.

    Members call all methods in the same order, with tensors of the same shapes. At most
    ``PEER_SLOTS`` exchanges of rows are under way at a time.

    Args:
        group: The members.
        row_bytes: Size of the largest row, if known; buffers then need not grow later.

    Attributes:
        group: The members.
    """

    def __init__(self, group: Group, *, row_bytes: int = 0) -> None:
        self.group = group
        self._row_bytes = row_bytes

    @abstractmethod
    def exchange_counts(
        self, counts_E: Tensor, placement: ExpertPlacement, capacity: int
    ) -> PeerCounts:
        """Tell all members how many copies go to each expert, and plan where they lie."""

    @abstractmethod
    def start_push(self, x_TH: Tensor, probs_Tk: Tensor | None, copies: CopyMap) -> Ticket:
        """Begin to bring tokens, and a number per copy, to the members of their experts."""

    @abstractmethod
    def finish_push(
        self, ticket: Ticket, rows_CH: Tensor, probs_C: Tensor | None, copies: CopyMap
    ) -> None:
        """Wait for what was pushed here and fill the rows; zeros behind those that arrived."""

    @abstractmethod
    def start_pull(self, rows_CH: Tensor, probs_C: Tensor | None, copies: CopyMap) -> Ticket:
        """Show rows, and a number for each, to all members."""

    @abstractmethod
    def finish_pull(
        self, ticket: Ticket, x_TH: Tensor, probs_Tk: Tensor | None, copies: CopyMap
    ) -> None:
        """Wait for what the others show; fill in the sum of each token's rows, in their order."""

    @abstractmethod
    def forget_exchanges(self) -> None:
        """No exchange is under way any more: all members have given up the same capture.

        What a recording began and did not finish never ran, but it has taken slots, and not on all
        members the same ones.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise if a peer did not come.

        Raises:
            PeerLostError: Naming it.

        Sync:
            Waits for the device, if it is one that cannot raise errors by itself.
        """


class Slots:
    """Which slots of one memory are in use. All members take and free them in the same order.

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
        """The free slot that was not used for the longest time.

        Raises:
            RuntimeError: If there is none.
        """
        if not self._free:
            raise RuntimeError(
                f"more than {PEER_SLOTS} exchanges of rows are under way in one group; finish one "
                "first, or set moe.static_transport = collective"
            )
        return self._free.pop(0)

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self._free.append(slot)

    def free_all(self) -> None:
        """Give all slots back; the next ones come in the order of a new memory."""
        self._free = list(range(PEER_SLOTS))


class Ticket:
    """An exchange of rows that is under way.

    Args:
        memory: What it uses; kept until the exchange is finished.
        slots: The slots of that memory.
    """

    def __init__(self, memory: object, slots: Slots) -> None:
        self.memory = memory
        self.slot = slots.take()
        self._slots = slots

    def finish(self) -> None:
        """Free the slot."""
        self._slots.free(self.slot)


class _HostMemory:
    def __init__(self, exchange: PeerExchange, layout: PeerLayout) -> None:
        self.exchange = exchange
        self.layout = layout
        self.slots = Slots()


class HostPeers(Peers):
    """Processes of one host, through memory that they share.

    Every wait is bounded by the group's timeout and ends in a ``RuntimeError`` that names who did
    not come.

    Raises:
        ConfigError: If the group shares no memory.
    """

    def __init__(self, group: Group, *, row_bytes: int = 0) -> None:
        super().__init__(group, row_bytes=row_bytes)
        if group.host is None:
            raise ConfigError(no_peers(group.describe()))
        self._host = group.host
        self._memory: _HostMemory | None = None

    def exchange_counts(
        self, counts_E: Tensor, placement: ExpertPlacement, capacity: int
    ) -> PeerCounts:
        """Through the memory of all; waits for them. See `Peers`.

        Raises:
            ValueError: On every member, if they have room for unequal numbers of rows. It is found
                before room is made for the rows, for which all members must meet.
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
        counts_E = counts_E.contiguous()
        shift, kept = torch.empty_like(counts_E), torch.empty_like(counts_E)
        arriving = counts_E.new_empty(self.group.size, num_local)
        exchange.send_counts(counts=counts_E.data_ptr(), shape=shape)
        exchange.plan(
            shape=shape,
            shift=shift.data_ptr(),
            kept=kept.data_ptr(),
            arriving=arriving.data_ptr(),
        )
        return PeerCounts(shift=shift, kept=kept, arriving=arriving)

    def start_push(self, x_TH: Tensor, probs_Tk: Tensor | None, copies: CopyMap) -> Ticket:
        """Write each copy where it belongs. See `Peers`."""
        x_TH, probs_Tk = x_TH.contiguous(), _contiguous(probs_Tk)
        memory = self._reserve(0, copies.capacity, _row_bytes(x_TH))
        ticket = Ticket(memory, memory.slots)
        memory.exchange.start_push(
            slot=ticket.slot,
            tokens=x_TH.data_ptr(),
            probs=_pointer(probs_Tk),
            width=x_TH.shape[1],
            dtype=_dtype(x_TH),
            **_map(copies),
        )
        return ticket

    def finish_push(
        self, ticket: Ticket, rows_CH: Tensor, probs_C: Tensor | None, copies: CopyMap
    ) -> None:
        """Copy what has come. See `Peers`."""
        _exchange_of(ticket).finish_push(
            slot=ticket.slot,
            rows=rows_CH.data_ptr(),
            probs=_pointer(probs_C),
            width=rows_CH.shape[1],
            dtype=_dtype(rows_CH),
            num_arrived=_number(copies.num_arrived),
            capacity=copies.capacity,
        )
        _finish(ticket, rows_CH, probs_C)

    def start_pull(self, rows_CH: Tensor, probs_C: Tensor | None, copies: CopyMap) -> Ticket:
        """Copy rows to where the others see them. See `Peers`."""
        rows_CH, probs_C = rows_CH.contiguous(), _contiguous(probs_C)
        memory = self._reserve(0, copies.capacity, _row_bytes(rows_CH))
        ticket = Ticket(memory, memory.slots)
        memory.exchange.start_pull(
            slot=ticket.slot,
            rows=rows_CH.data_ptr(),
            probs=_pointer(probs_C),
            width=rows_CH.shape[1],
            dtype=_dtype(rows_CH),
            num_rows=_number(copies.num_arrived),
        )
        return ticket

    def finish_pull(
        self, ticket: Ticket, x_TH: Tensor, probs_Tk: Tensor | None, copies: CopyMap
    ) -> None:
        """Add up rows where they lie. See `Peers`."""
        _exchange_of(ticket).finish_pull(
            slot=ticket.slot,
            tokens=x_TH.data_ptr(),
            probs=_pointer(probs_Tk),
            width=x_TH.shape[1],
            dtype=_dtype(x_TH),
            **_map(copies),
        )
        _finish(ticket, x_TH, probs_Tk)

    def forget_exchanges(self) -> None:
        """Free all slots. See `Peers`."""
        if self._memory is not None:
            self._memory.slots.free_all()

    def check(self) -> None:
        """Nothing to do: every wait of the host raises by itself."""

    def _reserve(self, num_experts: int, capacity: int, row_bytes: int) -> _HostMemory:
        """The memory, made anew where it is too small. All members do so at the same time."""
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
                "memory for rows of peers; lower moe.static_budget, or set moe.static_transport = "
                "collective"
            )
        self._memory = _HostMemory(PeerExchange(window, layout), layout)
        return self._memory


def no_peers(note: str) -> str:
    """The message for a group that cannot do without collectives."""
    return (
        "moe.static_transport = peer needs ranks that reach each other's memory, but here is "
        f"{note}; set it to auto or collective"
    )


def _exchange_of(ticket: Ticket) -> PeerExchange:
    assert isinstance(ticket.memory, _HostMemory)
    return ticket.memory.exchange


def _finish(ticket: Ticket, *written: Tensor | None) -> None:
    ticket.finish()
    for tensor in written:
        if tensor is not None:
            increment_version(tensor)


def _number(value: Tensor) -> int:
    """An int64 scalar as a kernel reads it: not by an operation, which a graph could not record."""
    return ctypes.c_int64.from_address(value.data_ptr()).value


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _row_bytes(rows: Tensor) -> int:
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
