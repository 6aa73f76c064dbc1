"""Cost of metrics, of the ring of calls and of agreement, in steps of the demo.

    python benchmarks/bench_metrics.py [--pairs 200] [--out FILE]

Four gloo ranks train the demo (pp 2 x ep 2). Every second step measures phases, memory, speed and
norms, and writes a record as `megacore train` does; the others do not. The order within a pair
changes, so that neither kind always comes first. Processor time is the sum over all ranks: it does
not depend on other programs, as the time of a step does.

That difference is smaller than its error, so the parts are also measured one by one, as shares of
the processor time of a step of the same rank; the table has the rank with the largest share.
Metrics, and votes and verdict of the agreement, are timed where they happen. Records of the ring
and phases are counted in each step; their cost is the least of several loops in the same process.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks need it, and share the cores

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from _common import finish, header, on_gloo_ranks, options

if TYPE_CHECKING:
    from megacore.calls.ring import CallRing
    from megacore.pipeline.clock import PhaseClock

RANKS = 4
DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one rank, seconds; those named ``cpu`` are processor time.

    Attributes:
        is_on: Whether metrics were measured.
        wall: Time.
        cpu: Processor time.
        metrics_cpu: That of metrics but phases.
        agreement_cpu: That of votes and verdict.
        num_calls: Records written to the ring.
        num_phases: Phases measured.
    """

    is_on: bool
    wall: float
    cpu: float
    metrics_cpu: float
    agreement_cpu: float
    num_calls: int
    num_phases: int


def measure(rank: int, folder: str, pairs: int) -> tuple[list[Step], float, float]:
    """Return the steps, and the processor time of one record of the ring and of one phase."""
    import torch

    from megacore.calls.ring import CallRing
    from megacore.pipeline.clock import PhaseClock
    from megatrain.config import load_config, resolve
    from megatrain.launch.stopping import StopRequest
    from megatrain.train.control import RunControl
    from megatrain.train.metrics import MetricsWriter, StepRecord
    from megatrain.train.trainer import build_trainer
    from megatrain.train.watch import RunWatch

    config = load_config(DEMO)
    config = resolve(config, RANKS, vocab_size=256, cuda=False)
    ring = CallRing.create(Path(folder), rank=rank, world_size=RANKS, run="benchmark")
    assert ring is not None
    trainer = build_trainer(config, world_size=RANKS, device=torch.device("cpu"), calls=ring)
    watch = RunWatch(trainer)
    context: Any = SimpleNamespace(rank=rank, stop=StopRequest())
    control = RunControl(
        config.train, config.run, context, save_interval_s=None, started=time.monotonic()
    )
    writer = MetricsWriter(f"{folder}/{rank}.jsonl")
    phases = 0
    entered = PhaseClock.phase

    def counted(clock: PhaseClock, *args: Any, **options: Any) -> Any:
        nonlocal phases
        phases += 1
        return entered(clock, *args, **options)

    PhaseClock.phase = counted  # type: ignore[method-assign]
    found = []
    for step in range(2 * pairs + 4):
        is_on = (step // 2 + step) % 2 == 0
        trainer.eager.clock.enabled = is_on
        phases, num_calls = 0, max(ring.serials)
        start, cpu = time.perf_counter(), time.process_time()
        trainer.eager.vote(control.votes())
        trainer.eager.limit_loss(control.loss_limit)
        agreement = time.process_time() - cpu
        added = 0.0
        if is_on:
            before = time.process_time()
            watch.before_step(step)
            added += time.process_time() - before
        metrics = trainer.train_step(step % config.train.steps)
        before = time.process_time()
        control.judge(metrics.votes, step=step, loss=metrics.loss, skipped=metrics.skipped)
        agreement += time.process_time() - before
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
        found.append(
            Step(
                is_on=is_on,
                wall=time.perf_counter() - start,
                cpu=time.process_time() - cpu,
                metrics_cpu=added,
                agreement_cpu=agreement,
                num_calls=max(ring.serials) - num_calls,
                num_phases=phases,
            )
        )
    PhaseClock.phase = entered  # type: ignore[method-assign]
    trainer.eager.clock.enabled = True
    costs = cost_of_record(ring), cost_of_phase(trainer.eager.clock)
    ring.remove()
    return found[4:], *costs


def cost_of_record(ring: CallRing) -> float:
    """Return the processor time of one record of the ring."""
    import torch

    group, tensor = ring.group("benchmark", range(RANKS)), torch.zeros(4, 64)

    def call() -> None:
        with group.begin("all_reduce_", tensor.shape, tensor.dtype):
            pass

    return least_cost(call)


def cost_of_phase(clock: PhaseClock) -> float:
    """Return the processor time of one phase."""

    def phase() -> None:
        with clock.phase("optimizer"):
            pass

    return least_cost(phase)


def least_cost(action: Callable[[], None], *, repeats: int = 20, number: int = 2000) -> float:
    """Return the processor time of one call: the least mean of several loops."""
    costs = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(number):
            action()
        costs.append((time.process_time() - start) / number)
    return min(costs)


def table(by_rank: Sequence[tuple[list[Step], float, float]]) -> list[str]:
    """Cost per step of each part, of the rank where their sum is the largest share."""
    found = []
    for steps, per_call, per_phase in by_rank:
        on = [step for step in steps if step.is_on]
        calls, phases = (
            statistics.fmean(step.num_calls for step in on),
            statistics.fmean(step.num_phases for step in on),
        )
        parts = {
            f"ring: {calls:.0f} records of {per_call * 1e6:.1f} us": calls * per_call,
            f"phases: {phases:.0f} of {per_phase * 1e6:.1f} us": phases * per_phase,
            "metrics": statistics.fmean(step.metrics_cpu for step in on),
            "agreement": statistics.fmean(step.agreement_cpu for step in on),
        }
        parts["sum"] = sum(parts.values())
        found.append((statistics.median(step.cpu for step in steps), parts))
    own, parts = max(found, key=lambda pair: pair[1]["sum"] / pair[0])
    lines = [f"of {own * 1e3:.1f} ms of processor time of one rank and step:"]
    return lines + [
        f"{name:40}{seconds * 1e6:8.0f} us {seconds / own:7.2%}" for name, seconds in parts.items()
    ]


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
    steps = by_rank[0][0]
    # A step is as slow as rank 0 says, and costs the processor time of all ranks.
    wall = [step.wall for step in steps]
    cpu = [sum(one[0][number].cpu for one in by_rank) for number in range(len(steps))]
    on = [number for number, step in enumerate(steps) if step.is_on]
    off = [number for number, step in enumerate(steps) if not step.is_on]
    lines = [f"{len(on)} pairs of steps of examples/demo.toml on {RANKS} ranks"]
    for name, values in (("time of a step", wall), ("processor time, all ranks", cpu)):
        text = compare([values[step] for step in on], [values[step] for step in off])
        lines.append(f"{name:28}{text}")
    finish([header("torch"), "\n".join(lines), "\n".join(table(by_rank))], args.out)


if __name__ == "__main__":
    main()
