"""Context of a rank: rank numbers, device, and access to the shared key-value store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megacore.calls.ring import CallRing
from megacore.errors import ConfigError, PeerLostError
from megatrain.daemon import within
from megatrain.launch.environment import LaunchedRank, launched_rank
from megatrain.launch.stopping import StopRequest
from megatrain.launch.store import LocalStoreAddress, StoreAddress

CONNECT_S = 30.0  # limit of the connection to a store that is there, and of a first request

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options for starting and monitoring ranks.

    Attributes:
        backend: ``"gloo"`` places ranks on the CPU, ``"nccl"`` assigns each rank its own GPU.
        timeout_s: Timeout of collectives, seconds.
        peer_timeout_s: Seconds without heartbeat after which a rank counts as lost.
        error_dir: The run's folder, for ``rank_XX.err`` files and the calls of hung ranks; ``None``
            writes no files.
        debug: Show full tracebacks.
        threads: CPU compute threads per rank; ``None`` divides the cores among the ranks.
        start_method: Start method of local ranks. Default: fork with gloo, since forked ranks share
            memory and start quickly; spawn with NCCL, since CUDA does not support fork. Spawned
            ranks need a picklable worker.
    """

    backend: Backend = "gloo"
    timeout_s: float = 300.0
    peer_timeout_s: float = 20.0
    error_dir: Path | None = None
    debug: bool = False
    threads: int | None = None
    start_method: Literal["fork", "spawn"] | None = None

    @property
    def forks(self) -> bool:
        """True if local ranks are forked."""
        if self.start_method is None:
            return self.backend == "gloo"
        return self.start_method == "fork"

    @property
    def timeout(self) -> timedelta:
        """``timeout_s`` as a timedelta, for torch."""
        return timedelta(seconds=self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Rank numbers, device and shared store of one rank.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Position among the ranks of this machine.
        local_world_size: Number of ranks of this machine.
        device: Device of this rank.
        backend: Communication library of the default process group.
        address: Address of the store.
        store: Connection to the store, for the main thread.
        launched_by: Launcher of the process.
        restarts: Number of times that the launcher or the job scheduler has restarted the run.
        stop: Signals that this rank has received.
        calls: Ring of this rank's last collectives and messages, if it can be kept.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: Backend
    address: StoreAddress | LocalStoreAddress
    store: Store
    launched_by: Literal["megacore", "torchrun", "srun"]
    restarts: int = 0
    stop: StopRequest = field(default_factory=StopRequest)
    calls: CallRing | None = None

    @property
    def local_ranks(self) -> range:
        """Global ranks of the processes of this machine."""
        first = self.rank - self.local_rank
        return range(first, min(first + self.local_world_size, self.world_size))


def agree(context: RankContext, name: str, value: str) -> None:
    """Check through the store that every rank has the same ``value``, before any collective.

    Raises:
        ConfigError: If an earlier rank has set another value; the message shows both.
        PeerLostError: If the store does not answer.
    """
    mine = f"{value}\n{context.rank}"
    try:
        answer = within(CONNECT_S, lambda: context.store.compare_set(f"agree/{name}", "", mine))
    except TimeoutError as error:
        raise PeerLostError(
            f"{context.address} went away: {error}; it may be a network failure"
        ) from error
    first = answer.decode()
    their_value, _, their_rank = first.rpartition("\n")
    if their_value != value:
        raise ConfigError(
            f"ranks disagree on {name}: rank {context.rank} has {value}, rank {their_rank} has "
            f"{their_value}; start every rank with the same command"
        )


def rank_device(backend: Backend, local_rank: int) -> torch.device:
    """Select the device of a rank: its own GPU with NCCL, else the CPU.

    Raises:
        ConfigError: If there are fewer GPUs than ranks on this machine.
    """
    if backend == "gloo":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this machine has {count}, and NCCL needs one per "
            f"rank; start at most {count} processes here, or use --run.backend=gloo"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def context_from_environment(
    options: LaunchOptions, *, notify: Callable[[str], None] = lambda _: None
) -> RankContext:
    """Build the context of a rank started by torchrun or srun.

    Args:
        options: Options for starting and monitoring.
        notify: Called with a message if rank 0 is not there yet after some time.

    Raises:
        ConfigError: If a variable is missing or invalid, or the store does not answer.
    """
    found = launched_rank(os.environ)
    address = StoreAddress(host=found.host, port=found.port, prefix=f"megacore/{found.attempt}")
    if found.agent_hosts_store:
        store = address.connect(timeout_s=CONNECT_S)
    elif found.rank == 0:
        store = address.connect(timeout_s=CONNECT_S, is_server=True)
    else:
        store = _connect_to_rank_0(found, address, options.timeout_s, notify)
    store.set_timeout(options.timeout)
    return RankContext(
        rank=found.rank,
        world_size=found.world_size,
        local_rank=found.local_rank,
        local_world_size=found.local_world_size,
        device=rank_device(options.backend, found.local_rank),
        backend=options.backend,
        address=address,
        store=PrefixStore(f"{address.prefix}/shared", store),
        launched_by=found.launcher,
        restarts=found.restarts,
    )


def _connect_to_rank_0(
    rank: LaunchedRank, address: StoreAddress, timeout_s: float, notify: Callable[[str], None]
) -> Store:
    """Connect to the store of rank 0, which may start later, such as on a node that is late."""
    text = (
        f"rank {rank.rank} waits up to {timeout_s:g} s (run.timeout_s) for rank 0, whose store at "
        f"{rank.host}:{rank.port} does not answer yet"
    )
    timer = threading.Timer(CONNECT_S, notify, [text])
    timer.daemon = True
    timer.start()
    try:
        return address.connect(timeout_s=timeout_s)
    finally:
        timer.cancel()
