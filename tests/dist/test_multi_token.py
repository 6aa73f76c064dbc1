"""Multi-token prediction: losses and gradients of one process in every layout, and their resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.checkpoint import CheckpointSaver, TrainState, load_checkpoint
from megatrain.models import gpt
from megatrain.train.trainer import build_trainer
from tests.dist.test_moe_invariance import (
    EP2,
    ETP1,
    PP2,
    SP,
    TP2,
    make_config,
    own_gradients,
    whole_gradients,
)
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

STEPS = 20
MTP = {"model.num_mtp_layers": 2, "model.mtp_loss_coef": 0.5, "moe.layer_pattern": "d(de)"}
UNTIED = {**MTP, "model.tie_embeddings": False, "model.dropout": 0.1}
MASKED = {**MTP, "data.factory": "tests.support.own_data:answers"}
PP4 = {"parallel.pp": 4}
INTERLEAVED = {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2}

# Model, ranks, layout. Single processes are made once for each model.
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2 sp ep2": ("tied", 4, {**TP2, **SP, **ETP1, **EP2}),
    "cp2 ep2, mean over tokens": (
        "tied",
        2,
        {"parallel.cp": 2, **EP2, "train.loss_normalization": "token"},
    ),
    "pp2": ("tied", 2, PP2),
    "pp4, three copies of the embedding": (
        "tied",
        4,
        {**PP4, "pipeline.layout": "Ett|t|tmm|L", "train.recompute": ["full"]},
    ),
    "pp2, 2 chunks, beside the embedding": (
        "tied",
        2,
        {**PP2, **INTERLEAVED, "pipeline.layout": "Et|tt|t,m*2|L"},
    ),
    "pp2 tp2, weight gradients apart": (
        "untied",
        4,
        {**PP2, **TP2, "pipeline.schedule": "zb_h1", "optimizer.overlap": "grads"},
    ),
    "pp4, a stage of their own": ("untied", 4, {**PP4, "pipeline.layout": "Et|ttt|mm|L"}),
    "pp2, a V": (
        "untied",
        2,
        {**PP2, "pipeline.schedule": "zb_v", "pipeline.layout": "Et|ttt|mm|L"},
    ),
    "cp2 dp2": ("untied", 4, {"parallel.cp": 2}),
    "masked, cp2 ring ep2": (
        "masked",
        2,
        {"parallel.cp": 2, "parallel.cp_comm": "ring", **EP2},
    ),
    "masked, tp2 sp cp2, means of microbatches": (
        "masked by microbatch",
        4,
        {**TP2, **SP, "parallel.cp": 2, "optimizer.overlap": "all"},
    ),
    "masked, pp2 cp2": (
        "masked",
        4,
        {**PP2, "parallel.cp": 2, "pipeline.layout": "Et|ttt|mm|L", "pipeline.schedule": "zb_v"},
    ),
    "masked, pp2 ep2, means of microbatches": ("masked by microbatch", 4, {**PP2, **EP2}),
}
REPRESENTATIVES = (
    "cp2 ep2, mean over tokens",
    "pp2",
    "pp4, three copies of the embedding",
    "pp2, a V",
    "masked, cp2 ring ep2",
    "masked, tp2 sp cp2, means of microbatches",
)
MODELS = {
    "tied": MTP,
    "untied": UNTIED,
    "masked": MASKED,
    "masked by microbatch": {**MASKED, "train.loss_normalization": "microbatch"},
}


def train(_rank: int, world_size: int, changes: dict[str, Any]) -> Any:
    config = make_config(world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    first = trainer.train_step(0)
    gradients = own_gradients(trainer)
    metrics = [first, *(trainer.train_step(step) for step in range(1, STEPS))]
    return [(step.loss, *step.mtp_losses) for step in metrics], gradients


@pytest.fixture(scope="module")
def singles() -> dict[str, Any]:
    results = {}
    for name, changes in MODELS.items():
        losses, gradients = train(0, 1, changes)
        results[name] = losses, whole_gradients([gradients])
    return results


@pytest.mark.parametrize("layout", representatives(LAYOUTS, REPRESENTATIVES))
def test_layout_gives_losses_and_gradients_of_one_process(
    layout: str, singles: dict[str, Any]
) -> None:
    check(layout, singles)


def test_layout_with_logits_in_blocks(
    singles: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt, "block_columns", lambda *_: 100)
    check("pp2 tp2, weight gradients apart", singles)


def check(layout: str, singles: dict[str, Any]) -> None:
    model, world_size, changes = LAYOUTS[layout]
    results = run_ranks(world_size, train, world_size, {**MODELS[model], **changes}, timeout_s=120)
    losses, gradients = singles[model]
    for found, _ in results:
        assert found == results[0][0], "ranks report different losses"
    for found, expected in zip(results[0][0], losses, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    found = whole_gradients([result[1] for result in results])
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        distance = (found[name] - gradient).norm() / gradient.norm()
        assert distance < 1e-5, f"{name}: {distance}"
    for depth in range(3):
        assert losses[-1][depth] < losses[0][depth] - 0.3, "each depth must have learnt something"


def save_after_two(_rank: int, layout: dict[str, Any], folder: Path) -> list[Any]:
    trainer = build_trainer(make_config(4, layout), world_size=4, device=torch.device("cpu"))
    for step in range(2):
        trainer.train_step(step)
    saver = CheckpointSaver(folder, trainer.pieces, groups=trainer.groups, config={})
    saver.save(TrainState(step=2, samples=16, optimizer=trainer.optimizer.scalars()))
    metrics = trainer.train_step(2)
    return [metrics.loss, *metrics.mtp_losses]


def resume_after_two(
    _rank: int, world_size: int, layout: dict[str, Any], folder: Path
) -> list[Any]:
    config = make_config(world_size, layout)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    state = load_checkpoint(folder, trainer.pieces(), groups=trainer.groups)
    trainer.optimizer.load_scalars(state.optimizer)
    trainer.optimizer.finish_load(trainer.optimizer.step_count)
    metrics = trainer.train_step(2)
    return [metrics.loss, *metrics.mtp_losses]


def test_a_checkpoint_goes_on_in_other_layouts(tmp_path: Path) -> None:
    layout = {**UNTIED, **PP4, "pipeline.layout": "Et|ttt|mm|L"}
    expected = run_ranks(4, save_after_two, layout, tmp_path)[0]
    for world_size, changes in ((1, {}), (2, PP2), (2, TP2)):
        found = run_ranks(world_size, resume_after_two, world_size, {**UNTIED, **changes}, tmp_path)
        assert found[0] == pytest.approx(expected, rel=1e-5), changes
