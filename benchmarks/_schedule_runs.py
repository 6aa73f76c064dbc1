"""Pipelines that run: runtimes against each other, and simulated against measured time.

The parts ``overhead`` and ``predict`` of ``bench_schedules.py``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from _common import on_gloo_ranks, take_turns
from megacore.parallel import Group, ProcessGroups, Topology
from megacore.pipeline import (
    ActivationSpec,
    Costs,
    PipelineExecutor,
    Schedule,
    build_schedule,
    receives_for,
)


def ours(name: str, p: int, m: int) -> Schedule:
    chunks = 2 if name in ("interleaved_1f1b", "looped_bfs", "interleaved_zb") else None
    return build_schedule(name, num_ranks=p, num_microbatches=m, num_chunks=chunks)


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
