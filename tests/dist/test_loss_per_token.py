"""The mean over all tokens that count, in any layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megacore.parallel.batch import Microbatch
from megacore.train.trainer import Trainer, build_trainer
from tests.dist.test_invariance import make_config
from tests.support.distributed import run_ranks

PER_TOKEN = {"train.loss_normalization": "token", "optimizer.clip_grad": 0.5}


def masked(trainer: Trainer) -> Any:
    """The trainer's microbatches, in which later samples have more tokens that do not count."""
    batches = trainer._batches(trainer.data.train)

    def source(step: int, number: int) -> Microbatch:
        batch = batches(step, number)
        positions = torch.arange(batch.shape[1])
        skipped = positions[None] < (batch.sample_ids * 3 % 15)[:, None]
        return replace(batch, labels=batch.labels.masked_fill(skipped, -1))

    return source


def train(_rank: int, world_size: int, changes: dict[str, Any]) -> list[tuple[float, float]]:
    config = make_config(world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    source = masked(trainer)
    metrics = [trainer.step.train(step, source, lr=2e-3) for step in range(6)]
    last = trainer.step.evaluate(source, num_steps=1)
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
        {"parallel.tp": 2, "parallel.cp": 2, "optimizer.overlap_grad_reduce": True},
    ]
    for layout in layouts:
        results = run_ranks(4, train, 4, {**PER_TOKEN, **layout}, timeout_s=120)
        assert all(result == results[0] for result in results)
        assert [x for step in results[0] for x in step] == pytest.approx(
            [x for step in single for x in step], rel=1e-5
        )
