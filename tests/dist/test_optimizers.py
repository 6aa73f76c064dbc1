"""Optimizers on several ranks: the losses of one process, and resumes in other layouts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.checkpoint import load_checkpoint, save_checkpoint
from megatrain.checkpoint.format import TrainState
from megatrain.train.trainer import Trainer, build_trainer
from tests.dist.test_invariance import LAYOUTS, make_config
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

STEPS = 20

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer.name": "adam"},
    "sgd": {"optimizer.name": "sgd", "optimizer.lr": 0.3, "optimizer.nesterov": True},
    "lion": {"optimizer.name": "lion", "optimizer.lr": 1e-3, "optimizer.moments_dtype": "bfloat16"},
    "muon": {"optimizer.name": "muon", "optimizer.muon.adamw_lr": 4e-3},
    "of torch": {"optimizer.factory": "torch.optim:Adamax"},
}


def make(world_size: int, changes: dict[str, Any]) -> Trainer:
    config = make_config(world_size, changes)
    return build_trainer(config, world_size=world_size, device=torch.device("cpu"))


def losses_of(_rank: int, world_size: int, changes: dict[str, Any]) -> list[float]:
    trainer = make(world_size, changes)
    return [trainer.train_step(step).loss for step in range(STEPS)]


@cache
def losses_of_one(name: str) -> list[float]:
    return losses_of(0, 1, OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("name", "layout"),
    representatives(
        [
            (name, layout)
            for name in OPTIMIZERS
            for layout in ("dp4 small buckets", "tp2 pp2", "pp2 dp2 zb_v, overlapped")
        ],
        [
            ("adam", "pp2 dp2 zb_v, overlapped"),
            ("sgd", "tp2 pp2"),
            ("muon", "dp4 small buckets"),
            ("muon", "tp2 pp2"),
            ("lion", "dp4 small buckets"),
            ("of torch", "dp4 small buckets"),
        ],
    ),
)
def test_an_optimizer_has_the_losses_of_one_process(name: str, layout: str) -> None:
    world_size, changes = LAYOUTS[layout]
    found = run_ranks(world_size, losses_of, world_size, {**changes, **OPTIMIZERS[name]})
    # Of lion, signs of a mean near zero may differ by the order of sums.
    assert found[0] == pytest.approx(losses_of_one(name), rel=1e-4 if name == "lion" else 1e-5)
    assert found[0][-1] < found[0][0] - 0.3, "the model must have learnt something"


def _save(_rank: int, world_size: int, changes: dict[str, Any], folder: Path) -> list[float]:
    """Train, save, and go on."""
    trainer = make(world_size, changes)
    for step in range(3):
        trainer.train_step(step)
    trainer.optimizer.finish_param_gather()
    state = TrainState(step=3, samples=48, optimizer=trainer.optimizer.scalars())
    config = trainer.config.model_dump(mode="json")
    save_checkpoint(folder, trainer.pieces(), state=state, config=config, groups=trainer.groups)
    return [trainer.train_step(step).loss for step in range(3, 5)]


def _restore(
    _rank: int, world_size: int, changes: dict[str, Any], folder: Path
) -> tuple[list[float], dict[str, Tensor]]:
    """Load, return the state of this rank by parameter and range, and go on."""
    trainer = make(world_size, changes)
    state = load_checkpoint(folder, trainer.pieces(), groups=trainer.groups)
    trainer.optimizer.load_scalars(state.optimizer)
    trainer.optimizer.finish_load(trainer.optimizer.step_count)
    kept = {
        f"{piece.info.name} {piece.start} {kind}": values.clone()
        for piece in trainer.pieces()
        for kind, values in piece.tensors.items()
    }
    return [trainer.train_step(step).loss for step in range(3, 5)], kept


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_goes_on_in_another_layout(name: str, tmp_path: Path) -> None:
    world_size, changes = LAYOUTS["tp2 pp2"]
    changes = {**changes, **OPTIMIZERS[name]}
    expected = run_ranks(world_size, _save, world_size, changes, tmp_path)[0]
    for other in ("dp2", "tp2"):
        size, settings = LAYOUTS[other]
        found = run_ranks(size, _restore, size, {**settings, **OPTIMIZERS[name]}, tmp_path)
        assert found[0][0] == pytest.approx(expected, rel=1e-4 if name == "lion" else 1e-5)
    same = run_ranks(world_size, _restore, world_size, changes, tmp_path)
    assert same[0][0] == expected
