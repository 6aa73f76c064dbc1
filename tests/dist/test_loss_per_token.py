"""The mean over all tokens that count, in any layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megacore.parallel.batch import Microbatch
from megatrain.config import Config
from megatrain.train.trainer import Trainer, build_trainer
from tests.dist.test_invariance import make_config
from tests.dist.test_moe_invariance import make_config as make_moe_config
from tests.support.distributed import run_ranks

PER_TOKEN = {"train.loss_normalization": "token", "optimizer.clip_grad": 0.5}


def masked(trainer: Trainer) -> Any:
    """The trainer's microbatches, in which later samples have more tokens that do not count."""
    batches = trainer._batches(trainer.data.train)

    def source(step: int, number: int) -> Microbatch:
        batch = batches(step, number)
        if batch.labels is None:  # a stage in the middle reads nothing
            return batch
        positions = torch.arange(batch.shape[1])
        skipped = positions[None] < (batch.sample_ids * 3 % 15)[:, None]
        return replace(batch, labels=batch.labels.masked_fill(skipped, -1))

    return source


def train(_rank: int, world_size: int, changes: dict[str, Any]) -> list[tuple[float, float]]:
    config = make_config(world_size, changes)
    return train_with(config, world_size)


def train_with(config: Config, world_size: int) -> list[tuple[float, float]]:
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    source = masked(trainer)
    metrics = [trainer.step.train(step, source, lr=2e-3) for step in range(6)]
    last = trainer.step.evaluate(source, num_steps=1).loss
    return [(step.loss, step.grad_norm) for step in metrics] + [(last, 0.0)]


@pytest.mark.dist
def test_every_layout_takes_the_mean_over_all_tokens() -> None:
    single = train(0, 1, PER_TOKEN)
    by_microbatch = train(0, 1, {"optimizer.clip_grad": 0.5})
    assert abs(single[0][0] - by_microbatch[0][0]) > 1e-4, "the mask must matter"
    # One microbatch of the whole batch has no other mean.
    whole = train(0, 1, {"optimizer.clip_grad": 0.5, "train.microbatch_size": 16})
    assert [x for step in single for x in step] == pytest.approx(
        [x for step in whole for x in step], rel=1e-5
    )
    layouts: list[dict[str, Any]] = [
        {"parallel.pp": 2, "pipeline.schedule": "zb_v"},
        {"parallel.tp": 2, "parallel.cp": 2, "optimizer.overlap": "grads"},
    ]
    for layout in layouts:
        results = run_ranks(4, train, 4, {**PER_TOKEN, **layout}, timeout_s=120)
        assert all(result == results[0] for result in results)
        assert [x for step in results[0] for x in step] == pytest.approx(
            [x for step in single for x in step], rel=1e-5
        )


def train_experts(
    _rank: int, world_size: int, changes: list[dict[str, Any]]
) -> list[list[tuple[float, float]]]:
    """A run for each of some changes; forking the ranks costs more than these runs."""
    return [train_with(make_moe_config(world_size, change), world_size) for change in changes]


# Router losses so heavy that they are half of the gradient.
HEAVY = {**PER_TOKEN, "moe.aux_loss_coef": 3.0, "moe.z_loss_coef": 0.1}


def assert_close(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    assert [x for step in found for x in step] == pytest.approx(
        [x for step in expected for x in step], rel=2e-5
    )


@pytest.mark.dist
def test_router_losses_count_a_sample_as_often_as_its_tokens_do() -> None:
    [single] = train_experts(0, 1, [{**HEAVY, "train.microbatch_size": 8}])
    [light] = train_experts(0, 1, [{**PER_TOKEN, "train.microbatch_size": 8}])
    assert abs(single[0][1] - light[0][1]) > 0.1 * light[0][1], "router losses must matter"
    small = {**HEAVY, "train.microbatch_size": 1}
    assert_close(train_experts(0, 1, [small])[0], single)
    layouts: list[dict[str, Any]] = [
        {**HEAVY},
        {**HEAVY, "parallel.ep": 2, "train.recompute": ["full"]},
        {**HEAVY, "parallel.pp": 2},
        {**HEAVY, "parallel.cp": 2},
        {**HEAVY, "parallel.tp": 2, "parallel.etp": 1, "parallel.ep": 2},
    ]
    for results in run_ranks(2, train_experts, 2, layouts, timeout_s=120):
        for result in results:
            assert_close(result, single)


@pytest.mark.dist
def test_a_pool_over_ranks_counts_all_their_tokens() -> None:
    batch = {**HEAVY, "moe.aux_loss_type": "batch"}
    [single] = train_experts(0, 1, [{**batch, "train.microbatch_size": 8}])
    layouts = [
        {**batch, "train.microbatch_size": 4, "parallel.ep": 2},
        {**batch, "train.microbatch_size": 8, "parallel.cp": 2},
    ]
    for results in run_ranks(2, train_experts, 2, layouts, timeout_s=120):
        for result in results:
            assert_close(result, single)
