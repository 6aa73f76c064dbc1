"""Parallelism changes nothing: every layout gives the losses of the single process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from megatrain.config import Config
from megatrain.train.trainer import build_trainer
from tests.support.campaigns import representatives
from tests.support.configs import FOUR_LAYERS, changed_config
from tests.support.distributed import run_ranks

STEPS = 20

BASE: dict[str, dict[str, Any]] = {
    "model": {**FOUR_LAYERS, "ffn_hidden_size": 64},
    "train": {"steps": STEPS, "microbatch_size": 2, "global_batch_size": 16, "eval_interval": 10},
    "optimizer": {"lr": 2e-3, "warmup": 5},
}


def make_config(world_size: int, changes: dict[str, Any]) -> Config:
    return changed_config(world_size, BASE, changes)


def train(_rank: int, world_size: int, changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of all steps, then the validation loss as a last loss."""
    config = make_config(world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    metrics = [trainer.train_step(step) for step in range(STEPS)]
    losses = [step.loss for step in metrics] + [trainer.mean_validation_loss(trainer.evaluate())]
    return losses, [step.grad_norm for step in metrics]


def train_on_ranks(world_size: int, changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    results = run_ranks(world_size, train, world_size, changes, timeout_s=120)
    assert all(result == results[0] for result in results), "ranks report different metrics"
    return results[0]


@cache
def train_whole(architecture: str = "") -> tuple[list[float], list[float]]:
    """Train an architecture in this process."""
    return train(0, 1, ARCHITECTURES[architecture] if architecture else {})


@pytest.fixture(scope="module")
def single() -> tuple[list[float], list[float]]:
    return train_whole()


LAYOUTS = {
    "tp2": (2, {"parallel.tp": 2}),
    "tp2 sequence parallel": (2, {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    "pp2": (2, {"parallel.pp": 2}),
    "pp2 gpipe": (2, {"parallel.pp": 2, "pipeline.schedule": "gpipe"}),
    "pp2 with 2 chunks": (
        2,
        {"parallel.pp": 2, "pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2},
    ),
    "one rank with 2 chunks": (
        1,
        {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2},
    ),
    "one rank with 2 chunks, split backwards": (1, {"pipeline.schedule": "interleaved_zb"}),
    "pp4 uneven": (4, {"parallel.pp": 4, "pipeline.layout": "Ett|t|t|L"}),
    "dp2": (2, {}),
    "dp2 without ZeRO-1": (2, {"optimizer.distributed": False}),
    "dp4 small buckets": (4, {"optimizer.bucket_numel": 1000}),
    "tp2 pp2": (4, {"parallel.tp": 2, "parallel.pp": 2}),
    "tp2 pp2 sequence parallel, 2 chunks": (
        4,
        {
            "parallel.tp": 2,
            "parallel.pp": 2,
            "parallel.sequence_parallel": True,
            "pipeline.schedule": "interleaved_1f1b",
            "pipeline.num_chunks": 2,
        },
    ),
    "cp2": (2, {"parallel.cp": 2}),
    "tp2 cp2 sequence parallel": (
        4,
        {"parallel.tp": 2, "parallel.cp": 2, "parallel.sequence_parallel": True},
    ),
    "cp2 pp2": (4, {"parallel.cp": 2, "parallel.pp": 2}),
    "cp4": (4, {"parallel.cp": 4}),
    "cp2 a2a": (2, {"parallel.cp": 2, "parallel.cp_comm": "a2a"}),
    "cp2 a2a pp2, recomputed": (
        4,
        {
            "parallel.cp": 2,
            "parallel.cp_comm": "a2a",
            "parallel.pp": 2,
            "train.recompute": ["full"],
        },
    ),
    "cp4 ring": (4, {"parallel.cp": 4, "parallel.cp_comm": "ring"}),
    "cp2 ring tp2 sequence parallel, recomputed": (
        4,
        {
            "parallel.cp": 2,
            "parallel.cp_comm": "ring",
            "parallel.tp": 2,
            "parallel.sequence_parallel": True,
            "train.recompute": ["full"],
        },
    ),
    "cp2 ring pp2 zb_v": (
        4,
        {
            "parallel.cp": 2,
            "parallel.cp_comm": "ring",
            "parallel.pp": 2,
            "pipeline.schedule": "zb_v",
        },
    ),
    "pp4 zb_h1": (4, {"parallel.pp": 4, "pipeline.schedule": "zb_h1"}),
    "pp2 dp2 zb_v, overlapped": (
        4,
        {
            "parallel.pp": 2,
            "pipeline.schedule": "zb_v",
            "optimizer.overlap": "all",
            "optimizer.bucket_numel": 5000,
        },
    ),
    "tp2 pp2 dualpipe_v, sequence parallel": (
        4,
        {
            "parallel.tp": 2,
            "parallel.pp": 2,
            "parallel.sequence_parallel": True,
            "pipeline.schedule": "dualpipe_v",
        },
    ),
    "pp2 v_half, checked messages": (
        2,
        {
            "parallel.pp": 2,
            "pipeline.schedule": "v_half",
            "debug.check_messages": True,
            "model.tie_embeddings": True,
        },
    ),
    "pp2 auto": (
        2,
        {
            "parallel.pp": 2,
            "pipeline.schedule": "auto",
            "pipeline.placement": "v",
            "pipeline.memory_limit": 4,
            "pipeline.overlap_p2p": False,
        },
    ),
    "pp2 dp2, pp before dp": (4, {"parallel.pp": 2, "parallel.order": "tp-pp-dp"}),
}

# One of every axis and pair of axes, kind of schedule and way to reduce.
REPRESENTATIVES = (
    "tp2 sequence parallel",
    "pp2 gpipe",
    "pp2 with 2 chunks",
    "one rank with 2 chunks, split backwards",
    "dp2",
    "dp2 without ZeRO-1",
    "dp4 small buckets",
    "tp2 pp2",
    "cp2",
    "cp4 ring",
    "pp4 zb_h1",
    "pp2 dp2 zb_v, overlapped",
    "pp2 v_half, checked messages",
    "pp2 auto",
)


@pytest.mark.dist
@pytest.mark.parametrize("layout", representatives(LAYOUTS, REPRESENTATIVES))
def test_layout_gives_the_losses_of_one_process(
    layout: str, single: tuple[list[float], list[float]]
) -> None:
    world_size, changes = LAYOUTS[layout]
    losses, grad_norms = train_on_ranks(world_size, changes)
    assert losses == pytest.approx(single[0], rel=1e-5)
    assert grad_norms == pytest.approx(single[1], rel=1e-3)
    assert losses[STEPS - 1] < losses[0] - 0.5, "the model must have learnt something"


# Parts of the architecture, each in layouts that split what it adds.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "biases, partial rotation, llama3 scaling": {
        "model.qkv_bias": True,
        "model.output_bias": True,
        "model.rotary_fraction": 0.5,
        "model.rope_scaling.type": "llama3",
        "model.rope_scaling.factor": 4.0,
        "model.rope_scaling.original_seq_length": 8,
    },
    "windows of some layers, yarn": {
        "model.sliding_window": 6,
        "model.window_pattern": "wf",
        "model.rope_scaling.type": "yarn",
        "model.rope_scaling.factor": 4.0,
        "model.rope_scaling.original_seq_length": 8,
    },
    "layer norm, geglu, soft caps, window": {
        "model.norm": "layernorm",
        "model.activation": "geglu",
        "model.attention_softcap": 2.0,
        "model.logit_softcap": 5.0,
        "model.sliding_window": 5,
    },
    "norms after blocks, wide norms of queries and keys": {
        "model.norm_position": "after",
        "model.qk_norm": "full",
    },
    "attention sinks, window": {
        "model.attention_sinks": True,
        "model.sliding_window": 5,
        "model.window_pattern": "wf",
    },
    "norms before and after, plus one, factors, rotation by layer": {
        "model.norm_position": "both",
        "model.norm_plus_one": True,
        "model.qk_norm": "head",
        "model.embedding_factor": 3.0,
        "model.attention_scale": 0.3,
        "model.residual_factor": 0.7,
        "model.logit_factor": 0.5,
        "model.sliding_window": 5,
        "model.window_pattern": "wf",
        "model.window_rope_base": 50.0,
        "model.rotation_pattern": "rrrn",
    },
    "parallel blocks, norms without bias, squared ReLU, recomputed": {
        "model.parallel_blocks": True,
        "model.norm": "layernorm",
        "model.norm_bias": False,
        "model.activation": "relu2",
        "model.qk_norm": "head_after",
        "train.recompute": ["selective"],
    },
    "chunks, scaled queries, norms of queries and keys without weights": {
        "model.sliding_window": 5,
        "model.window_pattern": "wwwf",
        "model.window_type": "chunk",
        "model.rotation_pattern": "rrrn",
        "model.query_scaling.beta": 0.5,
        "model.query_scaling.length": 3,
        "model.qk_norm": "unit",
    },
    "learned positions, GELU, biases": {
        "model.learned_positions": 40,
        "model.norm": "layernorm",
        "model.activation": "gelu",
        "model.qkv_bias": True,
        "model.output_bias": True,
        "model.mlp_bias": True,
    },
    "latent attention": {
        "model.num_kv_heads": None,
        "model.mla.kv_rank": 12,
        "model.mla.q_rank": 20,
        "model.mla.nope_head_dim": 6,
        "model.mla.rope_head_dim": 4,
        "model.mla.v_head_dim": 10,
    },
    "latent attention without a latent for queries": {
        "model.num_kv_heads": None,
        "model.mla.kv_rank": 12,
        "model.mla.nope_head_dim": 6,
        "model.mla.rope_head_dim": 4,
        "model.mla.v_head_dim": 6,
        "train.recompute": ["selective"],
    },
}
ARCHITECTURE_LAYOUTS = (
    "tp2",
    "tp2 sequence parallel",
    "cp2",
    "tp2 cp2 sequence parallel",
    "cp4",
    "cp2 a2a",
    "cp4 ring",
    "pp4 zb_h1",
    "tp2 pp2 dualpipe_v, sequence parallel",
)
ARCHITECTURE_CASES = [
    (architecture, layout)
    for architecture in ARCHITECTURES
    for layout in ARCHITECTURE_LAYOUTS
    if not (layout in ("cp2 a2a", "cp4 ring") and architecture.startswith("latent"))  # refused
]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("architecture", "layout"),
    representatives(
        ARCHITECTURE_CASES,
        [
            ("biases, partial rotation, llama3 scaling", "tp2"),
            ("windows of some layers, yarn", "cp4"),
            ("attention sinks, window", "cp2 a2a"),
            ("attention sinks, window", "cp4 ring"),
            ("layer norm, geglu, soft caps, window", "tp2 cp2 sequence parallel"),
            (
                "norms after blocks, wide norms of queries and keys",
                "tp2 pp2 dualpipe_v, sequence parallel",
            ),
            (
                "norms before and after, plus one, factors, rotation by layer",
                "tp2 pp2 dualpipe_v, sequence parallel",
            ),
            ("parallel blocks, norms without bias, squared ReLU, recomputed", "pp4 zb_h1"),
            (
                "chunks, scaled queries, norms of queries and keys without weights",
                "tp2 cp2 sequence parallel",
            ),
            ("learned positions, GELU, biases", "tp2 cp2 sequence parallel"),
            ("latent attention", "tp2 cp2 sequence parallel"),
            ("latent attention without a latent for queries", "pp4 zb_h1"),
        ],
    ),
)
def test_architectures_have_the_losses_of_one_process(architecture: str, layout: str) -> None:
    world_size, changes = LAYOUTS[layout]
    whole = train_whole(architecture)
    parts = train_on_ranks(world_size, {**changes, **ARCHITECTURES[architecture]})
    assert parts[0] == pytest.approx(whole[0], rel=1e-5)
    assert parts[1] == pytest.approx(whole[1], rel=1e-3)
    assert whole[0] != train_whole()[0], "the setting must have an effect"


MASKED = {"data.factory": "tests.support.own_data:answers"}
MEANS: dict[str, dict[str, Any]] = {
    "token": MASKED,
    "microbatch": {**MASKED, "train.loss_normalization": "microbatch"},
}


@cache
def train_masked(mean: str) -> tuple[list[float], list[float]]:
    """Train on samples with few labels that count, in this process."""
    return train(0, 1, MEANS[mean])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mean", "layout"),
    representatives(
        [(mean, layout) for mean in MEANS for layout in LAYOUTS],
        [
            ("token", "tp2 cp2 sequence parallel"),
            ("token", "pp2 dp2 zb_v, overlapped"),
            ("microbatch", "cp4 ring"),
            ("microbatch", "pp2 with 2 chunks"),
        ],
    ),
)
def test_masked_labels_count_the_same_in_every_layout(mean: str, layout: str) -> None:
    world_size, changes = LAYOUTS[layout]
    losses, grad_norms = train_on_ranks(world_size, {**MEANS[mean], **changes})
    whole = train_masked(mean)
    assert losses == pytest.approx(whole[0], rel=1e-5)
    assert grad_norms == pytest.approx(whole[1], rel=1e-5)
    assert losses[STEPS - 1] < losses[0] - 0.5, "the model must have learnt something"


@pytest.mark.dist
def test_a_pipeline_changes_no_bit() -> None:
    # A tied embedding and the clipping norm are sums over ranks: another order than in one process.
    changes: dict[str, Any] = {"model.tie_embeddings": False, "optimizer.clip_grad": 0.0}
    whole, _ = train(0, 1, changes)
    losses, _ = train_on_ranks(2, {**changes, "parallel.pp": 2})
    assert losses == whole


@pytest.mark.dist
def test_zero1_changes_no_bit() -> None:
    sharded = train_on_ranks(2, {"optimizer.num_instances": 1})
    assert sharded == train_on_ranks(2, {"optimizer.distributed": False})


@pytest.mark.dist
@pytest.mark.parametrize("tie", representatives([True, False], [True]))
def test_dropout_and_untied_embeddings_do_not_depend_on_the_layout(tie: bool) -> None:
    changes: dict[str, Any] = {"model.dropout": 0.2, "model.tie_embeddings": tie}
    whole = train(0, 1, changes)
    parts = train_on_ranks(4, {**changes, "parallel.tp": 2, "parallel.pp": 2})
    assert parts[0] == pytest.approx(whole[0], rel=1e-5)
