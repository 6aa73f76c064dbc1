"""Frozen parameters: training as with a learning rate of 0, in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import CheckpointError, ConfigError
from megacore.optim import AdamW, Lion
from megatrain.checkpoint import load_full_weights
from megatrain.config import ResolvedConfig, load_config
from megatrain.dry_run import dry_run
from megatrain.hf.export_checkpoint import export_checkpoint
from megatrain.plan.run_plan import buffer_layouts, plan_run
from megatrain.train.loop import train
from megatrain.train.trainer import Trainer, build_trainer
from tests.dist import test_invariance as dense
from tests.dist import test_moe_invariance as moe
from tests.support.campaigns import representatives
from tests.support.configs import changed_config, rank_context
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

STEPS = 5
BASE: dict[str, Any] = {"optimizer.clip_grad": 0.0, "optimizer.warmup": 1}
# Whole first stages, with and without an input that needs a gradient; parts of all layers.
PATTERNS: dict[str, list[str]] = {
    "first half": ["embedding", "layers.[01].*"],
    "last half": ["layers.[23].*", "final_norm"],
    "parts of layers": ["*.qkv", "*.norm", "*.down", "embedding"],
    "experts": ["*.moe.experts.*"],
    "all but experts": [
        "embedding",
        "head",
        "*norm",
        "*attention*",
        "*router*",
        "*mlp*",
        "*shared*",
    ],
}


def frozen_groups(name: str) -> dict[str, Any]:
    groups = [{"pattern": pattern, "optimizer": "none"} for pattern in PATTERNS[name]]
    return {"optimizer.groups": groups}


def still_groups(name: str) -> dict[str, Any]:
    groups = [
        {"pattern": pattern, "lr_scale": 0.0, "weight_decay": 0.0} for pattern in PATTERNS[name]
    ]
    return {"optimizer.groups": groups}


def make(has_experts: bool, world_size: int, changes: dict[str, Any]) -> Trainer:
    make_config: Callable[[int, dict[str, Any]], Any] = (moe if has_experts else dense).make_config
    config: ResolvedConfig = make_config(world_size, {**BASE, **changes})
    return build_trainer(config, world_size=world_size, device=torch.device("cpu"))


def run(
    _rank: int, has_experts: bool, world_size: int, changes: dict[str, Any]
) -> tuple[list[float], list[float], int, int]:
    """Losses, norms, bytes of gradients and state; frozen parameters must not change."""
    trainer = make(has_experts, world_size, changes)
    optimizer = trainer.optimizer
    before = [param.clone() for _, param in trainer.frozen.params]
    metrics = [trainer.train_step(step) for step in range(STEPS)]
    optimizer.finish_param_gather()
    for value, (info, param) in zip(before, trainer.frozen.params, strict=True):
        assert torch.equal(value, param), info.name
        assert param.grad is None
        assert not hasattr(param, "main_grad")
    grad_bytes = sum(buffer.grad_data.nbytes for buffer in optimizer.buffers)
    losses, norms = [step.loss for step in metrics], [step.grad_norm for step in metrics]
    return losses, norms, grad_bytes, optimizer.state_bytes


@cache
def still(name: str, has_experts: bool, model: str) -> list[float]:
    """Losses of one process in which those parameters have a learning rate of 0."""
    return run(0, has_experts, 1, {**MODELS[model], **still_groups(name)})[0]


@cache
def frozen(name: str, has_experts: bool, model: str) -> list[float]:
    """Gradient norms of one process in which those parameters are frozen."""
    return run(0, has_experts, 1, {**MODELS[model], **frozen_groups(name)})[1]


MODELS: dict[str, dict[str, Any]] = {
    "untied": {"model.tie_embeddings": False},
    "tied": {"model.tie_embeddings": True},
    "experts": {"model.tie_embeddings": False},
}
OVERLAPPED = {"optimizer.overlap": "all", "optimizer.bucket_numel": 2000}
DENSE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **dense.LAYOUTS,
    "one process": (1, {}),
    "dp2, overlapped": (2, OVERLAPPED),
    "dp4, two instances": (4, {"optimizer.num_instances": 2}),
    "pp2 dp2, overlapped": (4, {"parallel.pp": 2, **OVERLAPPED}),
    "pp2, recomputed": (2, {"parallel.pp": 2, "train.recompute": ["full"]}),
    "recomputed parts": (1, {"train.recompute": ["selective", "mlp"]}),
    "graphs of layers": (1, {"graphs.mode": "partial", "graphs.warmup_steps": 1}),
    "graphs of steps": (1, {"graphs.mode": "full_step", "graphs.warmup_steps": 1}),
    "pp2 dp2, graphs of layers, overlapped": (
        4,
        {"parallel.pp": 2, "graphs.mode": "partial", "graphs.warmup_steps": 1, **OVERLAPPED},
    ),
    "pp2, graphs of passes": (
        2,
        {"parallel.pp": 2, "graphs.mode": "full", "graphs.warmup_steps": 1},
    ),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ep2": (2, {"parallel.ep": 2}),
    "ep2, overlapped": (2, {"parallel.ep": 2, **OVERLAPPED}),
    "ep2 dp4": (4, {"parallel.ep": 2}),
    "tp2": (2, {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    "tp2 etp1 ep2": (2, {"parallel.tp": 2, "parallel.etp": 1, "parallel.ep": 2}),
    "pp2 ep2": (4, {"parallel.pp": 2, "parallel.ep": 2}),
    "pp2 ep2 zb_v": (4, {"parallel.pp": 2, "parallel.ep": 2, "pipeline.schedule": "zb_v"}),
    "ep2 static": (2, {"parallel.ep": 2, "moe.dispatcher": "static"}),
    "ep2 static, graphs of layers": (
        2,
        {
            "parallel.ep": 2,
            "moe.dispatcher": "static",
            "graphs.mode": "partial",
            "graphs.warmup_steps": 1,
        },
    ),
    "ep2, clones": (2, {"parallel.ep": 2, "moe.echo.num_spare_slots": 1}),
    "ep2 allgather": (2, {"parallel.ep": 2, "moe.dispatcher": "allgather"}),
    "pp2 ep2, exchanges overlapped": (
        4,
        {
            "parallel.pp": 2,
            "parallel.ep": 2,
            "pipeline.overlap_moe": True,
            "pipeline.pairs": "whole",
            "pipeline.schedule": "1f1b",
        },
    ),
}
CASES = [
    *(
        (name, model, layout)
        for name in ("first half", "last half", "parts of layers")
        for model in ("untied", "tied")
        for layout in DENSE_LAYOUTS
    ),
    *(
        (name, "experts", layout)
        for name in ("experts", "all but experts", "first half")
        for layout in EXPERT_LAYOUTS
    ),
]
KEPT = [
    ("first half", "untied", "one process"),
    ("first half", "untied", "pp4 zb_h1"),
    ("first half", "untied", "pp2 dp2, overlapped"),
    ("first half", "untied", "pp2, graphs of passes"),
    ("first half", "tied", "tp2 pp2 sequence parallel, 2 chunks"),
    ("last half", "untied", "pp2 dp2 zb_v, overlapped"),
    ("parts of layers", "tied", "pp2, recomputed"),
    ("parts of layers", "untied", "dp2 without ZeRO-1"),
    ("parts of layers", "untied", "dp4, two instances"),
    ("parts of layers", "untied", "cp2"),
    ("parts of layers", "untied", "tp2 pp2 dualpipe_v, sequence parallel"),
    ("parts of layers", "untied", "graphs of layers"),
    ("parts of layers", "untied", "graphs of steps"),
    ("experts", "experts", "one process"),
    ("experts", "experts", "pp2 ep2 zb_v"),
    ("experts", "experts", "ep2 static, graphs of layers"),
    ("all but experts", "experts", "tp2 etp1 ep2"),
    ("first half", "experts", "pp2 ep2, exchanges overlapped"),
    ("experts", "experts", "ep2, clones"),
]


@pytest.mark.parametrize(("name", "model", "layout"), representatives(CASES, KEPT))
def test_frozen_parameters_train_as_with_a_rate_of_0(name: str, model: str, layout: str) -> None:
    has_experts = model == "experts"
    world_size, changes = (EXPERT_LAYOUTS if has_experts else DENSE_LAYOUTS)[layout]
    changes = {**MODELS[model], **changes, **frozen_groups(name)}
    if layout == "pp2 v_half, checked messages":
        changes["model.tie_embeddings"] = MODELS[model]["model.tie_embeddings"]
    results = run_ranks(world_size, run, has_experts, world_size, changes, timeout_s=200)
    expected = still(name, has_experts, model)
    for losses, norms, _, _ in results:
        if layout == "one process":
            assert losses == expected  # every bit
        assert losses == pytest.approx(expected, rel=1e-5)
        assert norms == pytest.approx(frozen(name, has_experts, model), rel=1e-3)


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["first half", "parts of layers"])
def test_frozen_parameters_have_no_gradient_and_no_state(name: str) -> None:
    changes = {**MODELS["untied"], "train.dtype": "bfloat16"}
    whole, part = make(False, 1, changes), make(False, 1, {**changes, **frozen_groups(name)})
    numel = sum(param.numel() for _, param in part.frozen.params)
    assert numel > 10_000
    [before], [after] = ([b.grad_data.numel() for b in t.optimizer.buffers] for t in (whole, part))
    assert after == pytest.approx(before - numel, rel=0.01)
    # Two moments and a main parameter, fp32.
    assert whole.optimizer.state_bytes - part.optimizer.state_bytes == 12 * (before - after)
    assert {id(info) for info, _ in part.frozen.params}.isdisjoint(
        id(info) for buffer in part.optimizer.buffers for info, _ in buffer.params
    )


@pytest.mark.parametrize("name", ["first half", "parts of layers", "experts"])
def test_a_plan_counts_the_bytes_of_real_ranks(name: str) -> None:
    has_experts = name == "experts"
    changes = {"parallel.pp": 2, "train.dtype": "bfloat16", **frozen_groups(name)}
    changes |= MODELS["experts" if has_experts else "untied"]
    config = (moe if has_experts else dense).make_config(4, changes)
    planned = {rank.pp_rank: rank for rank in plan_run(config, 4).ranks}
    for pp_rank, *found in run_ranks(4, bytes_of_rank, has_experts, changes, timeout_s=200):
        rank = planned[pp_rank]
        assert found == [rank.param_bytes, rank.grad_bytes, rank.optimizer_bytes]


def bytes_of_rank(_rank: int, has_experts: bool, changes: dict[str, Any]) -> list[int]:
    trainer = make(has_experts, 4, changes)
    optimizer = trainer.optimizer
    params = sum(buffer.param_data.nbytes for buffer in optimizer.buffers)
    return [
        trainer.groups.pp.position,
        params + trainer.frozen.num_bytes,
        sum(buffer.grad_data.nbytes for buffer in optimizer.buffers),
        optimizer.state_bytes,
    ]


def test_the_layout_of_buffers_lists_frozen_parameters_apart() -> None:
    changes = {"parallel.pp": 2, **MODELS["untied"], **frozen_groups("first half")}
    first, second = buffer_layouts(dense.make_config(2, changes), 2)
    assert first.startswith("pp 0, frozen parameters: ")
    assert "    layers.1.mlp.down" in first.splitlines()
    assert second.startswith("pp 1, dense parameters of AdamW: ")
    assert "layers.1." not in second


def test_a_rank_alone_takes_the_groups_of_others_as_given() -> None:
    changes = {"parallel.pp": 2, **MODELS["untied"], **frozen_groups("first half")}
    config = dense.make_config(4, changes)
    for rank in (0, 3):
        found = dry_run(config, world_size=4, rank=rank, device="h100")
        assert found.works, (found.error, found.cuda)


def test_a_rank_alone_may_have_no_matrices_for_muon() -> None:
    changes = {"parallel.pp": 3, "pipeline.layout": "E|t*4|L", "optimizer.name": "muon"}
    found = dry_run(dense.make_config(3, changes), world_size=3, rank=2, device="h100")
    assert found.works, (found.error, found.cuda)


# ---- checkpoints ---------------------------------------------------------------------------------

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "seq_length": 16},
    "train": {"microbatch_size": 1, "global_batch_size": 4, "eval_interval": 0, "steps": 4},
    "optimizer": {"lr": 5e-3, "schedule": "constant"},
    "checkpoint": {"interval": 1, "keep": 9},
}
LAYER_0 = {"optimizer.groups": [{"pattern": "layers.0.*", "optimizer": "none"}]}


def run_folder(rank: int, world_size: int, folder: Path, changes: dict[str, Any]) -> None:
    data = {"source": str(folder / "text.txt"), "tokenizer": "bytes"}
    config = changed_config(world_size, {**SECTIONS, "data": data}, changes)
    assert train(config, rank_context(rank, world_size)) == 0


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_frozen_parameters_goes_on_in_other_layouts(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    base = {**LAYER_0, "train.dtype": dtype}
    run_folder(0, 1, tmp_path, {**base, "run.dir": str(tmp_path / "whole")})
    parts = {**base, "run.dir": str(tmp_path / "parts"), "checkpoint.resume": "auto"}
    run_ranks(2, run_folder, 2, tmp_path, {**parts, "train.steps": 2, "parallel.pp": 2})
    run_ranks(2, run_folder, 2, tmp_path, {**parts, "train.steps": 3, "parallel.tp": 2})
    run_folder(0, 1, tmp_path, parts)
    found, expected = losses(tmp_path / "parts"), losses(tmp_path / "whole")
    assert found == pytest.approx(expected, rel=1e-5 if dtype == "float32" else 2e-2)
    first = load_full_weights(tmp_path / "whole" / "checkpoints" / "step_00000001")[1]
    for folder in ("whole", "parts"):
        assert load_config(tmp_path / folder / "config.toml").optimizer.groups  # as it was written
        last = load_full_weights(tmp_path / folder)[1]
        assert last.keys() == first.keys()
        for name, value in last.items():
            assert torch.equal(value, first[name]) == name.startswith("layers.0."), name
            is_frozen = name.startswith("layers.0.")
            assert value.dtype == (torch.float32 if not is_frozen else getattr(torch, dtype))


def test_parameters_may_be_frozen_at_a_resume_and_need_new_weights_to_thaw(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    run = {"run.dir": str(tmp_path / "run"), "checkpoint.resume": "auto"}
    run_folder(0, 1, tmp_path, {**run, "train.steps": 1})
    run_folder(0, 1, tmp_path, {**run, **LAYER_0, "train.steps": 2})
    first, last = (
        load_full_weights(tmp_path / "run" / "checkpoints" / f"step_0000000{step}")[1]
        for step in (1, 2)
    )
    assert torch.equal(first["layers.0.mlp.down"], last["layers.0.mlp.down"])
    assert not torch.equal(first["layers.1.mlp.down"], last["layers.1.mlp.down"])
    with pytest.raises(CheckpointError, match=r"no exp_avg of parameter layers\.0\..*load_weights"):
        run_folder(0, 1, tmp_path, {**run, "train.steps": 3})
    new = {"run.dir": str(tmp_path / "new"), "checkpoint.load_weights": str(tmp_path / "run")}
    run_folder(0, 1, tmp_path, {**new, "train.steps": 1})


@pytest.mark.parametrize("source", ["checkpoint", "hugging face"])
def test_frozen_parameters_are_those_of_the_loaded_weights(tmp_path: Path, source: str) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    run_folder(0, 1, tmp_path, {"run.dir": str(tmp_path / "first"), "train.steps": 1})
    place = tmp_path / "first"
    if source == "hugging face":
        export_checkpoint(place, tmp_path / "hf")
        place = tmp_path / "hf"
    second = {"run.dir": str(tmp_path / "second"), "checkpoint.load_weights": str(place)}
    changes = {**second, **LAYER_0, "train.steps": 1, "parallel.tp": 2}
    run_ranks(2, run_folder, 2, tmp_path, changes)
    loaded, after = (load_full_weights(tmp_path / name)[1] for name in ("first", "second"))
    for name, value in loaded.items():
        assert torch.equal(value, after[name]) == name.startswith("layers.0."), name


# ---- other optimizers ----------------------------------------------------------------------------

MIXED = {
    "optimizer.groups": [
        {"pattern": "embedding", "optimizer": "sgd", "lr_scale": 10.0},
        {"pattern": "layers.0.*", "optimizer": "none"},
        {"pattern": "*.down", "optimizer": "lion", "lr_scale": 0.1, "beta2": 0.99},
        {"pattern": "layers.1.*", "beta1": 0.5, "beta2": 0.8},
    ]
}


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {"optimizer.bucket_numel": 2000, "optimizer.overlap": "all"}),
        (4, {"parallel.tp": 2, "parallel.pp": 2}),
        (1, {"graphs.mode": "full_step", "graphs.warmup_steps": 1}),
    ],
    ids=["dp2, overlapped", "tp2 pp2", "graphs of steps"],
)
def test_groups_have_optimizers_of_their_own_in_every_layout(
    world_size: int, layout: dict[str, Any]
) -> None:
    expected, plain = run(0, False, 1, MIXED)[0], run(0, False, 1, {})[0]
    assert expected[-1] != pytest.approx(plain[-1], rel=1e-3)
    changes = {**MIXED, **layout}
    for losses, *_ in run_ranks(world_size, run, False, world_size, changes, timeout_s=200):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layout", [{"parallel.pp": 2}, {"parallel.tp": 2}], ids=["pp2", "tp2"])
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_groups_may_have_all_matrices_of_muon(name: str, layout: dict[str, Any]) -> None:
    groups = [
        {"pattern": "layers.0.*", "optimizer": "none"},
        {"pattern": "layers.[12].*", "optimizer": "muon", "beta1": 0.8, "lr_scale": 0.5},
        {"pattern": "layers.3.*", "optimizer": "lion", "lr_scale": 0.1},
    ]
    changes = {"optimizer.name": name, "optimizer.groups": groups}
    expected = run(0, False, 1, changes)[0]
    for losses, *_ in run_ranks(2, run, False, 2, {**changes, **layout}, timeout_s=200):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_groups_take_the_first_match_and_the_settings_of_the_run() -> None:
    optimizer = make(False, 1, {**MIXED, "optimizer.beta1": 0.7}).optimizer
    state = {piece.info.name: set(piece.tensors) - {"main_param"} for piece in optimizer.pieces()}
    assert len(state["embedding"]) == len(state["layers.2.mlp.down"]) == 1
    assert state["layers.1.mlp.down"] == state["layers.2.mlp.down"]  # of Lion, not of layers.1
    assert state["layers.1.attention.qkv"] == {"exp_avg", "exp_avg_sq"}
    assert "layers.0.mlp.down" not in state
    groups = dense.make_config(1, {**MIXED, "optimizer.beta1": 0.7}).optimizer.param_groups()
    assert groups[2].rule == Lion(beta1=0.7, beta2=0.99)
    assert groups[3].rule == AdamW(beta1=0.5, beta2=0.8)


def test_a_plan_counts_the_state_of_the_optimizers_of_groups() -> None:
    [rank] = plan_run(dense.make_config(1, MIXED), 1).ranks
    found = make(False, 1, MIXED).optimizer.state_bytes
    assert rank.optimizer_bytes == pytest.approx(found, rel=0.01)


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (
            [{"pattern": "layer.*", "optimizer": "none"}],
            r"'layer\.\*' matches none of the .* parameters; nearest: layers\.0\.",
        ),
        (
            [{"pattern": "*.qkv"}, {"pattern": "layers.0.*.qkv", "lr_scale": 2.0}],
            r"gets no parameter: all 1 that it matches, such as .*, are in earlier groups, such as "
            r"'\*\.qkv'",
        ),
        ([{"pattern": "*", "optimizer": "none"}], r"all \d+ parameters are frozen"),
    ],
)
def test_mistakes_are_one_sentence_for_runs_and_plans(
    groups: list[dict[str, Any]], expected: str
) -> None:
    changes = {"optimizer.groups": groups}
    with pytest.raises(ConfigError, match=rf"optimizer\.groups: .*{expected}"):
        make(False, 1, changes)
    config = dense.make_config(1, changes)
    with pytest.raises(ConfigError, match=rf"optimizer\.groups: .*{expected}"):
        plan_run(config, 1)
