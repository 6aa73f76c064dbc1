"""Real gloo processes for tests.

Ranks are forked from the test process, which has imported torch once: a test of four ranks starts
in a few tenths of a second. Forking is safe here because ``tests/conftest.py`` pins OpenMP to one
thread before torch is imported.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Context parallelism imports it on first use; here once, instead of in every forked rank.
import torch.nn.attention.bias


class RankFailed(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``world_size`` gloo ranks and return the results by rank.

    The first error of a rank is raised again here with that rank's traceback; a rank that does not
    finish within ``timeout_s`` seconds fails the test. A rank in ``may_die`` may die without a
    word; its result is then ``None``. No process outlives the call.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store_path = Path(folder) / "store"
        processes, receivers = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(rank, world_size, str(store_path), sender, fn, args),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        try:
            return _collect(receivers, timeout_s, may_die)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(receivers: list[Connection], timeout_s: float, may_die: Collection[int]) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    waiting = dict(enumerate(receivers))
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting)} did not finish within {timeout_s} s")
        for rank in [r for r, receiver in waiting.items() if receiver in ready]:
            try:
                error, value = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                if rank in may_die:
                    results[rank] = None
                    continue
                raise RankFailed(f"rank {rank} died without a word") from None
            if error is not None:
                raise RankFailed(f"rank {rank} raised:\n{error}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _child(
    rank: int,
    world_size: int,
    store_path: str,
    sender: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    try:
        store = dist.FileStore(store_path, world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
        )
        value = fn(rank, *args)
        sender.send_bytes(pickle.dumps((None, value)))
        # A rank that leaves early resets the connections of the others.
        dist.barrier()
    except BaseException:
        sender.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        os._exit(1)
    os._exit(0)
