"""Whole models whose routers do the extreme: a run on four ranks is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.train.trainer import Trainer, build_trainer
from tests.dist.test_moe_invariance import make_config
from tests.support.distributed import run_ranks

STEPS = 2
DISPATCHERS = ("allgather", "alltoall", "static")
SHORT = {"model.seq_length": 4, "train.microbatch_size": 1, "train.global_batch_size": 2}
# Each of four ranks routes one token at a time: tp splits a sequence of four.
ONE_TOKEN = {
    **SHORT,
    "parallel.tp": 4,
    "parallel.etp": 1,
    "parallel.sequence_parallel": True,
}
BASE = {
    "train.steps": STEPS,
    "model.num_layers": 2,
    "model.num_kv_heads": 4,
    "moe.num_experts": 8,
    "moe.normalize": False,  # or the weight of an only choice would be 1, whatever the scores
    "moe.aux_loss_coef": 0.0,
    "moe.static_budget": 8.0,
}
# What is forced: name, settings, experts that tokens are drawn to.
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "all tokens to one expert, so three ranks have none": ({"moe.top_k": 1}, [5]),
    "one rank without tokens": ({"moe.top_k": 6}, [0, 1, 2, 3, 6, 7]),
    "every token to every expert": ({"moe.top_k": 8}, []),
}


def force(trainer: Trainer, favoured: list[int]) -> None:
    """Make some experts the choice of every token; biases never reach the weights of choices."""
    for chunk in trainer.chunks:
        for layer in chunk.moe_layers().values():
            assert layer.router.expert_bias is not None
            layer.router.expert_bias[favoured] = 100.0


def train(world_size: int, changes: dict[str, Any], favoured: list[int]) -> Any:
    bias = {"moe.expert_bias": True, "moe.expert_bias_rate": 0.0}
    config = make_config(world_size, {**BASE, **bias, **changes})
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    force(trainer, favoured)
    metrics = [trainer.train_step(step) for step in range(STEPS)]
    values = [x for step in metrics for x in (step.loss, step.grad_norm)]
    assert all(step.experts.num_dropped == 0 for step in metrics)
    return values, [step.experts.load for step in metrics]


def layouts(world_size: int) -> list[dict[str, Any]]:

    if world_size == 1:
        return [{}, SHORT]
    spread = {"parallel.ep": 4}
    return [
        {**spread, **shape, "moe.dispatcher": dispatcher}
        for shape in ({}, ONE_TOKEN)
        for dispatcher in DISPATCHERS
    ]


def train_all(_rank: int, world_size: int) -> dict[str, list[Any]]:
    """All runs in one set of ranks; forking costs more than they do."""
    return {
        name: [train(world_size, {**changes, **layout}, favoured) for layout in layouts(world_size)]
        for name, (changes, favoured) in CASES.items()
    }


@pytest.mark.dist
def test_extreme_routing_is_that_of_one_process_with_every_dispatcher() -> None:
    expected = train_all(0, 1)
    for load in expected["all tokens to one expert, so three ranks have none"][0][1][0].values():
        assert [expert for expert, count in enumerate(load) if count] == [5]
    for load in expected["one rank without tokens"][0][1][0].values():
        assert load[4:6] == (0, 0)
    for ranks in run_ranks(4, train_all, 4, timeout_s=120):
        for name, (long, short) in expected.items():
            for number, (values, loads) in enumerate(ranks[name]):
                wanted = long if number < len(DISPATCHERS) else short
                where = f"{name}, {layouts(4)[number]}"
                assert values == pytest.approx(wanted[0], rel=2e-5), where
                assert loads[0] == wanted[1][0], where
