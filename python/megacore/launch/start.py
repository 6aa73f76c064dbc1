"""Start ranks on this machine, or join those that torchrun started.

`run_ranks_local` forks one process per rank from a parent that has imported torch once (with NCCL
it spawns them, because CUDA does not survive a fork). The parent holds the store, so that no rank's
death takes it away; it sees every child end, names the one that caused the end, and leaves no
process behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megacore.errors import ConfigError
from megacore.files import describe_os_error, probe_folder
from megacore.launch.children import Ranks
from megacore.launch.context import (
    LaunchOptions,
    RankContext,
    StoreAddress,
    context_from_environment,
    free_listener,
    under_torchrun,
)
from megacore.launch.messages import leave, print_outcome
from megacore.launch.worker import Reporter, Worker, error_file, run_rank, use_threads

__all__ = [
    "LaunchOptions",
    "RankContext",
    "Worker",
    "run_ranks_local",
    "run_under_torchrun",
    "under_torchrun",
]


def run_ranks_local(nproc: int, worker: Worker, *, options: LaunchOptions | None = None) -> int:
    """Run ``worker`` on ``nproc`` ranks of this machine and wait for them.

    What went wrong, if anything, is one message on standard error.

    Args:
        nproc: Number of ranks.
        worker: Called in each rank with its `RankContext`; returns an exit code. With NCCL it must
            be picklable.
        options: How to start and watch.

    Returns:
        0, or the exit code of the failure: 2 for a mistake of the user, 1 for an error or a lost
        rank, 130 or 143 after an interrupt.

    Raises:
        ConfigError: If there are fewer GPUs than ranks, or the run's folder cannot be written to.
    """
    options = options or LaunchOptions()
    _check_gpus(nproc, options)
    _prepare_folder(options, range(nproc))
    # Fork while this process has no threads: the store, which runs one, starts afterwards.
    with free_listener() as listener, _wake_on_signals() as signals:
        port = listener.getsockname()[1]
        address = StoreAddress(host="127.0.0.1", port=port)
        ranks = Ranks(nproc, worker, options, address, listener)
        try:
            ranks.start()
            store = TCPStore(
                address.host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=30),
                master_listen_fd=os.dup(listener.fileno()),
            )
            return ranks.watch(PrefixStore(address.prefix, store), signals)
        finally:
            ranks.kill()


def run_under_torchrun(worker: Worker, *, options: LaunchOptions | None = None) -> int:
    """Run ``worker`` as the rank that torchrun made of this process.

    Returns:
        The exit code, as `run_ranks_local`.

    Raises:
        ConfigError: If the environment is incomplete or the store does not answer.
    """
    options = options or LaunchOptions()
    context = context_from_environment(options)
    use_threads(options.threads, num_processes=context.local_world_size)

    def prepare_and_work(context: RankContext) -> int:
        # Here, under watch, because a mistake that all ranks find is told once.
        _prepare_folder(options, [context.rank])
        return worker(context)

    deliver = partial(print_outcome, options=options, all_ranks=True)
    report = Reporter(context.rank, deliver, options.error_dir)
    code = run_rank(context, prepare_and_work, options, report)
    if code != 0:
        # Connections to lost ranks would block an orderly exit.
        leave(code)
    return code


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
    """Prove that the run's folder can be written to; remove old tracebacks of ``ranks``."""
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
    """A socket that receives the numbers of SIGINT and SIGTERM instead of their usual effect."""
    receiver, sender = socket.socketpair()
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may take over signals; they keep their usual effect.
        with receiver, sender:
            yield receiver
        return
    receiver.setblocking(False)
    sender.setblocking(False)
    numbers = (signal.SIGINT, signal.SIGTERM)
    old_handlers = [signal.signal(number, lambda *_: None) for number in numbers]
    old_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield receiver
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in zip(numbers, old_handlers, strict=True):
            signal.signal(number, handler or signal.SIG_DFL)
        receiver.close()
        sender.close()
