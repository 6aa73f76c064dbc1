"""Steps with context parallelism beside those of one process: processor time and peak memory.

    python benchmarks/bench_context.py [--seq 8192] [--rounds 3] [--long 131072] [--out FILE]

Layouts take turns, each round in new processes, so that the memory of one is not that of another.
Every round has one step before the measured ones. "Step MiB" is the highest resident memory of a
rank during a step, less what was resident before it; "peak MiB" is all of a rank's memory.
``--long`` adds attention alone, forward and backward, of one long sequence.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks need it, and share the cores

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import finish, header, on_gloo_ranks, options

MIB = 1 << 20


def measured(run: Callable[[], None]) -> dict[str, float]:
    """Processor time, and resident memory at its highest and above that of before."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident memory, from now on
    start, begin = time.process_time(), time.perf_counter()
    run()
    seconds, wall = time.process_time() - start, time.perf_counter() - begin
    peak = resident("VmHWM")
    return {"cpu": seconds, "wall": wall, "peak": peak, "step": peak - before}


def resident(name: str) -> float:
    """A line of this process's memory, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def step_on_rank(
    _rank: int, parallel: dict[str, Any], model: dict[str, Any], limit_gib: float | None
) -> dict[str, float] | str:
    """Measure a step of a model; returns the error if memory does not suffice."""
    import ctypes
    import resource

    import torch

    from megatrain.config import Config, resolve
    from megatrain.train.trainer import build_trainer

    ctypes.CDLL(None).mallopt(-3, MIB)  # freed tensors leave the process
    world = parallel["cp"]
    config = Config(
        model={"hidden_size": 512, **model},
        parallel=parallel,
        train={"microbatch_size": 1, "global_batch_size": 1, "eval_interval": 0},
    )
    config = resolve(config, world, vocab_size=256, cuda=False)
    trainer = build_trainer(config, world_size=world, device=torch.device("cpu"))
    if limit_gib is None:
        trainer.train_step(0)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit_gib * 2**30),) * 2)
    try:
        return measured(lambda: (trainer.train_step(1), None)[1])
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        return str(error).rpartition("DefaultCPUAllocator: ")[2].partition("\n")[0]


def table(
    ways: dict[str, dict[str, Any]], model: dict[str, Any], rounds: int, limit: float | None
) -> str:
    """Let ways take turns, and show the fastest and the median round of each."""
    found: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, parallel in ways.items():
            args = parallel, model, limit
            found[way].append(on_gloo_ranks(parallel["cp"], step_on_rank, *args, timeout_s=3600))
            print(f"{way}: {found[way][-1]}", file=sys.stderr, flush=True)
    above = "" if limit is None else f"; at most {limit:g} GiB of data per process"
    lines = [
        f"a step of {model['seq_length']} tokens: {model['num_layers']} layers of 512, "
        f"{model['num_heads']} heads, {model['num_kv_heads']} of keys; {rounds} rounds{above}",
        f"{'way':<18}{'cpu s, all ranks: min':>22}{'median':>8}{'of cp 1':>9}"
        f"{'step MiB':>10}{'of cp 1':>9}{'peak MiB':>10}{'of cp 1':>9}",
    ]
    base: list[float] | None = None
    has_base = False
    for way, by_round in found.items():
        errors = [each for ranks in by_round for each in ranks if isinstance(each, str)]
        if errors:
            lines.append(f"{way:<18}{errors[0]}")
            continue
        cpu = [sum(rank["cpu"] for rank in ranks) for ranks in by_round]
        step, peak = (
            statistics.median(max(rank[key] for rank in ranks) for ranks in by_round)
            for key in ("step", "peak")
        )
        mine = [statistics.median(cpu), step, peak]
        has_base = has_base or ways[way]["cp"] == 1
        base = base or mine
        ratios = [f"{x / y:.2f}x" if has_base else "" for x, y in zip(mine, base, strict=True)]
        lines.append(
            f"{way:<18}{min(cpu):>22.2f}{mine[0]:>8.2f}{ratios[0]:>9}"
            f"{step:>10.0f}{ratios[1]:>9}{peak:>10.0f}{ratios[2]:>9}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seq", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, help="tokens of a sequence that needs cp 4")
    parser.add_argument("--limit", type=float, default=2.0, help="GiB of a process for --long")
    parser.add_argument("--out", type=Path, help="also write the output here")
    args = parser.parse_args()
    model = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    model["seq_length"] = args.seq
    ways: dict[str, dict[str, Any]] = {
        "cp 1": {"cp": 1},
        "cp 2": {"cp": 2},
        "cp 2, a2a": {"cp": 2, "cp_comm": "a2a"},
        "cp 2, ring": {"cp": 2, "cp_comm": "ring"},
    }
    parts = [header("torch"), table(ways, model, args.rounds, None)]
    if args.long:
        model = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64}
        model["seq_length"] = args.long
        ways = {"cp 1": {"cp": 1}, "cp 4": {"cp": 4}}
        parts.append(table(ways, model, 1, args.limit))
    finish(parts, args.out)


if __name__ == "__main__":
    main()
