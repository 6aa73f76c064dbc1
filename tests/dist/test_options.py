"""Every option of a layer alone, in every kind of layout: the losses of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from megatrain.config import ModelConfig
from megatrain.train.trainer import build_trainer
from tests.support.campaigns import representatives
from tests.support.configs import FOUR_LAYERS, changed_config
from tests.support.distributed import run_ranks

STEPS = 6
DENSE: dict[str, dict[str, Any]] = {
    "model": {**FOUR_LAYERS, "init_std": 0.1},
    "train": {"steps": STEPS, "microbatch_size": 2, "global_batch_size": 4, "eval_interval": 0},
    "optimizer": {"lr": 5e-3, "warmup": 1},
}
EXPERTS = {
    **DENSE,
    "moe": {
        "num_experts": 4,
        "top_k": 2,
        "ffn_hidden_size": 16,
        "layer_pattern": "d(e)",
        "shared_ffn_hidden_size": 16,
    },
}
LONGROPE = {
    "model.rope_scaling.type": "longrope",
    "model.rope_scaling.factor": 4.0,
    "model.rope_scaling.original_seq_length": 8,
    "model.rope_scaling.short_factors": [1.0, 1.0, 1.0, 1.0],
    "model.rope_scaling.long_factors": [1.0, 2.0, 3.0, 4.0],
}
LATENT = {
    "model.num_kv_heads": None,
    "model.mla.kv_rank": 12,
    "model.mla.q_rank": 20,
    "model.mla.nope_head_dim": 6,
    "model.mla.rope_head_dim": 4,
    "model.mla.v_head_dim": 10,
}
OPTIONS: dict[str, dict[str, Any]] = {
    # Alone, it has the losses of a weight that starts at one.
    "norm plus one": {"model.norm_plus_one": True, "model.qk_norm": "head"},
    "norms before and after": {"model.norm_position": "both"},
    "norms after": {"model.norm_position": "after"},
    "factor on embeddings": {"model.embedding_factor": 3.0},
    "factor on scores": {"model.attention_scale": 0.6},
    "factor on blocks": {"model.residual_factor": 0.5},
    "factor on logits": {"model.logit_factor": 0.5},
    "limit of scores": {"model.attention_softcap": 0.3},
    "limit of logits": {"model.logit_softcap": 1.0},
    "windows": {"model.sliding_window": 5, "model.window_pattern": "wf"},
    "chunks": {
        "model.sliding_window": 5,
        "model.window_pattern": "wf",
        "model.window_type": "chunk",
    },
    "rotation by kind of layer": {
        "model.sliding_window": 5,
        "model.window_pattern": "wf",
        "model.window_rope_base": 50.0,
    },
    "layers without rotation": {"model.rotation_pattern": "rrrn"},
    "half of a head rotated": {"model.rotary_fraction": 0.5},
    "longrope": LONGROPE,
    "norm of heads": {"model.qk_norm": "head"},
    "norm of heads after rotation": {"model.qk_norm": "head_after"},
    "norm of all heads": {"model.qk_norm": "full"},
    "norm of heads without weight": {
        "model.qk_norm": "unit",
        "model.rotation_pattern": "rrrn",
    },
    "queries scaled": {
        "model.query_scaling.beta": 0.7,
        "model.query_scaling.length": 3,
    },
    "queries scaled in layers without rotation": {
        "model.query_scaling.beta": 0.7,
        "model.query_scaling.length": 3,
        "model.query_scaling.shift": 1,
        "model.query_scaling.layers": "unrotated",
        "model.rotation_pattern": "rn",
    },
    "inputs of experts scaled": {"moe.scale_inputs": True},
    "squared ReLU": {"model.activation": "relu2"},
    "GELU": {"model.activation": "gelu"},
    "GeGLU": {"model.activation": "geglu"},
    "parallel blocks": {"model.parallel_blocks": True},
    "LayerNorm": {"model.norm": "layernorm"},
    "LayerNorm without bias": {"model.norm": "layernorm", "model.norm_bias": False},
    "learned positions": {"model.learned_positions": 40},
    "biases of queries": {"model.qkv_bias": True},
    "bias of attention": {"model.output_bias": True},
    "biases of MLPs": {"model.mlp_bias": True},
    "sinks": {"model.attention_sinks": True},
    "untied head": {"model.tie_embeddings": False},
    "row of padding": {"model.padding_idx": 101},
    "latents": LATENT,
    "latents, none for queries": {**LATENT, "model.mla.q_rank": 0},
}
# Settings of the model that are sizes or numbers, or have matrices of their own.
OTHERS = {
    *("factory", "options", "hidden_size", "num_layers", "num_heads", "head_dim", "num_kv_heads"),
    *("ffn_hidden_size", "vocab_size", "vocab_pad_multiple", "seq_length", "rope_base"),
    *("norm_eps", "init_std", "dropout", "num_mtp_layers", "mtp_loss_coef"),
}
# Sides of attention that its exchanges by heads and in a ring have to know.
OF_ATTENTION = (
    *("factor on scores", "limit of scores", "windows", "chunks", "rotation by kind of layer"),
    *("layers without rotation", "longrope", "learned positions", "sinks", "queries scaled"),
    "queries scaled in layers without rotation",
)
# Ranks, settings, and what is recomputed if anything is: whole layers or parts of them.
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "one process": (1, {}, ["selective"]),
    "tp2": (2, {"parallel.tp": 2}, ["full"]),
    "tp2 sequence parallel": (
        2,
        {"parallel.tp": 2, "parallel.sequence_parallel": True},
        ["selective"],
    ),
    "pp2": (2, {"parallel.pp": 2}, ["full"]),
    "cp2": (2, {"parallel.cp": 2}, ["selective"]),
    "cp2 a2a": (2, {"parallel.cp": 2, "parallel.cp_comm": "a2a"}, ["full"]),
    "cp2 ring": (2, {"parallel.cp": 2, "parallel.cp_comm": "ring"}, ["full"]),
    "ep2": (2, {"parallel.ep": 2}, ["selective", "moe"]),
    "etp2": (2, {"parallel.tp": 2, "parallel.etp": 2, "parallel.ep": 1}, ["full"]),
}
FURTHER = {"cp2 a2a": OF_ATTENTION, "cp2 ring": OF_ATTENTION, "etp2": ("inputs of experts scaled",)}
CASES = [
    (option, layout, kept)
    for option in OPTIONS
    for layout in LAYOUTS
    for kept in ("kept", "recomputed")
    if option in FURTHER.get(layout, OPTIONS)
    and (layout, kept) != ("one process", "kept")
    and (not option.startswith("inputs of experts") or layout in ("ep2", "etp2"))
]


def train(_rank: int, world_size: int, option: str, changes: dict[str, Any]) -> list[float]:
    # Options of attention and of norms do not know experts, but stand beside them.
    base = EXPERTS if changes.get("parallel.ep") else DENSE
    config = changed_config(world_size, base, {**OPTIONS.get(option, {}), **changes})
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    return [trainer.train_step(step).loss for step in range(STEPS)]


@cache
def train_whole(option: str, *, experts: bool) -> list[float]:
    return train(0, 1, option, {"parallel.ep": 1} if experts else {})


def test_every_option_of_the_model_is_here() -> None:
    keys = {key.split(".")[1] for option in OPTIONS.values() for key in option}
    missing = ModelConfig.model_fields.keys() - OTHERS - keys
    assert not missing, f"add {', '.join(sorted(missing))} to OPTIONS, or to OTHERS"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("option", "layout", "kept"),
    representatives(
        CASES,
        [
            ("norms before and after", "ep2", "recomputed"),
            ("chunks", "cp2", "recomputed"),
            ("rotation by kind of layer", "cp2 ring", "recomputed"),
            ("queries scaled in layers without rotation", "cp2 a2a", "kept"),
            ("inputs of experts scaled", "etp2", "kept"),
            ("biases of MLPs", "tp2 sequence parallel", "recomputed"),
            ("factor on blocks", "pp2", "recomputed"),
            ("parallel blocks", "tp2", "kept"),
        ],
    ),
)
def test_an_option_has_the_losses_of_one_process(option: str, layout: str, kept: str) -> None:
    world_size, parallel, parts = LAYOUTS[layout]
    experts = "parallel.ep" in parallel
    changes = {**parallel, "train.recompute": parts if kept == "recomputed" else []}
    whole = train_whole(option, experts=experts)
    if world_size == 1:
        losses = train(0, 1, option, changes)
    else:
        losses = run_ranks(world_size, train, world_size, option, changes, timeout_s=180)[0]
    assert losses == pytest.approx(whole, rel=1e-5)
    assert losses[-1] < losses[0] - 0.1, "the model must have learnt something"
    assert whole != train_whole("none", experts=experts), "the option must have an effect"
