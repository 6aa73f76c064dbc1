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
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import _PipelineStageBase

from _common import header, on_gloo_ranks, options, take_turns
from megacore.parallel import Group, ProcessGroups, Topology
from megacore.pipeline import (
    ActivationSpec,
    Costs,
    PipelineExecutor,
    Schedule,
    build_schedule,
    receives_for,
)

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


def ours(name: str, p: int, m: int) -> Schedule:
    chunks = 2 if name in ("interleaved_1f1b", "looped_bfs", "interleaved_zb") else None
    return build_schedule(name, num_ranks=p, num_microbatches=m, num_chunks=chunks)


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


# ---- execution -----------------------------------------------------------------------------------

WIDTH, ROWS = 8, 2


def trivial_stage() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def mean_loss(output: Tensor, _target: Tensor) -> Tensor:
    return output.mean()


def our_step(schedule: Schedule, group: Group, inputs: list[Tensor]) -> Callable[[], object]:
    activation = ActivationSpec(
        shape=(ROWS, WIDTH), dtype=torch.float32, device=torch.device("cpu")
    )
    chunks = [trivial_stage() for _ in schedule.stages(group.position)]
    last = chunks[-1] if schedule.num_stages - 1 in schedule.stages(group.position) else None
    executor = PipelineExecutor(
        schedule.program(group.position, receives=receives_for(group, activation)),
        chunks,
        group=group,
        activation=activation,
    )
    scale = 1 / len(inputs)

    def forward_step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        output = chunk(inputs[microbatch] if hidden is None else hidden)
        return output.mean() * scale if chunk is last else output

    return lambda: executor.run(forward_step)


def torch_step(
    schedule: Schedule, group: Group, folder: str, batch: Tensor, *, name: str
) -> Callable[[], object]:
    rank, last = group.position, schedule.num_stages - 1
    stages = [
        PipelineStage(trivial_stage(), stage, schedule.num_stages, torch.device("cpu"))
        for stage in schedule.stages(rank)
    ]
    m = schedule.num_microbatches
    if name == "single":  # the class that users take for one stage per rank
        runtime: Any = theirs.Schedule1F1B(stages[0], n_microbatches=m, loss_fn=mean_loss)
    else:
        runtime = theirs._PipelineScheduleRuntime(stages, n_microbatches=m, loss_fn=mean_loss)
        runtime._load_csv(f"{folder}/{schedule.name}.csv", format="compute_only")
    args = [batch] if rank == 0 else []
    kwargs = {"target": batch} if last in schedule.stages(rank) else {}
    return lambda: runtime.step(*args, return_outputs=False, **kwargs)


class Clock:
    """Wall time and processor time (of all threads of this rank) of steps."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self) -> None:
        """Run and time one step; all ranks begin together."""
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        self._step()
        self.cpu.append(time.process_time() - cpu)
        dist.barrier()
        self.wall.append(time.perf_counter() - wall)


def bare_step(schedule: Schedule, group: Group, inputs: list[Tensor]) -> Callable[[], object]:
    """The same passes of this rank's stages without any runtime or message."""
    stages = [trivial_stage() for _ in schedule.stages(group.position)]

    def step() -> None:
        for stage in stages:
            for x in inputs:
                stage(x).mean().backward()

    return step


def overhead_on_rank(_rank: int, world_size: int, folder: str, rounds: int) -> dict[str, Any]:
    """Fastest wall time and median processor time of this rank's step, by schedule and runtime."""
    group = ProcessGroups.create(Topology(world_size=world_size, pp=world_size)).pp
    batch = torch.randn(ROWS * 16, WIDTH)
    found = {}
    for name in OVERHEAD:
        schedule = ours(name, world_size, 16)
        clocks = {"ours": Clock(our_step(schedule, group, list(batch.chunk(16))))}
        clocks["torch"] = Clock(torch_step(schedule, group, folder, batch, name="runtime"))
        if name == "1f1b":
            clocks["single"] = Clock(torch_step(schedule, group, folder, batch, name="single"))
        clocks["bare"] = Clock(bare_step(schedule, group, list(batch.chunk(16))))
        take_turns(clocks, rounds=rounds, warmup=3)
        for key, clock in clocks.items():
            found[name, key] = (min(clock.wall[3:]), statistics.median(clock.cpu[3:]))
    return found


OVERHEAD = ("1f1b", "interleaved_1f1b")


def show_overhead(rounds: int) -> None:
    print("\nOverhead: microseconds per compute action and rank; a stage is one 8 x 8 linear layer")
    print(f"wall: fastest of {rounds} steps of 16 microbatches on the slowest rank, in turns, with")
    print("the wait for the other ranks; cpu: median processor time of a step, mean of the ranks")
    print(
        f"{'schedule':18}{'ranks':>6}{'wall: ours':>12}{'torch':>8}{'ratio':>8}{'class':>8}"
        f"{'bare':>6}{'cpu: ours':>12}{'torch':>8}{'ratio':>8}{'class':>8}{'bare':>6}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4):
            for name in OVERHEAD:
                ours(name, ranks, 16).to_csv(f"{folder}/{name}.csv")
            by_rank = on_gloo_ranks(ranks, overhead_on_rank, ranks, folder, rounds)
            for name in OVERHEAD:
                print(_overhead_row(name, ranks, by_rank), flush=True)
    print("torch: _PipelineScheduleRuntime with our order from CSV; class: its Schedule1F1B;")
    print("bare: the same passes in a loop, without runtime and messages")


def _overhead_row(name: str, ranks: int, by_rank: list[dict[str, Any]]) -> str:
    actions = len(ours(name, ranks, 16).actions(0))
    row = f"{name:18}{ranks:>6}"
    for column, combine in ((0, max), (1, statistics.fmean)):
        us = {
            key: 1e6 * combine([found[name, key][column] for found in by_rank]) / actions
            for key in ("ours", "torch", "single", "bare")
            if (name, key) in by_rank[0]
        }
        single = f"{us['single']:.0f}" if "single" in us else "-"
        ratio = f"{us['torch'] / us['ours']:.2f}x"
        row += f"{us['ours']:>12.0f}{us['torch']:>8.0f}{ratio:>8}{single:>8}{us['bare']:>6.0f}"
    return row


# ---- prediction ----------------------------------------------------------------------------------


class Sleep(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """Sleep; keep how long the backward pass shall sleep."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Sleep."""
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class SleepingStage(nn.Module):
    """A layer that takes its time."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = (forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        slept: Tensor = Sleep.apply(self.linear(x), *self.seconds)
        return slept


PREDICTED = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "1f1b_v")


def stage_seconds(num_stages: int, *, even: bool) -> list[tuple[float, float]]:
    """Forward and backward seconds of every stage; uneven ones have a heavy last stage."""
    factors = [1.0] * num_stages
    if not even:
        factors[-1] = 1.5
    return [(0.010 * factor, 0.020 * factor) for factor in factors]


def predict_on_rank(_rank: int, world_size: int, steps: int) -> dict[str, list[float]]:
    """Seconds of every step by schedule."""
    group = ProcessGroups.create(Topology(world_size=world_size, pp=world_size)).pp
    activation = ActivationSpec(
        shape=(ROWS, WIDTH), dtype=torch.float32, device=torch.device("cpu")
    )
    measured = {}
    for name in PREDICTED:
        for even in (True, False):
            schedule = ours(name, world_size, 8)
            seconds = stage_seconds(schedule.num_stages, even=even)
            mine = schedule.stages(group.position)
            chunks = [SleepingStage(*seconds[stage]) for stage in mine]
            last = chunks[mine.index(len(seconds) - 1)] if len(seconds) - 1 in mine else None
            inputs = torch.randn(8, ROWS, WIDTH)
            executor = PipelineExecutor(
                schedule.program(group.position, receives=receives_for(group, activation)),
                chunks,
                group=group,
                activation=activation,
            )

            def forward_step(
                chunk: nn.Module,
                hidden: Tensor | None,
                microbatch: int,
                last: nn.Module | None = last,
                inputs: Tensor = inputs,
            ) -> Tensor:
                output: Tensor = chunk(inputs[microbatch] if hidden is None else hidden)
                return output.mean() if chunk is last else output

            clock = Clock(lambda e=executor, f=forward_step: e.run(f))
            take_turns({"step": clock}, rounds=steps)
            measured[f"{name}/{even}"] = clock.wall[1:]
    return measured


def show_predictions(steps: int) -> None:
    print("\nPrediction: step of 4 gloo ranks, 8 microbatches; stages sleep 10 ms forward, 20 ms")
    print(f"backward, uneven: the last one 1.5 times as long; {steps} steps, slowest rank of each")
    print(
        f"{'schedule':20}{'stages':>9}{'simulated ms':>14}{'fastest ms':>12}{'error':>8}"
        f"{'median ms':>11}{'error':>8}"
    )
    by_rank = on_gloo_ranks(4, predict_on_rank, 4, steps)
    for name in PREDICTED:
        for even in (True, False):
            schedule = ours(name, 4, 8)
            seconds = stage_seconds(schedule.num_stages, even=even)
            costs = Costs(
                forward=[f for f, _ in seconds],
                backward_input=[b for _, b in seconds],
                backward_weight=0.0,
            )
            simulated = schedule.simulate(costs).makespan
            each = [rank[f"{name}/{even}"] for rank in by_rank]
            measured = [max(same_step) for same_step in zip(*each, strict=True)]
            fastest, median = min(measured), statistics.median(measured)
            print(
                f"{name:20}{'even' if even else 'uneven':>9}{simulated * 1e3:>14.0f}"
                f"{fastest * 1e3:>12.1f}{fastest / simulated - 1:>8.1%}"
                f"{median * 1e3:>11.1f}{median / simulated - 1:>8.1%}",
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
