"""Process lifecycle of one rank: rendezvous, health monitoring, exit reporting."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from megacore.calls.processes import Identity, signal_name
from megacore.calls.records import remove_rings, save_rings, saved_folder
from megacore.calls.ring import CallRing
from megacore.errors import DivergedError, MegacoreError, PeerLostError
from megatrain.daemon import within
from megatrain.hang.diagnosis import diagnosis_of_run
from megatrain.hang.flight import direct_dumps, save_dump
from megatrain.launch.context import CONNECT_S, LaunchOptions, RankContext, agree
from megatrain.launch.failure import FailureMonitor, failure_monitor
from megatrain.launch.stopping import stop_signals_blocked
from megatrain.launch.store import first_line

Worker = Callable[[RankContext], int]

# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MANY_FILES = 1 << 20
# Ranks of a run in which each may read the recorded calls of all.
_MOST_DIAGNOSING = 64
# Seconds to wait for the store in the diagnosis of a run that does not respond: the store may be a
# part of what hangs, and its own timeout is that of a rank that is late.
_STORE_S = 5.0

# Words in the errors of gloo, NCCL and the store when a peer is lost or does not respond.
CONNECTION_WORDS = (
    "connection",
    "socket",
    "peer",
    "pair",
    "timed out",
    "timeout",
    "remote",
    "pipe",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Exit status of a rank.

    Attributes:
        rank: Global rank.
        kind: ``done``; ``mistake``: a user error, fully explained by ``sentence``; ``error``: an
            unexpected error; ``victim`` of another rank; ``stopped`` by a signal.
        exit_code: Exit code of the rank.
        sentence: Message for the user; empty for no message.
        traceback: Full traceback of an error, for a file.
        diagnosis: Which ranks waited for whom, if the run did not respond.
        first: False if another rank has already printed the same mistake.
        time_s: `time.monotonic` of the end, comparable among processes of one machine.
    """

    rank: int
    kind: Literal["done", "mistake", "error", "victim", "stopped"]
    exit_code: int
    sentence: str = ""
    traceback: str = ""
    diagnosis: str = ""
    first: bool = True
    time_s: float = 0.0


class Reporter:
    """Reporter of a rank's first outcome from any thread, which also writes ``rank_XX.err``.

    Args:
        rank: Global rank.
        deliver: Receives the outcome: a pipe to the launcher, or a printer to standard error.
        error_dir: Folder of the ``.err`` file; ``None`` for no file.
    """

    def __init__(
        self, rank: int, deliver: Callable[[Outcome], None], error_dir: Path | None
    ) -> None:
        self._rank = rank
        self._deliver = deliver
        self._error_dir = error_dir
        self._once = threading.Lock()

    def __call__(self, outcome: Outcome) -> int:
        """Deliver ``outcome`` with signals blocked; returns its exit code."""
        with stop_signals_blocked():
            if self._once.acquire(blocking=False):
                self._write(outcome)
                self._deliver(replace(outcome, time_s=time.monotonic()))
        return outcome.exit_code

    def _write(self, outcome: Outcome) -> None:
        if self._error_dir is None or outcome.kind not in ("error", "victim"):
            return
        # The file is optional: a full disk must not hide the error itself.
        with contextlib.suppress(OSError):
            self._error_dir.mkdir(parents=True, exist_ok=True)
            parts = (outcome.sentence, outcome.diagnosis, outcome.traceback)
            text = "\n\n".join(filter(None, parts)).strip() + "\n"
            error_file(self._error_dir, self._rank).write_text(text)


def error_file(folder: Path, rank: int) -> Path:
    """Build the path of a rank's traceback file.

    Example:
        >>> str(error_file(Path("runs/x"), 3))
        'runs/x/rank_03.err'
    """
    return folder / f"rank_{rank:02d}.err"


def run_rank(context: RankContext, worker: Worker, options: LaunchOptions, report: Reporter) -> int:
    """Join the process group, run ``worker`` with health monitoring, and report the outcome.

    Returns:
        The exit code: the worker's, 2 for a user error, 1 for an internal error or a lost peer.
    """

    def end_from_monitor(sentence: str, exit_code: int) -> None:
        kind: Literal["victim", "stopped"] = "victim" if sentence else "stopped"
        if sentence and options.error_dir is not None:
            save_dump(options.error_dir, context.rank, context.backend, os.environ)
        sentence = sentence or _stop_text(context, exit_code)
        report(Outcome(rank=context.rank, kind=kind, exit_code=exit_code, sentence=sentence))

    try:
        # First of all, so that the others can tell a rank that was lost from one that is late.
        with failure_monitor(
            context, peer_timeout_s=options.peer_timeout_s, on_end=end_from_monitor
        ) as monitor:
            outcome = _work_and_explain(context, worker, options, monitor)
            _finish_ring(replace(context, calls=monitor.calls), outcome, options)
            report(outcome)
    except MegacoreError as error:
        code = 1 if isinstance(error, PeerLostError) else 2
        kind: Literal["victim", "mistake"] = "victim" if code == 1 else "mistake"
        return report(Outcome(rank=context.rank, kind=kind, exit_code=code, sentence=str(error)))
    if outcome.kind == "done":
        dist.destroy_process_group()
    return outcome.exit_code


def _work_and_explain(
    context: RankContext, worker: Worker, options: LaunchOptions, monitor: FailureMonitor
) -> Outcome:
    try:
        try:
            monitor.calls = _create_ring(context, options)
            context = replace(context, calls=monitor.calls)
            exit_code = _work(context, worker, options, monitor)
            monitor.announce_end("done")
        except Exception as error:
            return _explain(error, context, monitor, options)
    except (SystemExit, KeyboardInterrupt) as stop:
        # The signal may also have been received while an error was being explained.
        return _explain_stop(stop, context, monitor)
    return Outcome(rank=context.rank, kind="done", exit_code=exit_code)


def _work(
    context: RankContext, worker: Worker, options: LaunchOptions, monitor: FailureMonitor
) -> int:
    agree(context, "the number of processes", str(context.world_size))
    monitor.wait_for_all(timeout_s=options.timeout_s)
    init_process_group(context, options)
    if options.error_dir is not None:
        direct_dumps(options.error_dir, os.environ)
    exit_code = worker(context)
    if context.calls is not None:
        context.calls.note_status("its work is done")
    # A rank that exits early resets connections that others may still read from.
    dist.barrier()
    return exit_code


def init_process_group(context: RankContext, options: LaunchOptions) -> None:
    """Initialize the default process group of ``context``'s world."""
    # Connect on first use, because most pairs of ranks never communicate.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if context.device.type == "cuda":
        # Communicators of different groups run at the same time, where each waits for all of its
        # ranks: NCCL then starts their work in the order in which it is queued (from 2.26 on).
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        # Messages of two ranks have a communicator of their own, or one order.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    dist.init_process_group(
        context.backend,
        store=PrefixStore("group", context.store),
        rank=context.rank,
        world_size=context.world_size,
        timeout=options.timeout,
        device_id=context.device if context.device.type == "cuda" else None,
    )


def _explain(
    error: Exception, context: RankContext, monitor: FailureMonitor, options: LaunchOptions
) -> Outcome:
    """Classify the worker's error: user error, internal error, or failure of another rank."""
    trace = "".join(traceback.format_exception(error))
    rank = context.rank
    diagnosis = _diagnose(error, context, options)  # before other ranks leave their calls
    if isinstance(error, RuntimeError) and not isinstance(error, MegacoreError):
        patience_s = options.peer_timeout_s + 5.0 if _is_about_connection(error) else 0.0
        culprit = monitor.culprit(patience_s=patience_s)
        if culprit is not None and culprit.rank != rank:
            return Outcome(
                rank=rank, kind="victim", exit_code=1, sentence=str(culprit), traceback=trace
            )
    if isinstance(error, PeerLostError):
        return Outcome(rank=rank, kind="victim", exit_code=1, sentence=str(error), traceback=trace)
    if isinstance(error, MegacoreError):
        first = monitor.report(str(error), is_mistake=True)
        return Outcome(
            rank=rank,
            kind="mistake",
            exit_code=1 if isinstance(error, DivergedError) else 2,
            sentence=str(error),
            traceback=trace,
            first=first.rank == rank or first.reason != str(error),
        )
    name = f"{type(error).__name__}: {first_line(error)}"
    if os.strerror(errno.EMFILE) in name:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        name += (
            f"; a process here may open {limit:,} files (ulimit -n), and needs two per rank that "
            "connects to it and two per source of data"
        )
    monitor.report(f"it failed with {name}")
    return Outcome(
        rank=rank,
        kind="error",
        exit_code=1,
        sentence=f"rank {rank} failed: {name}{_last_frame(error)}",
        traceback=trace,
        diagnosis=diagnosis,
    )


def _explain_stop(
    error: SystemExit | KeyboardInterrupt, context: RankContext, monitor: FailureMonitor
) -> Outcome:
    """Explain an exit by a signal, such as torchrun's SIGTERM to the survivors of a lost rank."""
    patience_s = 1.5 if context.launched_by == "torchrun" else 0.0
    culprit = monitor.culprit(patience_s=patience_s, blame_stopped=False)
    if culprit is not None:
        # A rank of the same launcher has printed the mistake, which this rank may have made too.
        is_told = culprit.is_mistake and culprit.rank in context.local_ranks
        return Outcome(
            rank=context.rank,
            kind="victim",
            exit_code=1,
            sentence=str(culprit),
            first=not is_told,
        )
    monitor.announce_end("stopped")
    code = error.code if isinstance(error, SystemExit) else 130
    code = code if isinstance(code, int) else 1
    return Outcome(
        rank=context.rank, kind="stopped", exit_code=code, sentence=_stop_text(context, code)
    )


def _stop_text(context: RankContext, code: int) -> str:
    """Describe the signal that ended this rank; torchrun and srun report it themselves."""
    if context.launched_by != "megacore" or code <= 128:
        return ""
    who = Identity.mine(context.rank)
    return f"{who} was stopped by {signal_name(code - 128)}"


def _create_ring(context: RankContext, options: LaunchOptions) -> CallRing | None:
    """Create the ring of this rank's calls; rank 0 removes copies of an earlier start."""
    if options.error_dir is None or context.world_size == 1:
        return None
    request = partial(context.store.compare_set, "calls/run", "", uuid.uuid4().hex)
    try:
        run = within(CONNECT_S, request).decode()
    except (TimeoutError, dist.DistError):
        return None
    if context.local_rank == 0:
        shutil.rmtree(saved_folder(options.error_dir), ignore_errors=True)
    return CallRing.create(
        options.error_dir, rank=context.rank, world_size=context.world_size, run=run
    )


def _finish_ring(context: RankContext, outcome: Outcome, options: LaunchOptions) -> None:
    """Save this machine's rings after a failure, and remove those that no rank uses any more."""
    ring, run_dir = context.calls, options.error_dir
    if ring is None or run_dir is None:
        return
    if outcome.kind == "error" and not outcome.diagnosis:
        ring.note_status(f"it failed: {outcome.sentence}")
    if outcome.kind in ("error", "victim"):
        save_rings(run_dir)
        save_dump(run_dir, context.rank, context.backend, os.environ)
    if context.launched_by != "megacore":  # whose parent process does this when all have ended
        ring.path.unlink(missing_ok=True)
        remove_rings(run_dir, of_running=False)


def _diagnose(error: Exception, context: RankContext, options: LaunchOptions) -> str:
    """Compare the calls of the ranks if an error shows that the run does not respond."""
    run_dir = options.error_dir
    if context.calls is None or run_dir is None or not isinstance(error, RuntimeError):
        return ""
    if isinstance(error, MegacoreError) or not (
        _is_about_connection(error) or "in different calls" in str(error)
    ):
        return ""
    save_rings(run_dir)
    save_dump(run_dir, context.rank, context.backend, os.environ)
    if not _is_to_diagnose(context):
        return "another rank compares the calls of all; megacore why-hung does so too"
    found = diagnosis_of_run(run_dir)
    return str(found) if found is not None and (found.findings or found.waits) else ""


def _is_to_diagnose(context: RankContext) -> bool:
    """Return whether this rank reads the calls of all ranks: in large runs the first that fails."""
    if context.world_size <= _MOST_DIAGNOSING:
        return True
    try:
        return within(_STORE_S, partial(context.store.add, "diagnosed", 1)) == 1
    except (RuntimeError, TimeoutError):  # the store has gone, or its host does not respond
        return context.rank == context.world_size - 1


def _is_about_connection(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in CONNECTION_WORDS)


def _last_frame(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f" (at {last.filename}:{last.lineno} in {last.name})"


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the next tensors; does nothing with other libraries.

    By default it returns the end of its heap to the system after every large tensor, and each page
    of the next one is cleared anew: 2% of a step of a small model. Blocks of 32 MiB and more,
    which is the highest limit that malloc sets by itself, still go back when they are freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def allow_open_files() -> None:
    """Raise this process's limit of open files to the largest that it may set itself.

    A store has two connections per rank, and each source of data two files; the usual limit of
    1,024 ends with some 500 of either.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Without a limit, some systems refuse to set the largest number.
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def use_threads(threads: int | None, *, num_processes: int) -> None:
    """Set the number of CPU threads, by default a share of the cores; call first after a fork."""
    if threads is not None:
        torch.set_num_threads(threads)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, (cores or 1) // num_processes))
