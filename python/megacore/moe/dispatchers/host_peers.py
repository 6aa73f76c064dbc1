"""Peer memory of processes of one host: shared memory.

Shapes: as in :mod:`megacore.moe.dispatchers.peer_memory`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megacore._core import (
    PEER_WINDOW_PARTS,
    HostDtype,
    PeerExchange,
    PeerLayout,
    PeerShape,
)
from megacore.errors import ConfigError, MegacoreError
from megacore.moe.dispatchers.base import ExpertPlacement, constant
from megacore.moe.dispatchers.peer_memory import (
    CopyMap,
    PeerPlan,
    Peers,
    PendingPull,
    PendingTransfer,
    Slots,
    no_peers,
    row_bytes_of,
)
from megacore.parallel.host.row_all_to_all import memory_at
from megacore.parallel.host.shared_memory import HOST_DTYPES
from megacore.parallel.process_groups import Group


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
        memory = memory_at(address, numel * like.element_size(), self.exchange)
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
        layout = self._fitting_layout(
            None if old is None else old.layout, num_experts, capacity, row_bytes
        )
        if old is not None and layout is old.layout:
            return old
        window = self._host.make_window(layout.bytes, num_parts=PEER_WINDOW_PARTS)
        if window is None:
            raise MegacoreError(
                f"group {self.group.name}: not every rank has {layout.bytes:,} bytes of shared "
                "memory for rows of peers; lower moe.static_budget, or set "
                "moe.static_transport = collective"
            )
        self._memory = _HostMemory(PeerExchange(window, layout), layout)
        return self._memory


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
