"""Gradients of 16-bit weights that products add in float32: the same bits in every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacore.ops.linear import added_grad_of
from megatrain.train.trainer import build_trainer
from tests.dist.test_moe_invariance import make_config
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

BF16 = {"train.dtype": "bfloat16", "moe.num_experts": 0, "model.tie_embeddings": True}
PP2 = {**BF16, "parallel.pp": 2}
STEPS = 4
# Layouts with the arithmetic of another one.
ALIKE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "split backward passes": (2, PP2, {"pipeline.schedule": "zb_h1"}),
    "recomputed": (2, PP2, {"train.recompute": ["full"]}),
    "a copy of the state on each rank": (2, BF16, {"optimizer.distributed": False}),
    "overlapped": (2, {**BF16, "optimizer.bucket_numel": 2000}, {"optimizer.overlap": "all"}),
    "split and overlapped": (
        2,
        PP2,
        {"pipeline.schedule": "zb_h1", "optimizer.overlap": "all", "optimizer.bucket_numel": 2000},
    ),
    "captured layers": (1, BF16, {"graphs.mode": "partial", "graphs.warmup_steps": 1}),
    "a captured step": (1, BF16, {"graphs.mode": "full_step", "graphs.warmup_steps": 1}),
    "captured halves": (
        2,
        {**PP2, "pipeline.schedule": "zb_h1"},
        {"graphs.mode": "partial", "graphs.warmup_steps": 1},
    ),
}


def _train(_rank: int, world_size: int, changes: dict[str, Any]) -> list[float]:
    config = make_config(world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    is_left = "run.torch_operations" in changes
    added = [added_grad_of(param) for chunk in trainer.chunks for param in chunk.parameters()]
    assert all(each is None for each in added) == is_left
    numbers = []
    for step in range(STEPS):
        metrics = trainer.train_step(step)
        numbers += [metrics.loss, metrics.grad_norm]
    assert trainer.optimizer.missing_grads() == []
    return numbers


def trained(world_size: int, changes: dict[str, Any]) -> list[float]:
    if world_size == 1:
        return _train(0, 1, changes)
    found: list[float] = run_ranks(world_size, _train, world_size, changes, timeout_s=120)[0]
    return found


@pytest.mark.parametrize(
    "case",
    representatives(ALIKE, ["split and overlapped", "captured layers", "captured halves"]),
)
def test_schedules_and_graphs_change_no_bit(case: str) -> None:
    world_size, base, change = ALIKE[case]
    assert trained(world_size, base | change) == trained(world_size, base)


def test_a_product_left_to_torch_trains_nearly_alike() -> None:
    own = trained(1, BF16)
    rounded = trained(1, {**BF16, "run.torch_operations": ["add_weight_grad_"]})
    assert own != rounded
    assert own == pytest.approx(rounded, rel=5e-3)
