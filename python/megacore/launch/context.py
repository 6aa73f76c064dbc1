"""Context of a rank: rank numbers, device, and access to the shared key-value store."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megacore.errors import ConfigError

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options for starting and monitoring ranks.

    Attributes:
        backend: ``"gloo"`` places ranks on the CPU, ``"nccl"`` assigns each rank its own GPU.
        timeout_s: Timeout of collectives, seconds.
        peer_timeout_s: Seconds without heartbeat after which a rank counts as lost.
        error_dir: Folder for ``rank_XX.err`` files; ``None`` writes no files.
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
class StoreAddress:
    """Address of the store, and key prefix of this attempt."""

    host: str
    port: int
    prefix: str = "megacore"

    def connect(self, *, timeout_s: float, is_server: bool = False) -> TCPStore:
        """Open a new connection to the store.

        Raises:
            ConfigError: If the store does not answer within ``timeout_s``.
        """
        try:
            return TCPStore(
                self.host,
                self.port,
                is_master=is_server,
                wait_for_workers=False,
                multi_tenant=is_server,
                timeout=timedelta(seconds=timeout_s),
            )
        except DistError as error:
            raise ConfigError(
                f"no answer from the store of the launcher at {self.host}:{self.port} within "
                f"{timeout_s:g} s ({first_line(error)}); check MASTER_ADDR and MASTER_PORT"
            ) from error


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
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: Backend
    address: StoreAddress
    store: Store
    launched_by: Literal["megacore", "torchrun"]


def agree(context: RankContext, name: str, value: str) -> None:
    """Check through the store that every rank has the same ``value``, before any collective.

    Raises:
        ConfigError: If an earlier rank has set another value; the message shows both.
    """
    mine = f"{value}\n{context.rank}"
    first = context.store.compare_set(f"agree/{name}", "", mine).decode()
    their_value, _, their_rank = first.rpartition("\n")
    if their_value != value:
        raise ConfigError(
            f"ranks disagree on {name}: rank {context.rank} has {value}, rank {their_rank} has "
            f"{their_value}; start every rank with the same command"
        )


def under_torchrun() -> bool:
    """Check if a launcher such as torchrun started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


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


def context_from_environment(options: LaunchOptions) -> RankContext:
    """Build the context of a rank started by torchrun (``RANK``, ``WORLD_SIZE``, ``MASTER_*``).

    Raises:
        ConfigError: If a variable is missing or not a number, or the store does not answer.
    """
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK={rank} is not in [0, WORLD_SIZE={world_size}); start {world_size} processes "
            f"with RANK from 0 to {world_size - 1}"
        )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    address = StoreAddress(
        host=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=_number("MASTER_PORT"),
        prefix=f"megacore/{attempt}",
    )
    # torchrun's agent hosts the store; with launchers that only set variables, rank 0 hosts it.
    agent_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = address.connect(timeout_s=30.0, is_server=rank == 0 and not agent_hosts_store)
    store.set_timeout(options.timeout)
    local_rank = _number("LOCAL_RANK", 0)
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_number("LOCAL_WORLD_SIZE", 1),
        device=rank_device(options.backend, local_rank),
        backend=options.backend,
        address=address,
        store=PrefixStore(f"{address.prefix}/shared", store),
        launched_by="torchrun",
    )


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={text!r} is no whole number; torchrun sets it"
        ) from None


def first_line(error: BaseException) -> str:
    """Extract the first line of an error's text, because torch appends C++ frames."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def free_listener() -> socket.socket:
    """Open a socket that listens on a free port of the loopback interface."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.set_inheritable(False)
    return listener
