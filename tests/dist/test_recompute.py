"""Recomputation changes no bit of a training run, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.train.trainer import build_trainer
from tests.dist.test_moe_invariance import MODELS, make_config
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

FULL = {"train.recompute": ["full"]}
ALL_PARTS = {
    "train.recompute": ["norm", "attention", "activation", "moe"],
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2 ep2 interleaved": (
        4,
        {"parallel.pp": 2, "parallel.ep": 2, "pipeline.schedule": "interleaved_1f1b"},
    ),
    "pp2 tp2 sp etp1 ep2 zb_h1": (
        4,
        {
            "parallel.pp": 2,
            "parallel.tp": 2,
            "parallel.sequence_parallel": True,
            "parallel.etp": 1,
            "parallel.ep": 2,
            "pipeline.schedule": "zb_h1",
        },
    ),
    "cp2 tp2 ep2 static": (
        4,
        {
            "parallel.cp": 2,
            "parallel.tp": 2,
            "parallel.etp": 1,
            "parallel.ep": 2,
            "moe.dispatcher": "static",
        },
    ),
    "ep2 allgather, reduced early": (
        2,
        {
            "parallel.ep": 2,
            "moe.dispatcher": "allgather",
            "optimizer.overlap": "all",
        },
    ),
    "pp2, a V": (2, {"parallel.pp": 2, "pipeline.schedule": "zb_v"}),
}


def train_all(_rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[Any]:
    found = []
    for changes in runs:
        config = make_config(world_size, {**changes, "optimizer.clip_grad": 1.0})
        trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
        metrics = [trainer.train_step(step) for step in range(3)]
        weights = {
            f"{piece.info.name} {piece.start}": piece.tensors["main_param"].clone()
            for piece in trainer.pieces()
        }
        numbers = [(step.loss, step.grad_norm, step.experts) for step in metrics]
        found.append((numbers, weights))
    return found


CASES = [*((layout, "softmax") for layout in LAYOUTS), ("pp2, a V", "sigmoid")]


@pytest.mark.parametrize(
    ("layout", "model"),
    representatives(
        CASES,
        [
            case
            for case in CASES
            if case[0] in ("pp2 ep2 interleaved", "pp2, a V", "cp2 tp2 ep2 static")
        ],
    ),
)
def test_recomputation_changes_no_bit(layout: str, model: str) -> None:
    world_size, changes = LAYOUTS[layout]
    base = {**MODELS[model], **changes, "model.dropout": 0.1}
    runs = [base, {**base, **FULL}, {**base, **ALL_PARTS, "train.recompute_keep": 1}]
    for plain, *others in run_ranks(world_size, train_all, world_size, runs, timeout_s=120):
        for numbers, weights in others:
            assert numbers == plain[0]
            for name, weight in plain[1].items():
                assert torch.equal(weights[name], weight), name
