"""Number of parameters of every family, against the models of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.hf import sections_from_hf
from megatrain.hf.families import FAMILIES
from megatrain.models.size import count_parameters
from tests.support.hf_models import classes

transformers = pytest.importorskip("transformers")

# Numbers that published files state, where the class has none or others.
PUBLISHED: dict[str, dict[str, Any]] = {
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_method": "greedy"},
    "glm4_moe": {"use_qk_norm": True, "head_dim": 128},
    "granitemoehybrid": {"layer_types": ["full_attention"] * 32, "num_local_experts": 0},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "ministral": {"head_dim": 128},
    "kimi_k2": {
        "num_hidden_layers": 61,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 163840,
        "hidden_size": 7168,
    },
}
classes("KimiK2")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "bailing_moe_v2"])
def test_the_number_is_that_of_transformers(kind: str) -> None:
    config = transformers.CONFIG_MAPPING[kind](**PUBLISHED.get(kind, {}))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    # Layers for multi-token prediction are not theirs; correction biases and indexers
    # are not our parameters.
    entries = config.to_dict() | {"model_type": kind, "num_nextn_predict_layers": 0}
    count = count_parameters(*sections_from_hf(entries))
    parameters = {
        name: value
        for name, value in theirs.named_parameters()
        if "correction" not in name and ".indexer." not in name
    }
    assert count.total - count.padding == sum(value.numel() for value in parameters.values())
