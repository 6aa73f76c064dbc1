"""Ranks of one machine as child processes: start, supervision and cleanup."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megacore.calls.processes import describe_exit
from megacore.calls.records import note_status, ring_name, save_rings, saved_folder
from megacore.errors import ConfigError
from megatrain.launch.context import LaunchOptions, RankContext, rank_device
from megatrain.launch.environment import num_restarts
from megatrain.launch.exit_messages import complain, leave, print_outcome, stopped_too
from megatrain.launch.failure import Failure, record_failure
from megatrain.launch.stopping import STOP_SIGNALS, StopRequest, stop_signals_blocked
from megatrain.launch.store import LocalStoreAddress
from megatrain.launch.worker import (
    Outcome,
    Reporter,
    Worker,
    keep_freed_memory,
    run_rank,
    use_threads,
)

SETTLE_S = 1.0  # after a first failure: time to detect its cause, if that rank was a victim
GRACE_S = 2.5  # after a first failure: time for survivors to exit on their own
KILL_S = 2.0  # after a signal and the end of a first rank: time before SIGKILL
PR_SET_PDEATHSIG = 1


@dataclasses.dataclass
class Rank:
    """Child process and its exit state."""

    number: int
    process: BaseProcess
    pipe: Connection
    outcome: Outcome | None = None
    ended_s: float | None = None  # time.monotonic

    @property
    def identity(self) -> str:
        """Display name of the rank and its process."""
        return f"rank {self.number} (pid {self.process.pid} on host {socket.gethostname()})"


class Ranks:
    """Child processes of `run_ranks_local`."""

    def __init__(
        self,
        nproc: int,
        worker: Worker,
        options: LaunchOptions,
        address: LocalStoreAddress,
    ) -> None:
        self._nproc = nproc
        self._worker = worker
        self._options = options
        self._address = address
        self._ranks: list[Rank] = []
        self._signal = 0

    def start(self) -> None:
        """Start all children; signals stay blocked until each child has its own handlers."""
        forks = self._options.forks
        context: ForkContext | SpawnContext = (
            multiprocessing.get_context("fork") if forks else multiprocessing.get_context("spawn")
        )
        sys.stdout.flush()
        sys.stderr.flush()
        with stop_signals_blocked():
            for number in range(self._nproc):
                receiver, sender = context.Pipe(duplex=False)
                child = _Child(
                    rank=number,
                    nproc=self._nproc,
                    parent_pid=os.getpid(),
                    worker=self._worker,
                    options=self._options,
                    address=self._address,
                )
                process = context.Process(
                    target=_child_main, args=(child, sender), name=f"rank {number}"
                )
                process.start()
                sender.close()
                self._ranks.append(Rank(number=number, process=process, pipe=receiver))

    def watch(self, store: Store, signals: socket.socket) -> int:
        """Wait for the children, end all on the first failure or signal; returns the exit code."""
        deadline = float("inf")
        settled = float("inf")
        told = False
        while running := [rank for rank in self._ranks if rank.ended_s is None]:
            self._wait(running, signals)
            now = time.monotonic()
            # No deadline while all ranks finish their step and save: a second signal kills them.
            if self._signal and len(running) < self._nproc and deadline == float("inf"):
                deadline = now + KILL_S
            if self._failed() and settled == float("inf"):
                settled, deadline = now + SETTLE_S, min(deadline, now + GRACE_S)
                self._record(store)
            if now > settled and not told:
                told = self._tell()
            if now > deadline:
                self.kill()
        if self._failed() and not told:
            self._tell()
        self._save_rings()
        return self._exit_code()

    def terminate(self) -> None:
        """Send SIGTERM to all running children."""
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to all running children, including suspended ones, and reap them."""
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self._ranks:
            rank.process.join()

    def _wait(self, running: Sequence[Rank], signals: socket.socket) -> None:
        pipes = [rank.pipe for rank in running if rank.outcome is None and not rank.pipe.closed]
        sentinels = [rank.process.sentinel for rank in running]
        # The timeout also covers a grandchild that keeps a sentinel open.
        ready = wait([*pipes, *sentinels, signals], timeout=0.2)
        if signals in ready:
            self._on_signal(max(signals.recv(64)))
        for rank in running:
            self._receive(rank)
            if rank.process.exitcode is not None:
                self._receive(rank)
                rank.ended_s = time.monotonic()

    def _receive(self, rank: Rank) -> None:
        with contextlib.suppress(EOFError, OSError):
            if not rank.pipe.closed and rank.pipe.poll():
                try:
                    rank.outcome = rank.pipe.recv()
                except EOFError:
                    rank.pipe.close()

    def _on_signal(self, number: int) -> None:
        if self._signal:
            self.kill()  # Second signal: the user does not want to wait.
        else:
            self.terminate()
        self._signal = number

    def _failed(self) -> list[Rank]:
        """List the ranks that failed; none after a signal to the launcher."""
        if self._signal:
            return []
        return [
            rank
            for rank in self._ranks
            if (rank.outcome is not None and rank.outcome.kind != "done")
            or (rank.ended_s is not None and rank.outcome is None)
        ]

    def _record(self, store: Store) -> None:
        """Record a child that died without reporting an outcome, for the survivors' messages."""
        for rank in self._failed():
            code = rank.process.exitcode
            if rank.outcome is None and code is not None:
                failure = Failure(rank=rank.number, who=rank.identity, reason=describe_exit(code))
                with contextlib.suppress(RuntimeError):
                    record_failure(store, failure)
                return

    def _tell(self) -> bool:
        """Print the outcome of the rank that failed first."""
        first = first_failure(self._failed())
        others = self._nproc - 1
        if first.outcome is None:
            code = first.process.exitcode
            how = describe_exit(code) if code is not None else "no answer"
            complain(f"{first.identity} went away: {how}{stopped_too(others)}")
        else:
            # Printed only here, even if another rank was the first to report the same mistake.
            outcome = dataclasses.replace(first.outcome, first=True)
            print_outcome(outcome, options=self._options, num_others=others)
        return True

    def _save_rings(self) -> None:
        """Save the calls of ranks that hung or were lost."""
        run_dir = self._options.error_dir
        if run_dir is None:
            return
        failed = self._failed()
        if any(rank.outcome is None or rank.outcome.kind in ("error", "victim") for rank in failed):
            save_rings(run_dir)
        for rank in failed:
            if rank.outcome is None and rank.process.exitcode is not None:
                copy = saved_folder(run_dir) / ring_name(rank.number)
                note_status(copy, describe_exit(rank.process.exitcode))

    def _exit_code(self) -> int:
        finished = all(rank.outcome and rank.outcome.kind == "done" for rank in self._ranks)
        if self._signal and not finished:
            complain("interrupted; all ranks were stopped")
            return 128 + self._signal
        failed = self._failed()
        if failed:
            outcome = first_failure(failed).outcome
            return outcome.exit_code if outcome is not None else 1
        return max(rank.outcome.exit_code for rank in self._ranks if rank.outcome is not None)


def first_failure(failed: Sequence[Rank]) -> Rank:
    """Select the rank that caused the failure: ranks with their own error first, then by time."""

    def order(rank: Rank) -> tuple[bool, float]:
        if rank.outcome is None:
            return (False, rank.ended_s or 0.0)
        return (rank.outcome.kind not in ("mistake", "error"), rank.outcome.time_s)

    return min(failed, key=order)


# ---- in the child --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Child:
    """Arguments of a child process; picklable."""

    rank: int
    nproc: int
    parent_pid: int
    worker: Worker
    options: LaunchOptions
    address: LocalStoreAddress


def _child_main(child: _Child, pipe: Connection) -> None:
    """Run a child process. Never returns: a child must not run the parent's exit handlers."""
    _die_with_parent(child.parent_pid)
    signal.set_wakeup_fd(-1)
    # The terminal sends SIGINT to all processes, but only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    keep_freed_memory()
    use_threads(child.options.threads, num_processes=child.nproc)
    options = child.options
    report = Reporter(child.rank, pipe.send, options.error_dir)
    try:
        store = child.address.connect(timeout_s=0.0)
        store.set_timeout(options.timeout)
        context = RankContext(
            rank=child.rank,
            world_size=child.nproc,
            local_rank=child.rank,
            local_world_size=child.nproc,
            device=rank_device(options.backend, child.rank),
            backend=options.backend,
            address=child.address,
            store=PrefixStore(f"{child.address.prefix}/shared", store),
            launched_by="megacore",
            restarts=num_restarts(os.environ),
            stop=StopRequest(ignores_interrupt=True),
        )
        code = run_rank(context, child.worker, options, report)
    except ConfigError as error:
        code = report(Outcome(rank=child.rank, kind="mistake", exit_code=2, sentence=str(error)))
    pipe.close()
    leave(code)


def _die_with_parent(parent_pid: int) -> None:
    """Make Linux kill this process on any exit of its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # The parent exited before prctl took effect.
