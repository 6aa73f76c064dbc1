"""Parallelism changes nothing in a model with experts: losses and gradients of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megacore.parallel import ProcessGroups
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.params import ShardPosition
from megatrain.checkpoint import CheckpointSaver, TrainState, load_checkpoint
from megatrain.config import Config
from megatrain.models.gpt import GPTChunk
from megatrain.train.trainer import Trainer, build_trainer
from tests.support.campaigns import representatives
from tests.support.configs import FOUR_LAYERS, changed_config
from tests.support.distributed import run_ranks
from tests.support.sharding import unshard

STEPS = 20

BASE: dict[str, dict[str, Any]] = {
    "model": {**FOUR_LAYERS},
    "moe": {
        "num_experts": 4,
        "top_k": 2,
        "ffn_hidden_size": 16,
        "layer_pattern": "d(e)",
        "shared_ffn_hidden_size": 16,
        "aux_loss_coef": 1e-2,
        "z_loss_coef": 1e-3,
    },
    "train": {"steps": STEPS, "microbatch_size": 2, "global_batch_size": 8, "eval_interval": 0},
    "optimizer": {"lr": 2e-3, "warmup": 5, "clip_grad": 0.0},
}

Gradients = dict[str, Tensor]
Result = tuple[list[float], Gradients, list[dict[int, tuple[int, ...]]]]


def make_config(world_size: int, changes: dict[str, Any]) -> Config:
    return changed_config(world_size, BASE, changes)


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


EP2 = {"parallel.ep": 2}
TP2 = {"parallel.tp": 2}
PP2 = {"parallel.pp": 2}
SP = {"parallel.sequence_parallel": True}
ETP1 = {"parallel.etp": 1}
ETP2 = {"parallel.etp": 2}
STATIC = {"moe.dispatcher": "static"}
ALLGATHER = {"moe.dispatcher": "allgather"}
CHUNKS = {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2}

# What is trained. Layouts must not change it, so each has its own single process.
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": {
        "moe.score_function": "sigmoid",
        "moe.expert_bias": True,
        "moe.num_experts": 8,
        "moe.num_groups": 4,
        "moe.groups_top_k": 2,
        "moe.jitter": 0.05,
        "moe.shared_gate": True,
        "moe.activation": "gelu",
        "moe.layer_pattern": "d(de)",
        "moe.aux_loss_coef": 0.0,
        "model.qk_norm": "head",
        "model.head_dim": 12,
        "model.num_kv_heads": 4,
        "model.dropout": 0.1,
    },
    "masked": {
        "data.factory": "tests.support.own_data:answers",
        "moe.aux_loss_coef": 0.1,
        "moe.z_loss_coef": 1e-2,
    },
}

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dp2": ("softmax", 2, {}),
    "ep2": ("softmax", 2, EP2),
    "ep2 allgather": ("softmax", 2, {**EP2, **ALLGATHER}),
    "ep2 static": ("softmax", 2, {**EP2, **STATIC}),
    "ep2 static, collective": (
        "softmax",
        2,
        {**EP2, **STATIC, "moe.static_transport": "collective"},
    ),
    "tp2": ("softmax", 2, TP2),
    "tp2 sp": ("softmax", 2, {**TP2, **SP}),
    "tp2 etp1": ("softmax", 2, {**TP2, **ETP1}),
    "tp2 etp1 ep2": ("softmax", 2, {**TP2, **ETP1, **EP2}),
    "etp2": ("softmax", 2, ETP2),
    "pp2": ("softmax", 2, PP2),
    "cp2 ep2": ("softmax", 2, {"parallel.cp": 2, **EP2}),
    "cp2 ring ep2": ("softmax", 2, {"parallel.cp": 2, "parallel.cp_comm": "ring", **EP2}),
    "ep2, gradients reduced early": ("softmax", 2, {**EP2, "optimizer.overlap": "all"}),
    "ep2 static, recomputed in graphs": (
        "sigmoid",
        2,
        {
            **{**EP2, **STATIC, "moe.static_transport": "peer", "train.recompute": ["full"]},
            **{
                "graphs.mode": "partial",
                "graphs.scopes": ["attn", "mlp", "moe"],
                "graphs.backend": "emulated",
            },
        },
    ),
    "ep2, a shared gate gathered late": (
        "sigmoid",
        2,
        {**EP2, "optimizer.overlap": "all", "optimizer.bucket_numel": 100},
    ),
    "dp4 ep2": ("softmax", 4, EP2),
    "dp4 ep4": ("softmax", 4, {"parallel.ep": 4}),
    "dp4 ep2 without ZeRO-1": ("softmax", 4, {**EP2, "optimizer.distributed": False}),
    "dp4 ep2 etp2 static": ("softmax", 4, {**EP2, **ETP2, **STATIC}),
    "tp2 sp ep2": ("softmax", 4, {**TP2, **SP, **EP2}),
    "tp2 sp etp1 ep4": ("softmax", 4, {**TP2, **SP, **ETP1, "parallel.ep": 4}),
    "tp2 cp2 etp1 ep4 sp": (
        "softmax",
        4,
        {**TP2, "parallel.cp": 2, **ETP1, "parallel.ep": 4, **SP},
    ),
    "pp2 ep2": ("softmax", 4, {**PP2, **EP2}),
    "pp2 ep2, 2 chunks": ("softmax", 4, {**PP2, **EP2, **CHUNKS}),
    "pp2 ep2, weight gradients apart": (
        "softmax",
        4,
        {**PP2, **EP2, "pipeline.schedule": "zb_h1"},
    ),
    "pp2, a V": ("softmax", 2, {**PP2, "pipeline.schedule": "zb_v"}),
    "pp2 tp2 etp1 ep2 sp": ("softmax", 4, {**PP2, **TP2, **ETP1, **EP2, **SP}),
    "8 ranks: pp2 tp2 dp2, ep2 etp2": ("softmax", 8, {**PP2, **TP2, **EP2}),
    "8 ranks: tp2 dp4, etp1 ep4 edp2 static": (
        "softmax",
        8,
        {**TP2, **ETP1, "parallel.ep": 4, **STATIC},
    ),
    "other router, ep2": ("sigmoid", 2, EP2),
    "other router, tp4 etp1 ep4 allgather": (
        "sigmoid",
        4,
        {"parallel.tp": 4, **ETP1, "parallel.ep": 4, **ALLGATHER},
    ),
    "other router, pp2 tp2 sp static": ("sigmoid", 4, {**PP2, **TP2, **SP, **STATIC}),
    "other router, cp2 dp2 ep4": ("sigmoid", 4, {"parallel.cp": 2, "parallel.ep": 4}),
    "masked, cp2 ring ep2 static": (
        "masked",
        2,
        {"parallel.cp": 2, "parallel.cp_comm": "ring", **EP2, **STATIC},
    ),
    "masked, tp2 sp etp1 ep2 pp2": ("masked", 4, {**TP2, **SP, **ETP1, **EP2, **PP2}),
    "masked, tp2 cp2 sp etp1 ep4": (
        "masked",
        4,
        {**TP2, "parallel.cp": 2, **SP, **ETP1, "parallel.ep": 4},
    ),
}

# One of every axis, dispatcher, kind of schedule and router.
REPRESENTATIVES = (
    "ep2 allgather",
    "ep2 static",
    "tp2 etp1 ep2",
    "etp2",
    "cp2 ep2",
    "ep2, gradients reduced early",
    "pp2 ep2, 2 chunks",
    "pp2 ep2, weight gradients apart",
    "pp2, a V",
    "other router, ep2",
    "masked, cp2 ring ep2 static",
    "masked, tp2 sp etp1 ep2 pp2",
)


@pytest.fixture(scope="module")
def singles() -> dict[str, Result]:
    results = {}
    for name, changes in MODELS.items():
        losses, gradients, loads = train(0, 1, changes)
        results[name] = losses, whole_gradients([gradients]), loads
    return results


@pytest.mark.dist
@pytest.mark.parametrize("layout", representatives(LAYOUTS, REPRESENTATIVES))
def test_layout_gives_losses_and_gradients_of_one_process(
    layout: str, singles: dict[str, Result]
) -> None:
    model, world_size, changes = LAYOUTS[layout]
    found = train_on_ranks(world_size, {**MODELS[model], **changes})
    assert_same(found, singles[model])
    assert found[0][-1] < found[0][0] - 0.3, "the model must have learnt something"


@pytest.mark.dist
def test_balancing_over_the_batch_does_not_depend_on_who_holds_the_tokens() -> None:
    """Its pool is a microbatch of all data-parallel ranks: one microbatch per step, here."""
    changes = {"moe.aux_loss_type": "batch", "moe.aux_loss_coef": 0.1}
    losses, gradients, loads = train(0, 1, {**changes, "train.microbatch_size": 8})
    layout = {**TP2, **ETP1, **EP2, "train.microbatch_size": 4}
    found = train_on_ranks(4, {**changes, **layout})
    assert_same(found, (losses, whole_gradients([gradients]), loads))


def test_gradients_of_a_later_step_are_those_of_autograd() -> None:
    config = make_config(1, {})
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    for step in range(3):
        trainer.train_step(step)
    plain = GPTChunk(
        config.model,
        layers=range(4),
        has_embedding=True,
        has_head=True,
        groups=ProcessGroups.single(),
        moe=config.moe,
    )
    weights = {info.name: weight for info, weight in trainer.chunks[0].param_infos()}
    with torch.no_grad():
        for info, weight in plain.param_infos():
            weight.copy_(weights[info.name])
    before = {piece.info.name: piece.tensors["exp_avg"].clone() for piece in trainer.pieces()}
    share = 1 / config.num_microbatches(1)
    batches = trainer._batches(trainer.data.train)
    for number in range(config.num_microbatches(1)):
        (plain(None, replace(batches(3, number), loss_factor=share)) * share).backward()
    trainer.train_step(3)
    after = {piece.info.name: piece.tensors["exp_avg"] for piece in trainer.pieces()}
    beta1 = config.optimizer.beta1
    for info, weight in plain.param_infos():
        found = (after[info.name] - beta1 * before[info.name]) / (1 - beta1)
        expected = weight.grad.flatten()
        assert (found - expected).norm() < 1e-4 * expected.norm(), info.name


TIGHT = {**EP2, **STATIC, "moe.static_budget": 1.0, "train.steps": 3}


def train_tight(_rank: int, policy: str) -> list[tuple[float, int, int, int, float]]:
    config = make_config(2, {**TIGHT, "moe.over_budget": policy, "train.eval_interval": 1})
    trainer = build_trainer(config, world_size=2, device=torch.device("cpu"))
    found = []
    for step in range(3):
        metrics = trainer.train_step(step)
        experts = metrics.experts
        found.append(
            (
                metrics.loss,
                experts.num_dropped,
                experts.num_over_budget,
                experts.num_reruns,
                trainer.mean_validation_loss(trainer.evaluate()),
            )
        )
    return found


def fail_tight(_rank: int) -> str:
    config = make_config(2, TIGHT | {"moe.over_budget": "error"})
    trainer = build_trainer(config, world_size=2, device=torch.device("cpu"))
    before = [piece.tensors["main_param"].clone() for piece in trainer.pieces()]
    with pytest.raises(MegacoreError) as caught:
        trainer.train_step(0)
    for piece, value in zip(trainer.pieces(), before, strict=True):
        assert torch.equal(piece.tensors["main_param"], value), "the update must not have happened"
    return str(caught.value)


@pytest.mark.dist
def test_a_small_budget_is_an_error_if_told_so() -> None:
    first, second = run_ranks(2, fail_tight)
    assert first == second
    assert "copies of tokens found no room" in first
    assert "moe.static_budget = 1" in first


@pytest.mark.dist
def test_a_small_budget_drops_and_counts() -> None:
    results = run_ranks(2, train_tight, "drop")
    assert results[0] == results[1]
    for _, num_dropped, num_over, num_reruns, _ in results[0]:
        assert num_dropped == num_over > 0
        assert num_reruns == 0


@pytest.mark.dist
def test_a_small_budget_reruns_the_step_with_a_larger_one() -> None:
    results = run_ranks(2, train_tight, "rerun")
    assert results[0] == results[1]
    changes = {**EP2, "train.steps": 3}
    expected = run_ranks(2, train_loose, changes)[0]
    assert [row[0] for row in results[0]] == pytest.approx([row[0] for row in expected], rel=1e-6)
    assert [row[4] for row in results[0]] == pytest.approx([row[1] for row in expected], rel=1e-6)
    assert results[0][0][3] >= 1, "the first step must have been run again"
    assert all(row[1:3] == (0, 0) for row in results[0]), "nothing may be lost"


def train_loose(_rank: int, changes: dict[str, Any]) -> list[tuple[float, float]]:
    config = make_config(2, {**changes, "train.eval_interval": 1})
    trainer = build_trainer(config, world_size=2, device=torch.device("cpu"))
    return [
        (trainer.train_step(step).loss, trainer.mean_validation_loss(trainer.evaluate()))
        for step in range(3)
    ]


SAVED = {**MODELS["sigmoid"], "train.steps": 6}


def save_after_three(_rank: int, world_size: int, changes: dict[str, Any], folder: Path) -> Any:
    config = make_config(world_size, {**SAVED, **changes})
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    for step in range(3):
        trainer.train_step(step)
    saver = CheckpointSaver(folder, trainer.pieces, groups=trainer.groups, config={})
    saver.save(TrainState(step=3, samples=24, optimizer=trainer.optimizer.scalars()))
    return [trainer.train_step(step).loss for step in range(3, 6)]


def resume_after_three(_rank: int, world_size: int, changes: dict[str, Any], folder: Path) -> Any:
    config = make_config(world_size, {**SAVED, **changes})
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    state = load_checkpoint(folder, trainer.pieces(), groups=trainer.groups)
    trainer.optimizer.load_scalars(state.optimizer)
    trainer.optimizer.finish_load(trainer.optimizer.step_count)
    biases = [value for chunk in trainer.chunks for _, value in chunk.buffer_infos()]
    assert all((value != 0).any() for value in biases), "biases must have been loaded"
    return [trainer.train_step(step).loss for step in range(3, 6)]


@pytest.mark.dist
def test_a_checkpoint_goes_on_with_other_expert_parallel_sizes(tmp_path: Path) -> None:
    losses = run_ranks(4, save_after_three, 4, {**EP2, **TP2, **ETP1}, tmp_path)[0]
    for world_size, changes in ((4, {"parallel.ep": 4}), (2, {**PP2}), (2, {**ETP2}), (1, {})):
        found = run_ranks(world_size, resume_after_three, world_size, changes, tmp_path)[0]
        assert found == pytest.approx(losses, rel=1e-5), f"{world_size} ranks, {changes}"
