"""Peer memory of GPUs: torch's symmetric memory and the kernels that access it.

Shapes: as in :mod:`megacore.moe.dispatchers.peer_memory`.
"""

from __future__ import annotations

import socket
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megacore import host_values
from megacore._core import PeerFault, PeerLayout, peer_failure, peer_flags_bytes
from megacore.errors import MegacoreError, PeerLostError
from megacore.moe.dispatchers.base import ExpertPlacement, constant
from megacore.moe.dispatchers.peer_memory import (
    CopyMap,
    PeerPlan,
    Peers,
    PendingPull,
    PendingTransfer,
    Slots,
    row_bytes_of,
)
from megacore.moe.dispatchers.peer_trial import agreed_fault
from megacore.ops import cuda_kernels, peer_exchange
from megacore.ops.cuda_module import kernel_obstacle
from megacore.parallel.collectives import all_gather
from megacore.parallel.group_timeout import timeout_of
from megacore.parallel.process_groups import Group

_Tensors: TypeAlias = tuple[Tensor | None, ...]


class _DeviceMemory:
    """Memory of all members, mapped by one member.

    Args:
        addresses: Address of each member's memory, ``(G,)`` int64.
        own: This member's memory, uint8.
        owner: Object that keeps the memory of the others alive.
        layout: Layout of the memory.
    """

    def __init__(self, addresses: Tensor, own: Tensor, owner: object, layout: PeerLayout) -> None:
        self.addresses = addresses
        self.own = own
        self.owner = owner
        self.layout = layout
        self.state = addresses.new_zeros(cuda_kernels().PEER_STATE_NUMEL)
        self.slots = Slots()
        self.is_captured = False

    def rows_at(self, slot: int, num_rows: int, like: Tensor) -> Tensor:
        """Make a tensor of this member's rows in a slot.

        It is a tensor of its own, not a view: autograd detects writes to saved tensors by a version
        counter, which views of one tensor share.
        """
        first = peer_flags_bytes(self.layout.num_members) + self.layout.rows_offset(slot)
        offset = (self.own.storage_offset() + first) // like.element_size()
        storage = self.own.untyped_storage()
        shape = num_rows, like.shape[1]
        return like.new_empty(0).set_(storage, offset, shape, (shape[1], 1))


class DevicePeers(Peers):
    """Peer memory of GPUs that can access each other's memory.

    There is no host sync. A kernel waits for a peer for at most ``timeout_s``; after a timeout all
    following results are NaN, so the optimizer skips them, and :meth:`check` raises. Transfers
    of rows run on a stream of their own, with few enough blocks that other kernels have most of the
    GPU meanwhile.

    Args:
        group: The members.
        device: Device of this member.
        timeout_s: Timeout of a wait for a member, seconds.
        row_bytes: Size of the largest row, if known.
    """

    def __init__(
        self, group: Group, device: torch.device, *, timeout_s: float, row_bytes: int = 0
    ) -> None:
        super().__init__(group, row_bytes=row_bytes)
        self.device = device
        self._timeout_s = timeout_s
        # The last one is in use; captured graphs still use others, which were too small.
        self._memories: list[_DeviceMemory] = []
        self._side: torch.cuda.Stream | None = None
        # The end of an exchange on the side stream, and the tensors that it reads and writes, kept
        # until the current stream, in which they were allocated, waits for this end. With
        # record_stream, a graph's pool could not use their memory again before the capture ends.
        self._in_flight: dict[PendingTransfer, tuple[torch.cuda.Event, _Tensors]] = {}

    @abstractmethod
    def _allocate(self, num_bytes: int) -> tuple[Tensor, Tensor, object]:
        """Allocate zeroed memory on all members: addresses ``(G,)``, the own part, its owner."""

    def plan_copies(self, ids_Tk: Tensor, placement: ExpertPlacement, capacity: int) -> PeerPlan:
        """Exchange counts and assign rows by three kernels. See `Peers`."""
        memory = self._reserve(placement.num_experts, capacity, self._row_bytes)
        shape = placement.num_experts, placement.ep_size, placement.ep_position, capacity
        sorting = peer_exchange.send_counts(ids_Tk, *self._members(memory), *shape)
        shift, kept, m_splits, totals = peer_exchange.plan(
            *self._members(memory), *shape, ids_Tk.numel()
        )
        members = constant(placement.members, ids_Tk.device)
        rows = peer_exchange.map_copies(ids_Tk, sorting, shift, members, capacity)
        return PeerPlan(rows=rows, kept=kept, m_splits=m_splits, totals=totals)

    def start_push(self, x_TH: Tensor, probs_Tk: Tensor | None, copies: CopyMap) -> PendingTransfer:
        """Write each copy to its row in the peers' buffers, on a separate stream. See `Peers`."""
        self._abandon_reserved()
        x_TH = x_TH.contiguous()
        probs_Tk = None if probs_Tk is None else probs_Tk.contiguous()
        memory = self._reserve(0, copies.capacity, row_bytes_of(x_TH))
        ticket = PendingTransfer(memory, memory.slots)
        with self._aside(ticket, x_TH, probs_Tk, copies.rows):
            peer_exchange.start_push(
                x_TH,
                probs_Tk,
                copies.rows,
                *self._members(memory),
                ticket.slot,
                copies.num_choices,
                copies.capacity,
            )
        return ticket

    def finish_push(
        self, ticket: PendingTransfer, rows_CH: Tensor, probs_C: Tensor | None, copies: CopyMap
    ) -> None:
        """Copy the received rows, after this rank's push. See `Peers`."""
        self._join(ticket)
        peer_exchange.finish_push(
            rows_CH, probs_C, copies.num_arrived, *self._members(_memory_of(ticket)), ticket.slot
        )
        ticket.finish()

    def reserve_pull(self, copies: CopyMap, like: Tensor) -> PendingPull:
        """Make the current stream wait for a slot of peer memory. See `Peers`."""
        self._abandon_reserved()
        memory = self._reserve(0, copies.capacity, row_bytes_of(like))
        pull = PendingPull(memory, memory.slots, copies)
        peer_exchange.reserve_pull(*self._members(memory), pull.slot)
        pull.rows = memory.rows_at(pull.slot, copies.capacity, like)
        return self._keep_reserved(pull)

    def start_pull(
        self,
        pull: PendingPull,
        rows_CH: Tensor,
        probs_C: Tensor | None,
        x_TH: Tensor,
        probs_Tk: Tensor | None,
    ) -> None:
        """Publish rows and sum those of the peers, on a separate stream. See `Peers`."""
        self._starts_reserved(pull)
        rows_CH = rows_CH.contiguous()
        probs_C = None if probs_C is None else probs_C.contiguous()
        published = rows_CH, probs_C, pull.copies.num_arrived
        with self._aside(pull, *published, x_TH, probs_Tk, pull.copies.rows):
            members = self._members(_memory_of(pull))
            peer_exchange.start_pull(*published, *members, pull.slot, pull.holds(rows_CH))
            self._sum(pull, x_TH, probs_Tk)

    def _sum(self, pull: PendingPull, x_TH: Tensor, probs_Tk: Tensor | None) -> None:
        # A method of its own, because tests with several members on one GPU call it later.
        peer_exchange.finish_pull(
            x_TH,
            probs_Tk,
            pull.copies.rows,
            *self._members(_memory_of(pull)),
            pull.slot,
            pull.copies.num_choices,
            pull.copies.capacity,
        )

    def finish_pull(self, pull: PendingPull) -> None:
        """Make the current stream wait for the sums. See `Peers`."""
        self._join(pull)
        pull.finish()

    def forget_exchanges(self) -> None:
        """Free all slots of all memories. See `Peers`."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
        self._in_flight.clear()
        self._reserved.clear()
        for memory in self._memories:
            memory.slots.free_all()

    def check(self) -> None:
        """Raise an error if a wait of a kernel timed out. See `Peers`."""
        for memory in self._memories:
            word = int(memory.state[0])
            if word:
                raise PeerLostError(failure_text(word, self.group, self._timeout_s))

    @contextmanager
    def _aside(self, ticket: PendingTransfer, *tensors: Tensor | None) -> Iterator[None]:
        """Run on the side stream, after the work queued on the current stream; keep ``tensors``."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        self._in_flight[ticket] = torch.cuda.Event(), tensors  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            yield
            self._in_flight[ticket][0].record(self._side)

    def _join(self, ticket: PendingTransfer) -> None:
        """Make the current stream wait for one exchange, not for those queued behind it."""
        done, _ = self._in_flight.pop(ticket)
        torch.cuda.current_stream(self.device).wait_event(done)

    def _members(self, memory: _DeviceMemory) -> tuple[Any, ...]:
        layout = memory.layout
        sizes = layout.max_experts, layout.max_capacity, layout.max_row_bytes
        return memory.addresses, memory.state, self.group.position, *sizes, self._timeout_s

    def _reserve(self, num_experts: int, capacity: int, row_bytes: int) -> _DeviceMemory:
        """Return the memory, reallocated if it is too small; reallocation is collective."""
        old = self._memories[-1] if self._memories else None
        layout = self._fitting_layout(
            None if old is None else old.layout, num_experts, capacity, row_bytes
        )
        if old is not None and layout is old.layout:
            old.is_captured |= torch.cuda.is_current_stream_capturing()
            return old
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"group {self.group.name}: memory for {capacity:,} rows of peers cannot be made "
                "while a graph is captured; run the same shapes once before "
                "(graphs.warmup_steps)"
            )
        allocated = self._allocate(peer_flags_bytes(self.group.size) + layout.bytes)
        # All members have finished their kernels when the allocation returns.
        self.check()
        self._memories = [
            memory for memory in self._memories if memory.is_captured or memory.slots.any_taken
        ]
        self._memories.append(_DeviceMemory(*allocated, layout))
        return self._memories[-1]


class SymmetricPeers(DevicePeers):
    """Peer memory of GPUs of one host, one per rank, in torch's symmetric memory.

    Args:
        group: The members; :func:`reason_against` must have returned ``""``.
        device: Device of this member.
        row_bytes: Size of the largest row, if known.
    """

    def __init__(self, group: Group, device: torch.device, *, row_bytes: int = 0) -> None:
        super().__init__(
            group, device, timeout_s=kernel_timeout_s(group, device), row_bytes=row_bytes
        )

    def _allocate(self, num_bytes: int) -> tuple[Tensor, Tensor, object]:
        try:
            return symmetric_memory(self.group, self.device, num_bytes)
        except (RuntimeError, ImportError) as error:
            raise MegacoreError(
                f"group {self.group.name}: no {num_bytes:,} bytes of memory that peers reach "
                f"({error}); lower moe.static_budget, or set moe.static_transport = collective"
            ) from error


def symmetric_memory(
    group: Group, device: torch.device, num_bytes: int
) -> tuple[Tensor, Tensor, object]:
    """Allocate zeroed symmetric memory on all members: addresses ``(G,)``, the own part, owner.

    Sync:
        Waits for the device and for all members.
    """
    import torch.distributed._symmetric_memory as symm_mem

    assert group.handle is not None
    buffer = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(buffer, group.handle)
    buffer.zero_()
    torch.cuda.synchronize(device)
    handle.barrier()
    torch.cuda.synchronize(device)
    # Several tensors may share one allocation.
    offset = getattr(handle, "offset", 0)
    addresses = [address + offset for address in handle.buffer_ptrs]
    return torch.tensor(addresses, dtype=torch.int64, device=device), buffer, handle


def reason_against(group: Group, device: torch.device) -> str:
    """Find the reason why members cannot access each other's memory, or ``""``; collective."""
    if not _is_on_one_host(group, device):
        return f"a group over several hosts ({group.describe()})"
    obstacle = kernel_obstacle(device) or ""
    fault = agreed_fault(obstacle, "our kernels cannot run", group, device)
    if fault:
        return fault
    try:
        symmetric_memory(group, device, 4096)
        problem = ""
    except (RuntimeError, ImportError) as error:
        problem = f"no symmetric memory ({error})"
    return agreed_fault(problem, "no symmetric memory", group, device)


def _is_on_one_host(group: Group, device: torch.device) -> bool:
    host = zlib.crc32(socket.gethostname().encode())
    mine = torch.tensor([host], dtype=torch.int64, device=device)
    gathered = mine.new_empty(group.size)
    all_gather(gathered, mine, group)
    return len(set(host_values.read(gathered, "reachable memory of peers"))) == 1


def failure_text(word: int, group: Group, timeout_s: float) -> str:
    """Format the failure word of a kernel as an error message.

    Args:
        word: Failure word that the kernel wrote.
        group: The members.
        timeout_s: Timeout of the kernel, seconds.

    Example:
        >>> word = (3 << 48) | (1 << 32) | 17
        >>> failure_text(word, Group("ep", (4, 5), 0, object()), 20.0)  # type: ignore[arg-type]
        'group ep, exchange 17: rank 5 did not send its rows within 20 s'
    """
    fault, member, epoch = peer_failure(word)
    what = {
        PeerFault.STILL_READS: f"did not finish reading within {timeout_s:g} s",
        PeerFault.NO_COUNTS: f"did not send its counts within {timeout_s:g} s",
        PeerFault.NO_ROWS: f"did not send its rows within {timeout_s:g} s",
        PeerFault.OTHER_CAPACITY: "keeps another number of rows for its experts; all need equally "
        "many tokens and one budget",
    }.get(fault, "failed")
    return f"group {group.name}, exchange {epoch}: rank {group.ranks[member]} {what}"


def _memory_of(ticket: PendingTransfer) -> _DeviceMemory:
    assert isinstance(ticket.memory, _DeviceMemory)
    return ticket.memory


def kernel_timeout_s(group: Group, device: torch.device) -> float:
    """Limit of the waits of kernels: a third of the timeout of the group's collectives, seconds.

    Collectives queued behind a waiting kernel start their timeout when they are enqueued. With the
    same limit, NCCL would abort the process before the kernel's error, which has the name of the
    lost rank, could be read.
    """
    return timeout_of(group, device).total_seconds() / 3
