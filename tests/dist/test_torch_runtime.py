"""Our schedules, written as CSV, run in torch.distributed.pipelining with the right gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from megacore.pipeline import Schedule, build_schedule, schedule_catalog
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

RANKS, MICROBATCHES, BATCH, WIDTH = 4, 8, 2, 6

# In torch 2.11 a rank that holds two stages in a row sends to itself before the first step.
SENDS_TO_ITSELF = pytest.mark.skipif(
    torch.__version__ < "2.13",  # compared as versions, not as text
    reason=f"the setup of stages in torch {torch.__version__} sends from a rank to itself, "
    "which gloo refuses",
)


def one_chain_schedules(placement: str) -> list[Schedule]:
    """All schedules of a placement that PyTorch's CSV can express and that have four ranks."""
    return [
        build_schedule(
            info.name,
            num_ranks=RANKS,
            num_microbatches=MICROBATCHES,
            num_chunks=2 if info.num_chunks == 0 else None,
        )
        for info in schedule_catalog()
        if info.placement == placement and info.name != "no_pipelining"
    ]


def make_stage(stage: int) -> nn.Module:
    torch.manual_seed(100 + stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(2, BATCH * MICROBATCHES, WIDTH, generator=generator)
    return inputs, targets


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def gradients_of_one_process(num_stages: int) -> list[list[Tensor]]:
    stages = [make_stage(stage) for stage in range(num_stages)]
    inputs, targets = batch()
    for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        for stage in stages:
            x = stage(x)
        (loss_of(x, y) / MICROBATCHES).backward()
    return [[p.grad for p in stage.parameters() if p.grad is not None] for stage in stages]


def run_rank(rank: int, placement: str, folder: str) -> dict[str, dict[int, list[Tensor | None]]]:
    """Run the CSV files one after the other; return the gradients of this rank's stages."""
    inputs, targets = batch()
    results = {}
    for schedule in one_chain_schedules(placement):
        last_stage = schedule.num_stages - 1
        modules = {stage: make_stage(stage) for stage in schedule.stages(rank)}
        stages = [
            PipelineStage(module, stage, schedule.num_stages, torch.device("cpu"))
            for stage, module in modules.items()
        ]
        runtime = theirs._PipelineScheduleRuntime(
            stages, n_microbatches=MICROBATCHES, loss_fn=loss_of
        )
        runtime._load_csv(f"{folder}/{schedule.name}.csv", format="compute_only")
        runtime.step(
            *([inputs] if 0 in modules else []),
            **({"target": targets} if last_stage in modules else {}),
        )
        results[schedule.name] = {
            stage: [parameter.grad for parameter in module.parameters()]
            for stage, module in modules.items()
        }
    return results


@pytest.mark.parametrize("placement", ["loop", pytest.param("v", marks=SENDS_TO_ITSELF)])
def test_every_schedule_runs_there_with_the_gradients_of_one_process(
    placement: str, tmp_path: Path
) -> None:
    schedules = one_chain_schedules(placement)
    assert len(schedules) >= 5
    for schedule in schedules:
        schedule.to_csv(tmp_path / f"{schedule.name}.csv")
    results = run_ranks(RANKS, run_rank, placement, str(tmp_path), timeout_s=120.0)
    for schedule in schedules:
        expected = gradients_of_one_process(schedule.num_stages)
        for rank in range(RANKS):
            for stage, gradients in results[rank][schedule.name].items():
                for got, want in zip(gradients, expected[stage], strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
