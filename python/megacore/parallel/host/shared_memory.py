"""Shared memory between the ranks of one host: the fast path of collectives on CPU tensors.

A group whose members run on one host, in one process-id namespace, exchanges CPU tensors through
one memory segment instead of gloo's sockets. ``collectives`` uses this path automatically if a
group has it. Sums are in the order of positions, in float32 for bfloat16 and float16, so all
members get bitwise equal results; ``reduce_scatter`` is bitwise equal to gloo.

The segment is a file without a name (``memfd_create``), which members open through the creator's
``/proc/<pid>/fd``: nothing remains however the processes end, and the size of ``/dev/shm`` is no
limit.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megacore._core import HostComm, HostDtype, HostReduction, HostWindow
from megacore.parallel.host.row_all_to_all import NUM_EXCHANGES, HostExchange

DEFAULT_SLOT_BYTES = 1 << 20
MEMINFO = Path("/proc/meminfo")

HOST_DTYPES = MappingProxyType(
    {
        torch.float32: HostDtype.FLOAT32,
        torch.float64: HostDtype.FLOAT64,
        torch.bfloat16: HostDtype.BFLOAT16,
        torch.float16: HostDtype.FLOAT16,
        torch.int64: HostDtype.INT64,
        torch.int32: HostDtype.INT32,
        torch.int16: HostDtype.INT16,
        torch.int8: HostDtype.INT8,
        torch.uint8: HostDtype.UINT8,
        torch.bool: HostDtype.BOOL,
    }
)
HOST_REDUCTIONS = MappingProxyType(
    {"sum": HostReduction.SUM, "max": HostReduction.MAX, "avg": HostReduction.AVG}
)


class HostCommunicator:
    """Collectives among the members of one group, all on one host.

    For ``collectives``, which checks shapes and dtypes first: tensors are contiguous, on the CPU,
    and of a supported dtype. One thread at a time.

    A call raises ``RuntimeError`` on every member if the members are in different calls, a member
    has terminated, or a member does not arrive before the timeout; the message has the rank and
    the call. After a mismatch of calls, the group remains usable.

    Args:
        comm: The native communicator.
    """

    def __init__(self, comm: HostComm) -> None:
        self._comm = comm
        self._exchange: HostExchange | None = None
        self._has_tried_exchange = False

    @property
    def bytes_per_member(self) -> int:
        """Bytes of shared memory per member."""
        return 2 * self._comm.slot_bytes

    @property
    def timeout_s(self) -> float:
        """Seconds to wait for a member."""
        return self._comm.timeout_s

    def all_reduce_(self, tensor: Tensor, *, op: str) -> None:
        """Reduce in place over all members."""
        self._comm.all_reduce(
            data=tensor.data_ptr(),
            numel=tensor.numel(),
            dtype=HOST_DTYPES[tensor.dtype],
            op=HOST_REDUCTIONS[op],
        )
        increment_version(tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor, *, op: str) -> None:
        """Write this member's slice of the reduced ``input``, cast to the dtype of ``output``."""
        if not HostComm.can_reduce(HOST_DTYPES[input.dtype], HOST_DTYPES[output.dtype]):
            low_precision = input.dtype in (torch.bfloat16, torch.float16)
            wide = torch.float32 if low_precision else input.dtype
            reduced = torch.empty_like(output, dtype=wide)
            self.reduce_scatter(reduced, input, op=op)
            output.copy_(reduced)
            return
        self._comm.reduce_scatter(
            output=output.data_ptr(),
            output_dtype=HOST_DTYPES[output.dtype],
            input=input.data_ptr(),
            dtype=HOST_DTYPES[input.dtype],
            numel=output.numel(),
            op=HOST_REDUCTIONS[op],
        )
        increment_version(output)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """Concatenate the inputs of all members."""
        self._comm.all_gather(
            output=output.data_ptr(),
            input=input.data_ptr(),
            numel=input.numel(),
            dtype=HOST_DTYPES[input.dtype],
        )
        increment_version(output)

    def broadcast_(self, tensor: Tensor, *, source_position: int) -> None:
        """Copy the tensor of one member to all, in place."""
        self._comm.broadcast(
            data=tensor.data_ptr(),
            numel=tensor.numel(),
            dtype=HOST_DTYPES[tensor.dtype],
            source=source_position,
        )
        increment_version(tensor)

    def barrier(self) -> None:
        """Wait until every member has arrived."""
        self._comm.barrier()

    def exchange(self) -> HostExchange | None:
        """Return the all-to-all of the group, made by the first call, which is collective.

        Returns:
            ``None`` on all members if one lacks the memory.
        """
        if not self._has_tried_exchange:
            self._has_tried_exchange = True
            num_bytes = HostExchange.window_bytes(self._comm.size)
            window = self.make_window(num_bytes, num_parts=NUM_EXCHANGES)
            if window is not None:
                self._exchange = HostExchange(
                    window, position=self._comm.position, size=self._comm.size
                )
        return self._exchange

    def make_window(self, num_bytes: int, *, num_parts: int) -> HostWindow | None:
        """Allocate memory that all members can read; ``None`` on all if one allocation fails."""
        return self._comm.make_window(bytes=num_bytes, num_parts=num_parts)


@dataclass(frozen=True, kw_only=True)
class HostPath:
    """Result of connecting a group.

    Attributes:
        communicator: ``None`` if the group does not use shared memory.
        note: Reason for a missing communicator, else empty.
    """

    communicator: HostCommunicator | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Host and namespaces of a process. Equal places can share memory and observe process ends.

    Attributes:
        host: Name of the machine.
        boot: Boot id of the machine.
        pids: Process-id namespace; a process is reachable by its id inside one namespace.
        problem: Reason why this process cannot share memory, or empty.
    """

    host: str
    boot: str = ""
    pids: int = 0
    problem: str = ""

    @staticmethod
    def mine() -> Place:
        """Return the place of this process."""
        host = socket.gethostname()
        try:
            return Place(
                host=host,
                boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
                pids=Path("/proc/self/ns/pid").stat().st_ino,
            )
        except OSError as error:
            return Place(host=host, problem=f"{host} lacks {error.filename} ({error.strerror})")


class HostConnector:
    """Connects groups of this rank through shared memory, one at a time.

    All members of a group take part and reach the same decision, through the store only: member 0
    compares the places of all members and creates the segment, the others open it, and member 0
    publishes whether all succeeded. So a group is connected completely or not at all.

    Args:
        store: A store shared by all ranks; ``prefix`` separates the keys of attempts.
        prefix: Equal on all ranks, different for every use of the store.
        timeout_s: Seconds to wait for a member, here and later in collectives.
        slot_bytes: Chunk size of transfers. A member has two such slots.
        while_waiting: Called repeatedly during waits for another member; may raise to stop.
    """

    def __init__(
        self,
        store: Store,
        *,
        prefix: str,
        timeout_s: float,
        slot_bytes: int,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = PrefixStore(prefix, store)
        self._timeout_s = timeout_s
        self._slot_bytes = slot_bytes
        self._while_waiting = while_waiting

    def connect(self, name: str, ranks: Sequence[int], position: int) -> HostPath:
        """Connect one group; every member calls it, groups in the same order.

        Args:
            name: Name of the group. Together with ``ranks[0]`` it must be unique.
            ranks: Global ranks of the members.
            position: Index of this rank in ``ranks``.

        Raises:
            RuntimeError: If a member does not arrive before the timeout.
        """
        key = f"{name}/{ranks[0]}"
        self._store.set(f"{key}/place/{position}", json.dumps(asdict(Place.mine())))
        return self._offer(key, ranks) if position == 0 else self._accept(key, ranks, position)

    def _offer(self, key: str, ranks: Sequence[int]) -> HostPath:
        members = range(len(ranks))
        texts = [self._get(f"{key}/place/{i}", ranks, i) for i in members]
        places = [Place(**json.loads(text)) for text in texts]
        needed = HostComm.segment_bytes(len(ranks), self._slot_bytes_for(ranks))
        note = refusal(dict(zip(ranks, places, strict=True)), segment_bytes=needed)
        comm = None
        if not note:
            comm, note = self._open(None, ranks, 0)
        segment = (os.getpid(), comm.file) if comm is not None else None
        self._store.set(f"{key}/offer", json.dumps({"segment": segment, "note": note}))
        if comm is None:
            return HostPath(note=note)
        answers = [self._get(f"{key}/answer/{i}", ranks, i) for i in members[1:]]
        comm.close_file()
        note = next((answer for answer in answers if answer), "")
        self._store.set(f"{key}/verdict", note)
        return _path(comm, note)

    def _accept(self, key: str, ranks: Sequence[int], position: int) -> HostPath:
        offer = json.loads(self._get(f"{key}/offer", ranks, 0))
        if offer["note"]:
            return HostPath(note=offer["note"])
        pid, file = offer["segment"]
        comm, note = self._open((pid, file), ranks, position)
        self._store.set(f"{key}/answer/{position}", note)
        return _path(comm, self._get(f"{key}/verdict", ranks, 0))

    def _open(
        self, segment: tuple[int, int] | None, ranks: Sequence[int], position: int
    ) -> tuple[HostComm | None, str]:
        """Create a communicator, or open the segment of another process.

        Returns:
            The communicator, and the reason why there is none, or ``""``.
        """
        try:
            comm = HostComm(
                segment=segment,
                position=position,
                ranks=ranks,
                slot_bytes=self._slot_bytes_for(ranks),
                timeout_s=self._timeout_s,
            )
        except RuntimeError as error:
            return None, f"rank {ranks[position]} {error}"
        return comm, ""

    def _slot_bytes_for(self, ranks: Sequence[int]) -> int:
        """Return a multiple of 64 bytes, with at least one 64-byte cache line per member."""
        return 64 * max(self._slot_bytes // 64, len(ranks))

    def _get(self, key: str, ranks: Sequence[int], position: int) -> str:
        """Wait for the value of ``key``, set by the member at ``position``, and return it."""
        deadline = time.monotonic() + self._timeout_s
        pause_s = 0.001
        # Polled: a store may not be usable after a timeout of its wait.
        while not self._store.check([key]):
            self._while_waiting()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {ranks[position]} (position {position}) did not join ranks "
                    f"{', '.join(map(str, ranks))} within {self._timeout_s:g} s, while they set up "
                    "shared memory"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return self._store.get(key).decode()


def refusal(places: dict[int, Place], *, segment_bytes: int) -> str:
    """Return the reason why ranks cannot share a segment, or ``""``.

    Args:
        places: Global rank -> its place, this rank first.
        segment_bytes: Size of the segment, limited to half of the available memory.

    Example:
        >>> refusal({0: Place(host="a"), 1: Place(host="b")}, segment_bytes=1)
        'its ranks are on 2 hosts (a, b)'
    """
    for rank, place in places.items():
        if place.problem:
            return f"rank {rank} cannot share memory: {place.problem}"
    hosts = sorted({place.host for place in places.values()})
    if len(hosts) > 1:
        shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
        return f"its ranks are on {len(hosts)} hosts ({shown})"
    first_rank, first = next(iter(places.items()))
    for rank, place in places.items():
        if place != first:
            return (
                f"ranks {first_rank} and {rank} on {first.host} are in different containers "
                "(they share no process ids)"
            )
    free = meminfo().get("MemAvailable", 0)
    if 2 * segment_bytes > free:
        return (
            f"the host has {_mib(free)} MiB of memory available, and the group's "
            f"{_mib(segment_bytes)} MiB would take more than half"
        )
    return ""


def meminfo() -> dict[str, int]:
    """Return ``/proc/meminfo`` in bytes; empty if the file does not exist."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return {}
    facts = (line.replace(":", "").split() for line in lines)
    return {fact[0]: 1024 * int(fact[1]) for fact in facts if len(fact) == 3}


def _path(comm: HostComm | None, note: str) -> HostPath:
    if note or comm is None:
        return HostPath(note=note)
    return HostPath(communicator=HostCommunicator(comm))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f}"
