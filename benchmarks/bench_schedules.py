"""Schedules and their execution against torch.distributed.pipelining, in one run.

    python benchmarks/bench_schedules.py [--parts generate formulas overhead predict] [--limit-s 60]

generate: time to a schedule that is ready to run on all ranks. Ours: generated, validated, lowered
to programs with sends and receives, and these proved. Torch: the constructor of its class, which
makes the orders of all ranks and, except for its two single-stage classes, inserts sends and
receives. A constructor that takes longer than the limit is stopped.
formulas: bubble and peak memory of our schedules, simulated with F = I = W = 1, against the
published closed forms, and of torch's orders where it has the schedule.
overhead: both runtimes on the same stages, so small that only the runtimes cost time, in turns.
predict: simulated against measured step time, with stages that sleep.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks need it, and share the cores

import csv
import functools
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import _PipelineStageBase

from _common import header, options, take_turns
from _schedule_runs import ours, show_overhead, show_predictions
from megacore.pipeline import Schedule

SIZES = ((4, 32), (16, 128), (64, 256), (64, 1024))  # (ranks, microbatches)
TORCH_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """Published makespan and peak activations of the fullest rank, for F = I = W = 1, m >= 2p."""

    makespan: Callable[[int, int], float]
    peak: Callable[[int, int], int]


FORMS = {
    "gpipe": Form(makespan=lambda p, m: 3 * (m + p - 1), peak=lambda _, m: m),
    "1f1b": Form(makespan=lambda p, m: 3 * (m + p - 1), peak=lambda p, _: p),
    "interleaved_1f1b": Form(
        makespan=lambda p, m: 6 * m + 3 * (p - 1), peak=lambda p, _: 3 * p - 1
    ),
    "looped_bfs": Form(makespan=lambda p, m: 6 * m + 3 * (p - 1), peak=lambda _, m: 2 * m),
    "zb_h1": Form(makespan=lambda p, m: 3 * m + p - 1, peak=lambda p, _: p),
    "zb_h2": Form(makespan=lambda p, m: 3 * m + p - 1, peak=lambda p, _: 2 * p),
    "interleaved_zb": Form(makespan=lambda p, m: 6 * m + p - 1, peak=lambda p, _: 2 * p),
    "zb_v": Form(makespan=lambda p, m: 6 * m + p - 1, peak=lambda p, _: 2 * p),
    "v_half": Form(makespan=lambda p, m: 6 * m + 3 * p - 7, peak=lambda p, _: 2 * ((p + 2) // 2)),
    "v_min": Form(makespan=lambda p, m: 6 * m + 4 * p - 5, peak=lambda p, _: 2 * ((p + 4) // 3)),
    "dualpipe_v": Form(makespan=lambda p, m: 6 * m + 2 * (p - 1), peak=lambda p, _: 2 * p + 1),
    "dualpipe": Form(makespan=lambda p, m: 3 * m + p - 2, peak=lambda p, _: p + 1),
}


# ---- generation ----------------------------------------------------------------------------------


class LoneStage(_PipelineStageBase):
    """A stage of rank 0 without processes: torch plans the orders of all ranks from its sizes."""

    def __init__(self, *, stage_index: int, num_stages: int, group_size: int) -> None:
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group_size = group_size
        self.group_rank = 0
        self.group = None
        self.submod = nn.Identity()
        self.has_backward = True

    def _create_grad_recv_info(self, *_: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_forward_infra(self, *_: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_backward_infra(self, *_: Any) -> None:
        pass


def torch_schedule(name: str, p: int, m: int) -> Any:
    make = getattr(theirs, TORCH_CLASSES[name])
    if name in ("gpipe", "1f1b"):
        stage = LoneStage(stage_index=0, num_stages=p, group_size=p)
        return make(stage, n_microbatches=m, loss_fn=lambda *_: None)
    places = (0, 2 * p - 1) if name in ("zb_v", "dualpipe_v") else (0, p)
    stages = [LoneStage(stage_index=s, num_stages=2 * p, group_size=p) for s in places]
    return make(stages, n_microbatches=m, loss_fn=lambda *_: None)


def within(limit_s: float, function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function in a process of its own, or None if it takes too long."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=lambda: writer.send(function(*args)), daemon=True)
    process.start()
    writer.close()  # so that the end of the process is noticed, even without a result
    try:
        return reader.recv() if reader.poll(limit_s) else None
    except EOFError:
        raise SystemExit(f"{function.__name__}{args} failed") from None
    finally:
        process.terminate()
        process.join()


@functools.cache
def torch_facts_within(limit_s: float, name: str, p: int, m: int) -> dict[str, float] | None:
    """Of one of torch's schedules, unless its constructor takes too long."""
    found: dict[str, float] | None = within(limit_s, torch_facts, name, p, m)
    return found


def torch_facts(name: str, p: int, m: int) -> dict[str, float]:
    """Seconds of the constructor, and what our simulator says of the orders it made."""
    start = time.perf_counter()
    schedule = torch_schedule(name, p, m)
    result = {"seconds": time.perf_counter() - start}
    order = schedule.pipeline_order
    rows = [
        [str(a) for a in order[rank] if a is not None and "GRAD" not in str(a)]
        for rank in sorted(order)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        try:
            timeline = Schedule.from_csv(path).simulate()
        except ValueError:  # what torch 2.13 reports of its 1F1B is broken
            return result
    return {**result, "makespan": timeline.makespan, "peak": max(timeline.peak_in_flight)}


def ready_to_run(name: str, p: int, m: int) -> None:
    schedule = ours(name, p, m)
    schedule.program(0)  # lowers and proves the programs of all ranks


def best_ms(run: Callable[[], object], *, rounds: int) -> float:
    gc.collect()
    return 1e3 * min(take_turns({"ours": run}, rounds=rounds)["ours"])


def show_generation(limit_s: float) -> None:
    print("\nGeneration: milliseconds to a validated schedule, and to proved programs of all ranks")
    print(
        f"{'schedule':18}{'p':>4}{'m':>6}{'actions':>9}{'valid ms':>10}{'programs ms':>13}"
        f"{'torch ms':>11}{'torch/ours':>12}"
    )
    for name in TORCH_CLASSES:
        for p, m in SIZES:
            schedule = ours(name, p, m)
            actions = sum(len(schedule.actions(rank)) for rank in range(p))
            rounds = 3 if actions > 50_000 else 7
            valid = best_ms(lambda n=name, p=p, m=m: ours(n, p, m), rounds=rounds)
            programs = best_ms(lambda n=name, p=p, m=m: ready_to_run(n, p, m), rounds=rounds)
            other = torch_facts_within(limit_s, name, p, m)
            if other is None:
                torch_text = f">{limit_s * 1e3:,.0f}"
                ratio = f">{limit_s * 1e3 / programs:,.0f}x"
            else:
                torch_text = f"{other['seconds'] * 1e3:,.1f}"
                ratio = f"{other['seconds'] * 1e3 / programs:,.1f}x"
            print(
                f"{name:18}{p:>4}{m:>6}{actions:>9,}{valid:>10.2f}{programs:>13.2f}"
                f"{torch_text:>11}{ratio:>12}",
                flush=True,
            )
    print("torch's gpipe and 1f1b hold orders of all ranks, but no sends and receives")


def show_formulas(limit_s: float) -> None:
    print("\nFormulas: makespan (bubble) and peak activations of the fullest rank, F = I = W = 1")
    print(
        f"{'schedule':18}{'p':>4}{'m':>6}{'ours':>9}{'bubble':>8}{'published':>11}{'torch':>9}"
        f"{'peak':>7}{'published':>11}{'torch':>7}{'bound':>9}{'gap':>7}"
    )
    for name, form in FORMS.items():
        for p, m in ((4, 32), (16, 128), (64, 256)):
            schedule = ours(name, p, m)
            timeline = schedule.simulate()
            bound = schedule.lower_bound().value
            other = torch_facts_within(limit_s, name, p, m) if name in TORCH_CLASSES else None
            their_makespan = f"{other['makespan']:g}" if other and "makespan" in other else "-"
            their_peak = f"{other['peak']:g}" if other and "peak" in other else "-"
            print(
                f"{name:18}{p:>4}{m:>6}{timeline.makespan:>9g}{timeline.bubble_fraction:>8.2%}"
                f"{form.makespan(p, m):>11g}{their_makespan:>9}{max(timeline.peak_in_flight):>7}"
                f"{form.peak(p, m):>11}{their_peak:>7}{bound:>9g}"
                f"{timeline.makespan / bound - 1:>7.1%}",
                flush=True,
            )


def main() -> None:
    parts = {
        "generate": lambda args: show_generation(args.limit_s),
        "formulas": lambda args: show_formulas(args.limit_s),
        "overhead": lambda args: show_overhead(args.rounds),
        "predict": lambda args: show_predictions(args.steps),
    }
    parser = options(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--limit-s", type=float, default=60.0, help="for one of torch's schedules")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each runtime")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each prediction")
    args = parser.parse_args()
    print(header("torch"))
    for name in args.parts:
        parts[name](args)


if __name__ == "__main__":
    main()
