"""Launch of ranks on this machine, or as a rank started by torchrun.

`run_ranks_local` forks one process per rank from a parent that has imported torch once (with NCCL
it spawns the processes, because CUDA does not support fork). The store of the run is a file without
a name, so it survives the death of any rank, and no other user can reach it. The parent detects
every child's exit, reports the child that caused a failure, and ends all remaining children.
"""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]

from megacore.calls.records import remove_rings
from megacore.errors import ConfigError
from megatrain.files import describe_os_error, probe_folder
from megatrain.launch.children import Ranks
from megatrain.launch.context import LaunchOptions, RankContext, context_from_environment
from megatrain.launch.environment import external_launcher
from megatrain.launch.exit_messages import complain, leave, print_outcome
from megatrain.launch.stopping import stop_signals_to
from megatrain.launch.store import local_store
from megatrain.launch.worker import (
    Reporter,
    Worker,
    allow_open_files,
    error_file,
    keep_freed_memory,
    run_rank,
    use_threads,
)

__all__ = [
    "LaunchOptions",
    "RankContext",
    "Worker",
    "run_ranks_local",
    "run_under_torchrun",
    "under_torchrun",
]


def run_ranks_local(nproc: int, worker: Worker, *, options: LaunchOptions | None = None) -> int:
    """Run ``worker`` on ``nproc`` ranks of this machine and wait for the ranks.

    A failure is reported as one message on standard error.

    Args:
        nproc: Number of ranks.
        worker: Called in each rank with its `RankContext`; returns an exit code. With NCCL it must
            be picklable.
        options: Options for starting and monitoring.

    Returns:
        The largest exit code of the ranks, or the exit code of the failure: 2 for a user error, 1
        for an internal error or a lost rank, 128 plus the number of a signal that ended the ranks.

    Raises:
        ConfigError: If there are fewer GPUs than ranks, or the run's folder is not writable.
    """
    options = options or LaunchOptions()
    allow_open_files()
    _check_gpus(nproc, options)
    _prepare_folder(options, range(nproc))
    with local_store() as address, _wake_on_signals() as signals:
        ranks = Ranks(nproc, worker, options, address)
        try:
            ranks.start()
            # Opened after the fork, because ranks must not share a connection.
            store = PrefixStore(address.prefix, address.connect(timeout_s=0.0))
            return ranks.watch(store, signals)
        finally:
            ranks.kill()
            if options.error_dir is not None:
                remove_rings(options.error_dir)


def under_torchrun() -> bool:
    """Check if a launcher such as torchrun or srun started this process as a rank."""
    return external_launcher(os.environ) is not None


def run_under_torchrun(worker: Worker, *, options: LaunchOptions | None = None) -> int:
    """Run ``worker`` in this process as a rank started by torchrun or srun.

    Returns:
        The exit code, as `run_ranks_local`.

    Raises:
        ConfigError: If the environment is incomplete or the store does not answer.
    """
    options = options or LaunchOptions()
    allow_open_files()
    context = _join(options)
    keep_freed_memory()
    use_threads(options.threads, num_processes=context.local_world_size)

    def prepare_and_work(context: RankContext) -> int:
        # Inside the monitored worker, so that an error on all ranks is reported once.
        _prepare_folder(options, [context.rank])
        return worker(context)

    deliver = partial(print_outcome, options=options, all_ranks=True)
    report = Reporter(context.rank, deliver, options.error_dir)
    code = run_rank(context, prepare_and_work, options, report)
    if code != 0:
        # Connections to lost ranks would block an orderly exit.
        leave(code)
    return code


def _join(options: LaunchOptions) -> RankContext:
    """Build the context of this rank; ends the process if the store does not answer."""
    try:
        return context_from_environment(options, notify=complain)
    except ConfigError as error:
        if not isinstance(error.__cause__, DistError | TimeoutError):
            raise
        # The thread that still connects would crash an orderly exit.
        if options.debug:
            traceback.print_exc()
        complain(str(error))
        leave(2)
        raise


def _check_gpus(nproc: int, options: LaunchOptions) -> None:
    if options.backend == "gloo":
        return
    count = torch.cuda.device_count()
    if nproc > count:
        raise ConfigError(
            f"{nproc} processes (--nproc) need {nproc} GPUs, but this machine has {count}; start "
            f"at most {count}, or use --run.backend=gloo"
        )


def _prepare_folder(options: LaunchOptions, ranks: Iterable[int]) -> None:
    """Check that the run's folder is writable, and remove old tracebacks of ``ranks``."""
    if options.error_dir is None:
        return
    try:
        probe_folder(options.error_dir)
        for rank in ranks:
            error_file(options.error_dir, rank).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to run.dir {options.error_dir}: {describe_os_error(error)}; choose "
            f"another folder with --run.dir"
        ) from error


@contextlib.contextmanager
def _wake_on_signals() -> Iterator[socket.socket]:
    """Redirect the stop signals to a socket that receives their numbers."""
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        with stop_signals_to(lambda *_: None, sender.fileno()):
            yield receiver
