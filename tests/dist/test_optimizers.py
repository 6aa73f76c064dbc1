"""Optimizers on several ranks: the losses of one process, and resumes in other layouts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

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
    # Blocks of 32 columns that two tensor-parallel ranks do not divide.
    "adamw_8bit": {"optimizer.name": "adamw_8bit", "model.hidden_size": 64},
    "of torch": {"optimizer.factory": "torch.optim:Adamax"},
}

# Another order of sums may change signs, and the rounding to 8 bits.
TOLERANCES = {"sgd": 1e-6, "lion": 1e-4, "adamw_8bit": 2e-3}
# SGD amplifies rounding from step 8 on: one process whose weights start 1.2e-7 away has losses up
# to 2e-7 away in 7 steps, 1.5e-4 in 20; layouts up to 4e-8 and 9e-5.
STEPS_OF = {"sgd": 7}


def make(world_size: int, changes: dict[str, Any]) -> Trainer:
    config = make_config(world_size, changes)
    return build_trainer(config, world_size=world_size, device=torch.device("cpu"))


def losses_of(_rank: int, world_size: int, changes: dict[str, Any]) -> list[float]:
    trainer = make(world_size, changes)
    steps = STEPS_OF.get(trainer.config.optimizer.name, STEPS)
    return [trainer.train_step(step).loss for step in range(steps)]


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
            ("adamw_8bit", "tp2 pp2"),
            ("adamw_8bit", "dp4 small buckets"),
            ("lion", "dp4 small buckets"),
            ("of torch", "dp4 small buckets"),
        ],
    ),
)
def test_an_optimizer_has_the_losses_of_one_process(name: str, layout: str) -> None:
    world_size, changes = LAYOUTS[layout]
    found = run_ranks(world_size, losses_of, world_size, {**changes, **OPTIMIZERS[name]})
    tolerance = TOLERANCES.get(name, 1e-5)
    assert found[0] == pytest.approx(losses_of_one(name), rel=tolerance)
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
    _rank: int, world_size: int, changes: dict[str, Any], folder: Path, again: Path
) -> list[float]:
    """Load, save at once, and go on."""
    trainer = make(world_size, changes)
    state = load_checkpoint(folder, trainer.pieces(), groups=trainer.groups)
    trainer.optimizer.load_scalars(state.optimizer)
    trainer.optimizer.finish_load(trainer.optimizer.step_count)
    config = trainer.config.model_dump(mode="json")
    save_checkpoint(again, trainer.pieces(), state=state, config=config, groups=trainer.groups)
    return [trainer.train_step(step).loss for step in range(3, 5)]


def _contents(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of the checkpoint in a folder."""
    file = folder / "all.pt"
    dcp_to_torch_save(next(folder.glob("step_*")), file)
    kinds = torch.load(file)
    return {f"{kind} {name}": v for kind, of in kinds.items() for name, v in of.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_goes_on_in_another_layout(name: str, tmp_path: Path) -> None:
    first = tmp_path / "first"
    world_size, changes = LAYOUTS["tp2 pp2"]
    changes = {**changes, **OPTIMIZERS[name]}
    expected = run_ranks(world_size, _save, world_size, changes, first)[0]
    saved = _contents(first)
    for other in ("dp2", "tp2"):
        size, settings = LAYOUTS[other]
        settings = {**settings, **OPTIMIZERS[name]}
        found = run_ranks(size, _restore, size, settings, first, tmp_path / other)
        assert found[0] == pytest.approx(expected, rel=TOLERANCES.get(name, 1e-5))
        again = _contents(tmp_path / other)
        assert again.keys() == saved.keys()
        assert all(torch.equal(again[key], values) for key, values in saved.items())
    same = run_ranks(world_size, _restore, world_size, changes, first, tmp_path / "same")
    assert same[0] == expected
