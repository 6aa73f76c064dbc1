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
    def forward(_ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        needs_x, needs_weight = ctx.needs_input_grad
        time.sleep(INPUT_S * needs_x + WEIGHT_S * needs_weight)
        return grad if needs_x else None, grad.sum() if needs_weight else None


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))


def run_steps(rank: int, schedules: list[Schedule], tries: int) -> list[list[list[TimedAction]]]:
    """The events of some steps of each schedule."""
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
            output = Sleep.apply(x, chunk.weight)
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


def test_simulated_and_measured_steps_agree() -> None:
    schedules = [
        build_schedule(name, num_ranks=2, num_microbatches=4)
        for name in ("gpipe", "1f1b", "zb_h1", "zb_v", "dualpipe_v")
    ]
    for tries in (2, 6, 12):  # more only where the machine is busy: others can only delay a step
        results = run_ranks(2, run_steps, schedules, tries, timeout_s=120.0)
        wrong = []
        for number, schedule in enumerate(schedules):
            measured = min(
                makespan_us([*first, *second])
                for first, second in zip(results[0][number], results[1][number], strict=True)
            )
            expected = simulated_ms(schedule) * 1e3
            # Nothing is faster than predicted, on any machine.
            assert measured > 0.99 * expected, (schedule.name, measured, expected)
            if measured > 1.1 * expected:
                wrong.append((schedule.name, round(measured / expected, 3)))
        if not wrong:
            return
    if (overshoot := sleep_overshoot()) > 1.02:
        pytest.skip(
            f"the machine is too busy to measure: bare sleeps take {overshoot:.2f}x as long"
        )
    raise AssertionError(f"measured over simulated time: {wrong}")


def sleep_overshoot() -> float:
    """How much longer than asked for a step's worth of sleeps takes, at best."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(8):
            time.sleep(FORWARD_S)
            sum(range(5_000))  # a little work, as between the passes of a step
        times.append((time.perf_counter() - start) / (8 * FORWARD_S))
    return min(times)
