"""Parallelism changes nothing in a model with experts: losses and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config import Config, resolve
from megacore.parallel.params import ParamInfo, ShardPosition, unshard
from megacore.train.trainer import Trainer, build_trainer
from tests.support.distributed import run_ranks

STEPS = 20

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 48,
        "seq_length": 16,
        "vocab_size": 256,
        "vocab_pad_multiple": 64,
    },
    "moe": {
        "num_experts": 4,
        "top_k": 2,
        "ffn_hidden_size": 16,
        "first_dense_layers": 1,
        "shared_ffn_hidden_size": 16,
        "aux_loss_coef": 1e-2,
        "z_loss_coef": 1e-3,
    },
    "train": {"steps": STEPS, "microbatch_size": 2, "global_batch_size": 8, "eval_interval": 0},
    "optimizer": {"lr": 2e-3, "warmup_steps": 5, "clip_grad": 0.0},
}

Gradients = dict[str, Tensor]
Result = tuple[list[float], Gradients, list[dict[int, tuple[int, ...]]]]


def make_config(world_size: int, changes: dict[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {name: dict(values) for name, values in BASE.items()}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return resolve(Config(**sections), world_size, vocab_size=256, cuda=False)


def own_gradients(trainer: Trainer) -> list[tuple[ParamInfo, ShardPosition, int, Tensor]]:
    """Gradients of the first step: what the first moment is made of when nothing is clipped."""
    beta1 = trainer.config.optimizer.beta1
    return [
        (
            piece.info,
            ShardPosition.of(piece.info, trainer.groups),
            piece.start,
            piece.tensors["exp_avg"].float() / (1.0 - beta1),
        )
        for piece in trainer.optimizer.pieces()
    ]


def train(_rank: int, world_size: int, changes: dict[str, Any]) -> Any:
    config = make_config(world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    first = trainer.train_step(0)
    gradients = own_gradients(trainer)
    metrics = [first, *(trainer.train_step(step) for step in range(1, STEPS))]
    loads = [step.experts.load for step in metrics]
    return [step.loss for step in metrics], gradients, loads


def whole_gradients(by_rank: list[list[tuple[ParamInfo, ShardPosition, int, Tensor]]]) -> Gradients:
    """Put the pieces of all ranks together; every element must be there."""
    shards: dict[str, list[Tensor]] = {}
    about: dict[str, tuple[ParamInfo, ShardPosition]] = {}
    for pieces in by_rank:
        for info, at, start, values in pieces:
            if info.name not in shards:
                shape = info.local_shape(at.tp_size, ep_size=at.ep_size)
                shards[info.name] = [torch.full(shape, torch.nan) for _ in range(at.num_shards)]
                about[info.name] = (info, at)
            flat = shards[info.name][at.index].view(-1)
            flat[start : start + values.numel()] = values
    return {
        name: unshard(parts, about[name][0], ep_size=about[name][1].ep_size)
        for name, parts in shards.items()
    }


def train_on_ranks(world_size: int, changes: dict[str, Any]) -> Result:
    results = run_ranks(world_size, train, world_size, changes, timeout_s=120)
    assert all(result[0] == results[0][0] for result in results), "ranks report different losses"
    assert all(result[2] == results[0][2] for result in results), "ranks report different loads"
    return results[0][0], whole_gradients([result[1] for result in results]), results[0][2]


def assert_same(found: Result, expected: Result) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        distance = (found[1][name] - gradient).norm() / gradient.norm()
        assert distance < 1e-5, f"{name}: {distance}"
    assert found[2][0] == expected[2][0]


SINGLES: dict[tuple[tuple[str, Any], ...], Result] = {}
EP2 = {"parallel.ep": 2}
SP = {"parallel.sequence_parallel": True}
STATIC = {"moe.dispatcher": "static"}
ALLGATHER = {"moe.dispatcher": "allgather"}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "ep2": (2, EP2),
    "ep2 allgather": (2, {**EP2, **ALLGATHER}),
    "ep2 static": (2, {**EP2, **STATIC}),
    "tp2": (2, {"parallel.tp": 2}),
    "tp2 sp": (2, {"parallel.tp": 2, **SP}),
    "tp2 etp1": (2, {"parallel.tp": 2, "parallel.etp": 1}),
    "tp2 etp1 ep2": (2, {"parallel.tp": 2, "parallel.etp": 1, **EP2}),
    "etp2": (2, {"parallel.etp": 2}),
    "pp2": (2, {"parallel.pp": 2}),
    "dp4 ep2": (4, EP2),
    "dp4 ep4": (4, {"parallel.ep": 4}),
    "dp4 ep2 etp2 static": (4, {**EP2, "parallel.etp": 2, **STATIC}),
    "tp2 sp ep2": (4, {"parallel.tp": 2, **SP, **EP2}),
    "tp2 sp etp1 ep4": (4, {"parallel.tp": 2, **SP, "parallel.etp": 1, "parallel.ep": 4}),
    "tp4 etp1 ep4 allgather": (
        4,
        {
            "parallel.tp": 4,
            "model.num_kv_heads": 4,
            "parallel.etp": 1,
            "parallel.ep": 4,
            **ALLGATHER,
        },
    ),
    "pp2 ep2": (4, {"parallel.pp": 2, **EP2}),
    "pp2 ep2 2 chunks": (
        4,
        {
            "parallel.pp": 2,
            **EP2,
            "pipeline.schedule": "interleaved_1f1b",
            "pipeline.num_chunks": 2,
        },
    ),
    "pp2 tp2 etp1 ep2 sp": (
        4,
        {"parallel.pp": 2, "parallel.tp": 2, "parallel.etp": 1, **EP2, **SP},
    ),
}


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_losses_and_gradients_of_one_process(layout: str) -> None:
    world_size, changes = LAYOUTS[layout]
    model = {key: value for key, value in changes.items() if key.startswith("model.")}
    key = tuple(sorted(model.items()))
    if key not in SINGLES:
        losses, gradients, loads = train(0, 1, model)
        SINGLES[key] = losses, whole_gradients([gradients]), loads
    found = train_on_ranks(world_size, changes)
    assert_same(found, SINGLES[key])
    assert found[0][-1] < found[0][0] - 0.3, "the model must have learnt something"
