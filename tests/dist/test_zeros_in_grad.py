"""The number of zeros in the gradient is that of one process, in every layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from megatrain.train.trainer import build_trainer
from tests.dist.test_invariance import make_config
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

STEPS = 3
# Few tokens: most rows of the embedding have no gradient. A bucket has several parameters.
SMALL = {"debug.count_zeros": True, "train.global_batch_size": 4, "train.microbatch_size": 1}
DENSE: dict[str, Any] = {**SMALL, "model.tie_embeddings": False}
EXPERTS: dict[str, Any] = {**DENSE, "moe.num_experts": 4, "moe.top_k": 2}


def zeros(_rank: int, world_size: int, changes: dict[str, Any]) -> list[int | None]:
    config = make_config(world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    return [trainer.train_step(step).num_zeros_in_grad for step in range(STEPS)]


@cache
def zeros_of_one_process(has_experts: bool) -> list[int]:
    """Count the zeros of each parameter's whole gradient."""
    config = make_config(1, EXPERTS if has_experts else DENSE)
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    found = []
    for step in range(STEPS):
        trainer.train_step(step)
        grads = [
            buffer.main_grad(index)
            for buffer in trainer.optimizer.buffers
            for index in range(len(buffer.params))
        ]
        found.append(sum(int((grad == 0).sum()) for grad in grads))
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, DENSE),
    "dp2": (2, DENSE),
    "dp2 without ZeRO-1": (2, {**DENSE, "optimizer.distributed": False}),
    "dp4 two instances, overlapped": (
        4,
        {**DENSE, "optimizer.num_instances": 2, "optimizer.overlap": "all"},
    ),
    "tp2 sequence parallel, pp2": (
        4,
        {**DENSE, "parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.pp": 2},
    ),
    "experts, ep2": (2, {**EXPERTS, "parallel.ep": 2}),
    "whole steps as graphs": (1, {**DENSE, "graphs.mode": "full_step", "graphs.warmup_steps": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zeros_are_counted_once_in_every_layout(layout: str) -> None:
    world_size, changes = LAYOUTS[layout]
    expected = zeros_of_one_process("moe.num_experts" in changes)
    assert expected[0] > 1000
    for found in run_ranks(world_size, zeros, world_size, changes, timeout_s=120):
        assert found == expected


def test_zeros_are_not_counted_unless_asked_for() -> None:
    assert zeros(0, 1, {**DENSE, "debug.count_zeros": False}) == [None] * STEPS
