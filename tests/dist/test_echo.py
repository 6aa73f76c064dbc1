"""Clones change nothing but who computes: losses and gradients with and without ECHO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megacore.moe.dispatchers import AllToAllDispatcher, DispatchPlan, Routing
from megacore.moe.dispatchers.base import gather_counts
from megacore.ops.echo_counts import EchoCounts
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.params import ShardPosition
from megatrain.checkpoint import CheckpointSaver, TrainState, load_checkpoint
from megatrain.config import Config
from megatrain.train.trainer import Trainer, build_trainer
from tests.support.campaigns import representatives
from tests.support.configs import FOUR_LAYERS, changed_config
from tests.support.distributed import run_ranks
from tests.support.sharding import unshard

STEPS = 20
NUM_EXPERTS = 8

BASE: dict[str, dict[str, Any]] = {
    "model": {**FOUR_LAYERS},
    "moe": {
        "num_experts": NUM_EXPERTS,
        "top_k": 2,
        "ffn_hidden_size": 16,
        "layer_pattern": "d(e)",
        "aux_loss_coef": 1e-2,
        "z_loss_coef": 1e-3,
        # Skewed by the tests, and not levelled by training.
        "expert_bias": True,
        "expert_bias_rate": 0.0,
    },
    "train": {"steps": STEPS, "microbatch_size": 2, "global_batch_size": 8, "eval_interval": 0},
    "optimizer": {"lr": 2e-3, "warmup": 5, "clip_grad": 0.0},
}
ECHO = {"moe.echo.num_spare_slots": 2, "moe.echo.tolerance": 0.0}
DOCUMENTED = {"moe.echo.planner": "echo"}


def make_config(world_size: int, changes: dict[str, Any]) -> Config:
    return changed_config(world_size, BASE, changes)


def skewed_trainer(world_size: int, changes: dict[str, Any]) -> Trainer:
    """All tokens choose expert 0, many of them expert 1; both are on rank 0, but with ep 8."""
    config = make_config(world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    for chunk in trainer.chunks:
        for layer in chunk.moe_layers().values():
            layer.router.expert_bias[:2] = torch.tensor([2.0, 0.5])
    return trainer


@dataclass(frozen=True)
class Trained:
    """One rank's view of a run.

    Attributes:
        losses: Of all steps.
        loads: Copies per expert and layer, of all steps.
        gradients: Pieces of the first step's gradients.
        clones: Per step and layer of this rank: clones per plan, highest load over the mean before
            and after.
    """

    losses: list[float]
    loads: list[dict[int, tuple[int, ...]]]
    gradients: list[tuple[ParamInfo, ShardPosition, int, Tensor]]
    clones: list[list[tuple[float, float, float]]]


def train(_rank: int, world_size: int, changes: dict[str, Any], steps: int = STEPS) -> Trained:
    trainer = skewed_trainer(world_size, changes)
    result = Trained([], [], [], [])
    for step in range(steps):
        metrics = trainer.train_step(step)
        result.losses.append(metrics.loss)
        result.loads.append(metrics.experts.load)
        result.clones.append([])
        for chunk in trainer.chunks:
            for layer in chunk.moe_layers().values():
                if layer.echo is not None:
                    counts = EchoCounts.of_list(layer.echo.sums.tolist())
                    mean = counts.mean_load
                    result.clones[-1].append(
                        (
                            counts.num_clones / counts.num_plans,
                            counts.highest_before / mean,
                            counts.highest_after / mean,
                        )
                    )
        if step == 0:
            # What the first moment is made of when nothing is clipped.
            beta1 = trainer.config.optimizer.beta1
            for piece in trainer.optimizer.pieces():
                at = ShardPosition.of(piece.info, trainer.groups)
                values = piece.tensors["exp_avg"].float() / (1.0 - beta1)
                result.gradients.append((piece.info, at, piece.start, values))
    return result


def whole_gradients(by_rank: list[Trained]) -> dict[str, Tensor]:
    """Put the pieces of all ranks together; every element must be there."""
    shards: dict[str, list[Tensor]] = {}
    about: dict[str, tuple[ParamInfo, ShardPosition]] = {}
    for result in by_rank:
        for info, at, start, values in result.gradients:
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


def assert_same(name: str, found: list[Trained], expected: Trained) -> None:
    assert all(result.losses == found[0].losses for result in found), name
    assert found[0].losses == pytest.approx(expected.losses, rel=1e-5), name
    assert found[0].loads[0] == expected.loads[0], f"{name}: counts must be those of experts"
    gradients, reference = whole_gradients(found), whole_gradients([expected])
    assert gradients.keys() == reference.keys()
    for key, gradient in reference.items():
        distance = (gradients[key] - gradient).norm() / gradient.norm()
        assert distance < (1e-6 if "experts" in key else 1e-5), f"{name}, {key}: {distance}"


def assert_balanced(name: str, found: list[Trained], limit: float) -> None:
    for result in found:
        assert len(result.clones) == STEPS
        for step, layers in enumerate(result.clones):
            assert layers, name
            for num_clones, before, after in layers:
                assert num_clones >= 1, f"{name}, step {step}: no clone, so nothing is tested"
                assert after < before, f"{name}, step {step}"
                assert after <= limit, f"{name}, step {step}: {after}"


EP2, EP4 = {"parallel.ep": 2, **ECHO}, {"parallel.ep": 4, **ECHO}
PP2 = {"parallel.pp": 2, "train.microbatch_size": 1, **EP2}
OVERLAP = {"optimizer.overlap": "all"}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ep2": EP2,
        "ep2, documented planner, allgather": {
            **EP2,
            **DOCUMENTED,
            "moe.dispatcher": "allgather",
        },
        "ep2, 4 microbatches, gradients reduced early": {
            **EP2,
            **OVERLAP,
            "train.microbatch_size": 1,
        },
        "ep2, whole layers recomputed": {**EP2, "train.recompute": ["full"]},
        "ep2, experts recomputed": {
            **EP2,
            "train.recompute": ["moe", "norm"],
            "moe.dispatcher": "static",
        },
    },
    4: {
        "ep4": EP4,
        "ep4, documented planner, gradients reduced early": {**EP4, **DOCUMENTED, **OVERLAP},
        "ep4, static": {**EP4, "moe.dispatcher": "static"},
        "ep2 etp2": {**EP2, "parallel.etp": 2},
        "ep2 edp2, gradients reduced early": {**EP2, **OVERLAP},
        "pp2 ep2, 1f1b": PP2,
        "pp2 ep2, interleaved": {
            **PP2,
            **OVERLAP,
            "pipeline.schedule": "interleaved_1f1b",
            "pipeline.num_chunks": 2,
        },
        "pp2 ep2, zero bubble": {**PP2, **OVERLAP, "pipeline.schedule": "zb_h1"},
        "pp2 ep2, zero bubble, static": {
            **PP2,
            **OVERLAP,
            "pipeline.schedule": "zb_h1",
            "moe.dispatcher": "static",
        },
        "ep2 etp2, static": {**EP2, "parallel.etp": 2, "moe.dispatcher": "static"},
        "pp2 ep2, V": {**PP2, "pipeline.schedule": "zb_v"},
    },
    8: {"ep8": {"parallel.ep": 8, "train.microbatch_size": 1, **ECHO}},
}


@pytest.fixture(scope="module")
def single() -> Trained:
    return train(0, 1, {})


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "name"),
    representatives(
        [(world_size, name) for world_size, cases in CASES.items() for name in cases],
        [
            (2, "ep2, documented planner, allgather"),
            (4, "ep4"),
            (4, "ep2 etp2, static"),
            (4, "pp2 ep2, zero bubble"),
        ],
    ),
)
def test_training_with_clones_is_training_without(
    world_size: int, name: str, single: Trained
) -> None:
    changes = CASES[world_size][name]
    found = run_ranks(world_size, train, world_size, changes, timeout_s=120)
    assert_same(name, found, single)
    # Two slots and one (ep 8), two (ep 4) or four (ep 2) experts per rank.
    documented = changes.get("moe.echo.planner") == "echo"
    assert_balanced(name, found, 1.5 if documented else 1.05)
    assert single.losses[-1] < single.losses[0] - 0.3, "the model must have learnt something"


# ---- plans, memory, checkpoints, full buffers ----------------------------------------------------


# What all ranks know of a plan.
COMMON = "slot_expert", "load_before", "load_after", "summary"


def record_plans(trainer: Trainer) -> list[dict[str, list[Any]]]:
    """Collects the plans of all layers of this rank from now on."""
    plans: list[dict[str, list[Any]]] = []

    def recording(plan: Any) -> Any:
        def run(*args: Any) -> Any:
            result = plan(*args)
            plans.append({name: getattr(result.offload, name).tolist() for name in COMMON})
            return result

        return run

    for chunk in trainer.chunks:
        for layer in chunk.moe_layers().values():
            layer.echo.plan = recording(layer.echo.plan)  # type: ignore[method-assign]
    return plans


def look_around(_rank: int, folder: Path) -> dict[str, Any]:
    changes = {**EP2, "parallel.etp": 2}
    trainer = skewed_trainer(4, changes)
    plans = record_plans(trainer)
    metrics = [trainer.train_step(step) for step in range(3)]
    layer = next(iter(trainer.chunks[0].moe_layers().values()))
    saver = CheckpointSaver(folder, trainer.pieces, groups=trainer.groups, config={})
    saver.save(TrainState(step=3, samples=24, optimizer=trainer.optimizer.scalars()))
    return {
        "plans": plans,
        "pieces": {(piece.info.name, piece.info.full_shape) for piece in trainer.pieces()},
        "tensors": {name for chunk in trainer.chunks for name in chunk.state_dict()},
        "slot_bytes": layer.echo.slots.num_bytes(),
        "echo": metrics[-1].experts.echo,
        "losses": [trainer.train_step(step).loss for step in range(3, 6)],
    }


def resume(_rank: int, world_size: int, changes: dict[str, Any], folder: Path) -> list[float]:
    trainer = skewed_trainer(world_size, changes)
    state = load_checkpoint(folder, trainer.pieces(), groups=trainer.groups)
    trainer.optimizer.load_scalars(state.optimizer)
    trainer.optimizer.finish_load(trainer.optimizer.step_count)
    return [trainer.train_step(step).loss for step in range(3, 6)]


@pytest.mark.dist
def test_plans_agree_and_slots_leave_no_trace_in_checkpoints(tmp_path: Path) -> None:
    results = run_ranks(4, look_around, tmp_path, timeout_s=120)
    first = results[0]
    # 6 steps, 3 layers, dp 4 with 1 microbatch each.
    assert len(first["plans"]) == 18
    assert all(plan["summary"][1] > 0 for plan in first["plans"])
    assert first["echo"].keys() == {1, 2, 3}
    assert all(counts.bytes_sent > 0 for counts in first["echo"].values())
    for result in results[1:]:
        assert result["plans"] == first["plans"], "every rank must compute the same plan"
    plain = build_trainer(make_config(1, {}), world_size=1, device=torch.device("cpu"))
    names = {(piece.info.name, piece.info.full_shape) for piece in plain.pieces()}
    assert {pair for result in results for pair in result["pieces"]} == names
    assert first["tensors"] == set(plain.chunks[0].state_dict())
    # 2 slots; 3 matrices of 16 x 32, halved by etp; weights and gradients in float32. Ranks that
    # never held a clone have no gradients.
    assert max(result["slot_bytes"] for result in results) == 2 * (3 * 16 * 32 // 2) * (4 + 4)
    for world_size, changes in ((2, {"parallel.ep": 2}), (1, {})):
        if world_size == 1:
            losses = resume(0, 1, changes, tmp_path)
        else:
            losses = run_ranks(world_size, resume, world_size, changes, tmp_path)[0]
        assert losses == pytest.approx(first["losses"], rel=1e-5)


def compare_counts(_rank: int, changes: dict[str, Any]) -> list[tuple[bool, int]]:
    """Whether the counts that a plan determines are those that members exchange."""
    trainer = skewed_trainer(4, changes)
    found = []
    plan_of = AllToAllDispatcher.preprocess_counted

    def compared(self: AllToAllDispatcher, routing: Routing, arriving: Tensor) -> DispatchPlan:
        plan = plan_of(self, routing, arriving)
        exchanged = gather_counts(plan.tokens_per_expert, self.placement)
        clones = exchanged[:, self.placement.num_local - 2 :]  # of 2 slots
        found.append((torch.equal(plan.arriving, exchanged), int(clones.sum())))
        return plan

    AllToAllDispatcher.preprocess_counted = compared  # type: ignore[method-assign]
    for step in range(3):
        trainer.train_step(step)
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.ep": 4},
        {"parallel.ep": 2, **DOCUMENTED},
        {"parallel.ep": 4, "moe.capacity_factor": 1.5},
        {"parallel.tp": 2, "parallel.etp": 1, "parallel.ep": 4},
    ],
    ids=str,
)
def test_a_plan_determines_the_counts_of_each_rank(changes: dict[str, Any]) -> None:
    results = run_ranks(4, compare_counts, {**ECHO, **changes}, timeout_s=120)
    for result in results:
        assert len(result) >= 9  # 3 steps, 3 layers
        assert all(is_equal for is_equal, _ in result)
    assert sum(rows for result in results for _, rows in result) > 0


@pytest.mark.dist
def test_counts_of_members_of_one_source_are_exchanged() -> None:
    changes = {**ECHO, "parallel.ep": 2, "parallel.etp": 2}
    assert run_ranks(4, compare_counts, changes, timeout_s=120) == [[]] * 4


FULL = {
    **EP2,
    "moe.dispatcher": "static",
    "moe.echo.planner": "echo",
    "moe.echo.min_imbalance": 3.0,  # no clones, so rank 0 has twice its share
    "moe.echo.receive_budget": 1.0,
    "train.steps": 3,
}


def run_policies(_rank: int) -> dict[str, Any]:
    """What each policy makes of buffers that are too small; then other things to compare."""
    found: dict[str, Any] = {}
    for policy in ("drop", "rerun", "error"):
        trainer = skewed_trainer(2, {**FULL, "moe.over_budget": policy})
        try:
            metrics = [trainer.train_step(step) for step in range(3)]
        except MegacoreError as error:
            found[policy] = str(error)
            continue
        found[policy] = [
            (m.loss, m.experts.num_over_budget, m.experts.num_dropped, m.experts.num_reruns)
            for m in metrics
        ]
    for name, changes in (
        ("without", {"moe.echo.num_spare_slots": 0}),
        ("capacity", {"moe.capacity_factor": 1.5}),
        ("capacity without", {"moe.echo.num_spare_slots": 0, "moe.capacity_factor": 1.5}),
        ("bfloat16", {"train.dtype": "bfloat16", "optimizer.grad_dtype": "param"}),
        ("bfloat16 without", {"train.dtype": "bfloat16", "moe.echo.num_spare_slots": 0}),
    ):
        plain = {**EP2, "moe.echo.planner": "echo", "train.steps": 3}
        found[name] = train(0, 2, {**plain, **changes}, steps=3)
    return found


@pytest.mark.dist
def test_full_buffers_capacities_and_other_number_formats() -> None:
    results = run_ranks(2, run_policies, timeout_s=120)
    found = results[0]
    for key in ("drop", "rerun", "error"):
        assert results[1][key] == found[key]
    assert "copies of tokens found no room" in found["error"]
    assert "moe.echo.receive_budget = 1" in found["error"]
    for _, num_over, num_dropped, num_reruns in found["drop"]:
        assert num_over == num_dropped > 0
        assert num_reruns == 0
    losses = [row[0] for row in found["rerun"]]
    assert losses == pytest.approx(found["without"].losses, rel=1e-6)
    assert found["rerun"][0][3] >= 1
    assert all(row[1:3] == (0, 0) for row in found["rerun"])
    # A capacity drops the same copies, whoever computes the others.
    assert found["capacity"].losses == pytest.approx(found["capacity without"].losses, rel=1e-6)
    assert found["capacity"].loads == found["capacity without"].loads
    assert found["capacity"].losses != pytest.approx(found["without"].losses, rel=1e-5)
    assert found["bfloat16"].losses == pytest.approx(found["bfloat16 without"].losses, rel=5e-3)
