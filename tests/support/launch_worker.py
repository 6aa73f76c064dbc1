"""Ranks that behave well or badly, for tests of the launcher.

As a script, ``launch_worker.py BEHAVIOUR NUM_RANKS FOLDER [BACKEND]`` starts its own ranks or joins
those of torchrun. Each rank writes its process id to ``FOLDER/<rank>.pid``, and makes
``FOLDER/<rank>.ready`` after its first collective operation.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megacore.errors import ConfigError, DataError
from megatrain.launch.start import (
    LaunchOptions,
    RankContext,
    run_ranks_local,
    run_under_torchrun,
    under_torchrun,
)

PEER_TIMEOUT_S = 1.5  # where a test waits for silence
LONG = 10_000  # steps of 20 ms that no test waits for
STEPS = {"slow": 40, "endless": LONG, "ok": 3, "code": 3, "many-files": 3, "parted-late": 3}


def work(behaviour: str, folder: Path, context: RankContext) -> int:
    """Sum numbers over the ranks again and again, until the behaviour says otherwise."""
    (folder / f"{context.rank}.pid").write_text(str(os.getpid()))
    for step in range(STEPS.get(behaviour, LONG)):
        total = torch.tensor([context.rank + 1.0], device=context.device)
        dist.all_reduce(total)
        if step == 0:
            (folder / f"{context.rank}.ready").touch()
        if step == 2:
            misbehave(behaviour, context.rank)
        time.sleep(0.02)
    # One write, so that lines of two ranks cannot mix when Python does not buffer.
    os.write(sys.stdout.fileno(), f"sum {total.item():g}\n".encode())
    return 7 if behaviour == "code" and context.rank == 1 else 0


def misbehave(behaviour: str, rank: int) -> None:
    if behaviour == "mistake-of-all":
        raise ConfigError("no rank likes this")
    if rank != 1:
        return
    match behaviour:
        case "error":
            raise ValueError("boom")
        case "mistake":
            raise DataError("there is no data file x.txt")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "silent":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "leaves":
            os._exit(3)
        case "many-files" | "too-many-files":
            num = 250 if behaviour == "many-files" else 500
            files = [Path(os.devnull).open() for _ in range(num)]  # noqa: SIM115
            del files


def launch(
    behaviour: str,
    num_ranks: int,
    folder: Path,
    *,
    start_method: Literal["fork", "spawn"] | None = None,
    backend: Literal["gloo", "nccl"] = "gloo",
) -> int:
    peer_timeout_s = {"silent": PEER_TIMEOUT_S, "slow": PEER_TIMEOUT_S, "parted": 5.0}.get(
        behaviour.removesuffix("-late"), 20.0
    )
    options = LaunchOptions(
        backend=backend,
        timeout_s=4.0 if behaviour == "short" else 60.0,
        peer_timeout_s=peer_timeout_s,
        error_dir=folder,
        start_method=start_method,
    )
    worker = partial(work, behaviour, folder)
    if under_torchrun():
        return run_under_torchrun(worker, options=options)
    return run_ranks_local(num_ranks, worker, options=options)


if __name__ == "__main__":
    try:
        backend: Any = sys.argv[4] if len(sys.argv) > 4 else "gloo"
        sys.exit(launch(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), backend=backend))
    except ConfigError as error:
        print(f"megacore: {error}", file=sys.stderr)
        sys.exit(2)
