"""Captured steps with clones have the bits of eager ones, and the host reads no plan for them."""

from __future__ import annotations

from typing import Any

import pytest

from megacore.moe.dispatchers import PeerDispatcher
from megacore.moe.echo import slots
from megacore.moe.echo.device_plan import DevicePlan
from tests.dist.test_echo import skewed_trainer
from tests.support.distributed import run_ranks

STEPS = 5
STATIC: dict[str, Any] = {
    "parallel.ep": 2,
    "moe.dispatcher": "static",
    "moe.echo.num_spare_slots": 2,
    "moe.echo.tolerance": 0.0,
    "train.microbatch_size": 1,
}
ENOUGH = {**STATIC, "moe.echo.num_spare_slots": 4}
TIGHT = {
    **STATIC,
    "moe.echo.planner": "echo",
    "moe.echo.min_imbalance": 3.0,  # no clones, so rank 0 has twice its share
    "moe.echo.receive_budget": 1.0,
    "moe.over_budget": "drop",
}
EAGER: dict[str, Any] = {}
FULL = {"graphs.mode": "full", "graphs.warmup_steps": 2}
LAYERS = {"graphs.mode": "partial", "graphs.scopes": ["attn", "moe"], "graphs.warmup_steps": 2}
CASES = {
    "slots for some": (STATIC, [FULL, LAYERS]),
    "slots for all": (ENOUGH, [FULL]),
    "too little room": (TIGHT, [FULL]),
}


def train(world_size: int, changes: dict[str, Any]) -> list[Any]:
    trainer = skewed_trainer(world_size, changes)
    found = []
    for step in range(STEPS):
        metrics = trainer.train_step(step)
        assert metrics.experts is not None
        echo = {
            layer: (counts.num_plans, counts.num_clones, counts.num_moved, counts.bytes_sent)
            for layer, counts in metrics.experts.echo.items()
        }
        found.append((metrics.loss, metrics.experts.load, metrics.experts.num_over_budget, echo))
    for chunk in trainer.chunks:
        for layer in chunk.moe_layers().values():
            assert isinstance(layer.dispatcher, PeerDispatcher)
    return found


def refuse(*_: Any) -> None:
    raise AssertionError("the host has read the plan")


def train_all(_rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DevicePlan, "read_slots", refuse)
        patch.setattr(slots, "_post", refuse)
        return [train(world_size, changes) for changes in cases]


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_captured_steps_with_clones_have_the_bits_of_eager_ones(name: str) -> None:
    changes, graphs = CASES[name]
    cases = [{**changes, **each} for each in (EAGER, *graphs)]
    for eager, *captured in run_ranks(2, train_all, 2, cases, timeout_s=240):
        for found in captured:
            assert found == eager
        if name == "too little room":
            assert all(num_over > 0 for _, _, num_over, _ in eager)
        else:
            assert all(layer[1] > 0 for *_, echo in eager for layer in echo.values())
            assert eager[-1][0] < eager[0][0]
