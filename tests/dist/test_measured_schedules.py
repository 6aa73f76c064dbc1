"""What the simulator predicts is what the executor measures, with sleeps in place of compute."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.parallel import ProcessGroups, Topology
from megacore.pipeline import (
    ActionRecorder,
    ActivationSpec,
    Costs,
    PipelineExecutor,
    Schedule,
    TimedAction,
    build_schedule,
)
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

FORWARD_S, INPUT_S, WEIGHT_S = 0.012, 0.016, 0.008


class Sleep(torch.autograd.Function):
    """A product that takes its time, for each part of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, slower: int) -> Tensor:
        ctx.slower = slower
        time.sleep(slower * FORWARD_S)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        time.sleep(ctx.slower * (INPUT_S * needs_x + WEIGHT_S * needs_weight))
        return grad if needs_x else None, grad.sum() if needs_weight else None, None


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))


def run_steps(
    rank: int, schedules: list[Schedule], slower: int, tries: int
) -> list[list[list[TimedAction]]]:
    """The events of some steps of each schedule, whose passes take ``slower`` times as long."""
    groups = ProcessGroups.create(Topology(world_size=2, pp=2), timeout_s=30.0)
    spec = ActivationSpec(shape=(4,), dtype=torch.float32, device="cpu")
    results = []
    for schedule in schedules:
        chunks = [Stage() for _ in schedule.stages(rank)]
        last = schedule.num_stages - 1
        end = chunks[-1] if schedule.stages(rank)[-1] == last else None

        def step(
            chunk: nn.Module, hidden: Tensor | None, _microbatch: int, end: Stage | None = end
        ) -> Tensor:
            x = torch.ones(4, requires_grad=True) if hidden is None else hidden
            output = Sleep.apply(x, chunk.weight, slower)
            return output.mean() if chunk is end else output

        executor = PipelineExecutor(
            schedule.program(rank), chunks, group=groups.pp, activation=spec
        )
        steps = []
        for _ in range(tries):
            recorder = ActionRecorder(rank=rank)
            executor.run(step, recorder=recorder)
            steps.append(recorder.events())
        results.append(steps)
    return results


def simulated_ms(schedule: Schedule) -> float:
    costs = Costs(
        forward=FORWARD_S * 1e3, backward_input=INPUT_S * 1e3, backward_weight=WEIGHT_S * 1e3
    )
    return schedule.simulate(costs).makespan


def makespan_us(events: list[TimedAction]) -> float:
    # One rank may begin to wait while the other one still ends the step before.
    compute = [event for event in events if "RECV" not in event.action]
    return max(e.end_us for e in compute) - min(e.start_us for e in compute)


@pytest.mark.campaign
def test_simulated_and_measured_steps_agree() -> None:
    schedules = [
        build_schedule(name, num_ranks=2, num_microbatches=4)
        for name in ("gpipe", "1f1b", "zb_h1", "zb_v", "dualpipe_v")
    ]
    # A busy machine delays each pass by some milliseconds, whatever it takes: the slower the
    # passes, the less that is beside a schedule that is really longer than predicted.
    for slower, tries in ((1, 3), (5, 3), (25, 2)):
        results = run_ranks(2, run_steps, schedules, slower, tries, timeout_s=300.0)
        ratios = [
            min(
                makespan_us([*first, *second])
                for first, second in zip(results[0][number], results[1][number], strict=True)
            )
            / (1e3 * slower * simulated_ms(schedule))
            for number, schedule in enumerate(schedules)
        ]
        # Nothing is faster than predicted, on any machine.
        assert min(ratios) > 0.99, ratios
        schedules = [s for s, ratio in zip(schedules, ratios, strict=True) if ratio > 1.1]
        if not schedules:
            return
    raise AssertionError(f"measured over simulated time of {schedules}: {ratios}")
