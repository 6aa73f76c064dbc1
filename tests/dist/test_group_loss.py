"""A loss of one's own over groups of answers: the gradients of autograd, in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megacore.errors import ConfigError, DataError
from megatrain.api import AnswerLogprobs
from megatrain.train.trainer import Trainer, build_trainer
from tests.support import own_data
from tests.support.configs import FOUR_LAYERS, changed_config
from tests.support.distributed import run_ranks

BASE: dict[str, dict[str, Any]] = {
    "model": {**FOUR_LAYERS, "seq_length": 64},
    "train": {
        "steps": 5,
        "microbatch_size": 2,
        "global_batch_size": 8,
        "loss": "tests.support.own_data:ranking",
    },
    "data": {"factory": "tests.support.own_data:group_data", "document_mask": True},
    "optimizer": {"lr": 2e-3, "warmup": 0, "schedule": "constant"},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "other microbatches": (1, {"train.microbatch_size": 8}),
    "tp2 sp": (2, {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    "cp2 pp2": (4, {"parallel.cp": 2, "parallel.pp": 2}),
    "dp2 cp2": (4, {"parallel.cp": 2}),
}


def make_trainer(world_size: int, changes: dict[str, Any]) -> Trainer:
    config = changed_config(world_size, BASE, changes)
    return build_trainer(config, world_size=world_size, device=torch.device("cpu"))


def train(_rank: int, world_size: int, changes: dict[str, Any]) -> list[tuple[float, ...]]:
    trainer = make_trainer(world_size, changes)
    found = []
    for step in range(5):
        metrics = trainer.train_step(step)
        found.append((metrics.loss, metrics.grad_norm, *metrics.groups.values()))
        assert metrics.num_labels == groups_of(trainer, step)
    validation = trainer.evaluate(whole=True)["held out"]  # 63 samples in batches of 8
    assert validation.num_labels == sum(groups_of(trainer, step) for step in range(8)) - last_of(
        trainer
    )
    return [*found, (validation.loss, *validation.groups.values())]


def last_of(trainer: Trainer) -> int:
    return len(trainer.data.train.sample(63).values) // 3


def groups_of(trainer: Trainer, step: int) -> int:
    samples = (trainer.data.train.sample(number) for number in range(8 * step, 8 * step + 8))
    return sum(len(sample.values) // 3 for sample in samples)


@pytest.fixture(scope="module")
def single() -> list[tuple[float, ...]]:
    return train(0, 1, {})


def test_loss_and_gradient_are_those_of_autograd() -> None:
    trainer = make_trainer(1, {})
    (chunk,) = trainer.chunks
    batches = trainer._batches(trainer.data.train)
    losses, right = [], []
    for number in range(trainer.eager.num_microbatches):
        batch = batches(0, number)
        hidden = chunk._hidden(None, batch)
        logprobs = chunk.head.columns(hidden).float().log_softmax(-1).transpose(0, 1)
        sums = []
        for row, count in enumerate(batch.answers.counts):
            ends = (*batch.documents.starts[row][1:], 64)
            for begin, end in list(zip(batch.documents.starts[row], ends, strict=True))[:count]:
                labels = batch.labels[row, begin:end]
                own = logprobs[row, begin:end].gather(-1, labels.clamp(min=0)[:, None])[:, 0]
                sums.append((own * (labels >= 0)).sum())
        answers = AnswerLogprobs(
            logprobs=torch.stack(sums),
            num_tokens=torch.zeros(len(sums)),
            values=batch.answers.values,
        )
        each, metrics = own_data.ranking(answers)
        losses += each.unbind(0)
        right += metrics[0].tolist()
    loss = torch.stack(losses).mean()
    params = [param for _, param in chunk.param_infos()]
    norm = torch.stack([grad.norm() for grad in torch.autograd.grad(loss, params)]).norm()
    metrics = trainer.train_step(0)
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert metrics.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert metrics.groups["accuracy"] == pytest.approx(sum(right) / len(right))


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_steps_of_one_process(
    layout: str, single: list[tuple[float, ...]]
) -> None:
    world_size, changes = LAYOUTS[layout]
    for ours in run_ranks(world_size, train, world_size, changes, timeout_s=300):
        for one, other in zip(ours, single, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_values_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = own_data.GroupSamples.sample

    def wrong(self: own_data.GroupSamples, number: int) -> Any:
        return replace(sample(self, number), values=np.zeros(3, dtype=np.float32))

    monkeypatch.setattr(own_data.GroupSamples, "sample", wrong)
    with pytest.raises(
        DataError, match=r"values of sample 0 must be a float64 .* got float32 \(3,"
    ):
        make_trainer(1, {})


def test_a_loss_of_groups_needs_answers_and_named_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(1, {"data.factory": None, "train.eval_interval": 0})
    with pytest.raises(DataError, match="needs samples with document_starts and values"):
        trainer.train_step(0)
    monkeypatch.setattr(own_data.Ranking, "metrics", None)
    with pytest.raises(ConfigError, match="names as metrics, got 3 and None"):
        make_trainer(1, {})
    monkeypatch.setattr(own_data.Ranking, "metrics", ("accuracy",))
    with pytest.raises(ConfigError, match=r"must return the losses of \d+ groups and their metri"):
        make_trainer(1, {}).train_step(0)
