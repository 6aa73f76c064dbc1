"""Training with 8-bit operands: every schedule alike, layouts near one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.train.trainer import build_trainer
from tests.dist.test_moe_invariance import make_config
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

FP8 = {"train.fp8": "blockwise"}
STEPS = 6


def _train(_rank: int, world_size: int, changes: dict[str, Any]) -> list[float]:
    config = make_config(world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    return [trainer.train_step(step).loss for step in range(STEPS)]


def test_schedules_and_recomputation_change_no_bit() -> None:
    pp2 = {**FP8, "parallel.pp": 2}
    plain = run_ranks(2, _train, 2, pp2, timeout_s=120)[0]
    for changes in (
        {"pipeline.schedule": "zb_h1"},
        {"train.recompute": ["full"]},
        {"optimizer.distributed": False},
    ):
        assert run_ranks(2, _train, 2, pp2 | changes, timeout_s=120)[0] == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.tp": 2, "parallel.sequence_parallel": True},
        {"parallel.cp": 2},
        {"parallel.ep": 2},
        {"parallel.ep": 2, "moe.dispatcher": "static"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_layouts_stay_near_one_process(changes: dict[str, Any]) -> None:
    single = _train(0, 1, FP8)
    assert single != _train(0, 1, {})
    losses = run_ranks(2, _train, 2, FP8 | changes, timeout_s=120)[0]
    assert losses == pytest.approx(single, rel=3e-3)
