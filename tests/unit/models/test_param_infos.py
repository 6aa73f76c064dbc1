"""Descriptions of parameters: those of the built model, in the same order."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from megacore.parallel.process_groups import ProcessGroups
from megatrain.config import MoEConfig
from megatrain.models.gpt import GPTChunk
from megatrain.models.param_infos import GPTInfos
from tests.support.models import tiny_config

MLA = {"kv_rank": 8, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 8}
MODELS: list[dict[str, Any]] = [
    {},
    {"tie_embeddings": False, "num_kv_heads": 4, "norm": "layernorm"},
    {"qkv_bias": True, "output_bias": True, "qk_norm": "head", "attention_sinks": True},
    {"qk_norm": "full", "norm_position": "after", "tie_embeddings": False},
    {"mla": MLA, "num_kv_heads": None, "num_mtp_layers": 2},
    {
        "mla": {**MLA, "q_rank": 12},
        "num_kv_heads": None,
        "tie_embeddings": False,
        "num_mtp_layers": 1,
    },
]
EXPERTS: list[dict[str, Any]] = [
    {},
    {"num_experts": 4, "ffn_hidden_size": 16, "layer_pattern": "d(e)"},
    {"num_experts": 4, "shared_ffn_hidden_size": 24, "shared_gate": True},
    {"num_experts": 4, "ffn_hidden_size": 16, "biases": True, "activation": "clamped_swiglu"},
]
# Layers, embedding, head, layers for multi-token prediction, embedding of an earlier stage.
STAGES = [
    (range(2), True, True, True, False),
    (range(1), True, False, False, False),
    (range(1, 2), False, True, True, False),
    (range(1, 2), False, True, False, False),
    (range(1, 2), False, True, True, True),
    (range(1, 2), False, False, False, False),
    (range(0), False, False, True, False),
]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("moe", EXPERTS, ids=str)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_descriptions_are_those_of_the_built_stage(
    model: dict[str, Any], moe: dict[str, Any], sequence_parallel: bool
) -> None:
    config, experts = tiny_config(**model), MoEConfig(**moe)
    infos = GPTInfos.of(config, experts, sequence_parallel=sequence_parallel)
    words = whole(config, experts).embedding_weight
    for layers, has_embedding, has_head, predicts, has_words in STAGES:
        mtp_layers = config.mtp_layers if predicts else range(0)
        ends = {"has_embedding": has_embedding, "has_head": has_head, "mtp_layers": mtp_layers}
        built = GPTChunk(
            config,
            layers=layers,
            groups=ProcessGroups.single(),
            moe=experts,
            device="meta",
            sequence_parallel=sequence_parallel,
            tied_weight=words if has_words else None,
            **ends,
        ).param_infos()
        described = infos.stage(layers, has_words=has_words, **ends)
        assert [info for info, _ in built] == list(described.values())
        for info, parameter in built:
            assert tuple(parameter.shape) == info.full_shape


def whole(config: Any, moe: MoEConfig) -> GPTChunk:
    return GPTChunk(
        config,
        layers=range(config.num_layers),
        has_embedding=True,
        has_head=True,
        groups=ProcessGroups.single(),
        moe=moe,
        device="meta",
    )


def test_descriptions_need_no_torch() -> None:
    code = "import sys, megatrain.models.param_infos; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
