"""Cost of metrics: steps of the demo with and without them, in turns in the same processes.

    python benchmarks/bench_metrics.py [--pairs 200] [--out FILE]

Four gloo ranks train the demo (pp 2 x ep 2). Every second step measures phases, memory, speed and
norms, and writes a record as `megacore train` does; the others do not. The order within a pair
changes, so that neither kind always comes first. Processor time is the sum over all ranks: it does
not depend on other programs, as the time of a step does. The direct cost is the processor time of
the added calls in rank 0.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks need it, and share the cores

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import finish, header, on_gloo_ranks, options

RANKS = 4
DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"


def measure(rank: int, folder: str, pairs: int) -> list[tuple[bool, float, float, float]]:
    """Per step: with metrics or not, seconds, processor time, that of the added calls."""
    import torch

    from megacore.config import load_config, resolve
    from megacore.train.metrics import MetricsWriter, StepRecord
    from megacore.train.trainer import build_trainer
    from megacore.train.watch import RunWatch

    config = load_config(DEMO)
    config = resolve(config, RANKS, vocab_size=256, cuda=False)
    trainer = build_trainer(config, world_size=RANKS, device=torch.device("cpu"))
    watch = RunWatch(trainer)
    writer = MetricsWriter(f"{folder}/{rank}.jsonl")
    found = []
    for step in range(2 * pairs + 4):
        is_on = (step // 2 + step) % 2 == 0
        trainer.eager.clock.enabled = is_on
        start, cpu = time.perf_counter(), time.process_time()
        added = 0.0
        if is_on:
            watch.before_step(step)
            added += time.process_time() - cpu
        metrics = trainer.train_step(step % config.train.steps)
        if is_on:
            before = time.process_time()
            values = watch.measure(step, metrics)
            record = StepRecord(
                step=step,
                loss=metrics.loss,
                grad_norm=metrics.grad_norm,
                lr=0.0,
                num_skipped=metrics.num_skipped,
                samples=0,
                step_time_s=metrics.step_time_s,
                experts=metrics.experts,
                **values,
            )
            if rank == 0:
                writer.write(record)
                record.console_texts()
            added += time.process_time() - before
        found.append((is_on, time.perf_counter() - start, time.process_time() - cpu, added))
    return found[4:]


def compare(on: Sequence[float], off: Sequence[float]) -> str:
    """Median with and without, and the mean difference of pairs with its standard error."""
    base = statistics.median(off)
    parts = [(a - b) / base for a, b in zip(on, off, strict=True)]
    # Single steps are disturbed by other programs: without a tenth of the pairs at each end.
    cut = len(parts) // 10
    kept = sorted(parts)[cut : len(parts) - cut]
    error = statistics.stdev(kept) / len(kept) ** 0.5
    return (
        f"{statistics.median(on) * 1e3:8.2f} ms with, {base * 1e3:8.2f} ms without, "
        f"difference {statistics.fmean(kept):+.2%} +- {error:.2%}"
    )


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        by_rank: list[Any] = on_gloo_ranks(RANKS, measure, folder, args.pairs, timeout_s=3000)
    rank = by_rank[0]
    # A step is as slow as rank 0 says, and costs the processor time of all ranks.
    wall = [seconds for _, seconds, _, _ in rank]
    cpu = [sum(one[step][2] for one in by_rank) for step in range(len(rank))]
    on = [step for step, one in enumerate(rank) if one[0]]
    off = [step for step, one in enumerate(rank) if not one[0]]
    direct = statistics.fmean(rank[step][3] for step in on)
    own = statistics.fmean(rank[step][2] for step in off)
    lines = [f"{len(on)} pairs of steps of examples/demo.toml on {RANKS} ranks"]
    for name, values in (("time of a step", wall), ("processor time, all ranks", cpu)):
        text = compare([values[step] for step in on], [values[step] for step in off])
        lines.append(f"{name:28}{text}")
    lines.append(
        f"{'added calls, rank 0':28}{direct * 1e6:8.0f} us of processor time, "
        f"{direct / own:.2%} of that of a step"
    )
    finish([header("torch"), "\n".join(lines)], args.out)


if __name__ == "__main__":
    main()
