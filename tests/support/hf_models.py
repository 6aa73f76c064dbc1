"""Tiny random models of `transformers`, one or more for each supported family."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.campaigns import representatives

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # All bytes; no multiple of our padding.
    "vocab_size": 260,
    "max_position_embeddings": 32,
    # The letter "e", so that the row without gradient is used.
    "pad_token_id": 101,
    # Large weights, so that every part matters to the loss.
    "initializer_range": 0.2,
}
MIXTRAL = {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "intermediate_size": 48,
    "moe_intermediate_size": 20,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
QWEN2_MOE = {
    "intermediate_size": 48,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
GLM4_MOE = {
    "intermediate_size": 48,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
DEEPSEEK_V2 = {
    **{key: value for key, value in GLM4_MOE.items() if key != "num_nextn_predict_layers"},
    **MLA,
    "routed_scaling_factor": 1.5,
}
DOTS1 = {key: value for key, value in GLM4_MOE.items() if key != "num_nextn_predict_layers"}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
}
QWEN3_MOE_SIZES = {key: value for key, value in QWEN3_MOE.items() if key != "norm_topk_prob"}
# Tested in all ways by `make test`.
FIRST: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral, other rotation": (
        "Mixtral",
        {**MIXTRAL, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3-moe not normalized, tied": (
        "Qwen3Moe",
        {**QWEN3_MOE, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "qwen3-moe, every second layer": ("Qwen3Moe", {**QWEN3_MOE, "decoder_sparse_step": 2}),
    "qwen3-moe, first layer dense": ("Qwen3Moe", {**QWEN3_MOE, "mlp_only_layers": [0]}),
    "llama": ("Llama", {"intermediate_size": 48}),
    "llama 3": ("Llama", {"intermediate_size": 48, "rope_parameters": LLAMA3_ROPE}),
    "llama, linear, biases": (
        "Llama",
        {
            "intermediate_size": 48,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        },
    ),
    "llama, dynamic": (
        "Llama",
        {
            "intermediate_size": 48,
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
        },
    ),
    "mistral, window": ("Mistral", {"intermediate_size": 48, "sliding_window": 5}),
    "qwen2": ("Qwen2", {"intermediate_size": 48, "tie_word_embeddings": True}),
    "qwen2, yarn, windows of some layers": (
        "Qwen2",
        {
            "intermediate_size": 48,
            "rope_parameters": YARN_ROPE,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **QWEN2_MOE,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2-moe, normalized, no bias": (
        "Qwen2Moe",
        {**QWEN2_MOE, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "glm4-moe": ("Glm4Moe", GLM4_MOE),
    "deepseek-v3": (
        "DeepseekV3",
        {**GLM4_MOE, **MLA, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_ROPE},
    ),
    "deepseek-v3 without a latent for queries": (
        "DeepseekV3",
        {**GLM4_MOE, **MLA, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v2 without a latent for queries, yarn": (
        "DeepseekV2",
        {**DEEPSEEK_V2, "q_lora_rank": None, "rope_parameters": DEEPSEEK_ROPE},
    ),
    "glm4-moe, groups, qk norm, biases": (
        "Glm4Moe",
        {
            **GLM4_MOE,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
            "rope_parameters": {**YARN_ROPE, "partial_rotary_factor": 0.25},
            "head_dim": 16,
        },
    ),
    "olmo2": ("Olmo2", {"intermediate_size": 48, "rope_parameters": YARN_ROPE}),
    "gpt-oss": (
        "GptOss",
        {
            "intermediate_size": 24,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": {**YARN_ROPE, "rope_theta": 150.0, "truncate": False},
        },
    ),
    "qwen3": ("Qwen3", {"intermediate_size": 48, "head_dim": 12}),
}
# Their logits, gradients and files are tested by `make test`, the rest by `make test-all`.
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi-k2": ("KimiK2", {**GLM4_MOE, **MLA, "n_group": 1, "topk_group": 1}),
    "dots1": (
        "Dots1",
        {
            **DOTS1,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {**DOTS1, **MLA, "mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            **MIXTRAL,
            "head_dim": 16,
            "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "hy-v3": ("HYV3", {**QWEN3_MOE_SIZES, "num_shared_experts": 2}),
    "seed-oss": (
        "SeedOss",
        {
            "intermediate_size": 48,
            "head_dim": 12,
            "attention_out_bias": True,
            "attention_dropout": 0.0,
            "residual_dropout": 0.0,
        },
    ),
    "phi3": ("Phi3", {"intermediate_size": 48, "sliding_window": 5}),
    "ernie4-5": ("Ernie4_5", {"intermediate_size": 48, "head_dim": 12}),
    "ernie4-5-moe": (
        "Ernie4_5_Moe",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 20,
            "moe_num_experts": 6,
            "moe_k": 2,
            "tie_word_embeddings": False,
        },
    ),
}
GEMMA = {"intermediate_size": 48, "head_dim": 12, "query_pre_attn_scalar": 20}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.0,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GRANITE_MOE = {**MIXTRAL, **GRANITE}
NESTED_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
}
INDEXER = {"index_topk": 32, "index_n_heads": 2, "index_head_dim": 8}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
    "partial_rotary_factor": 0.5,
}
# Families that have further options of the layer.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {"intermediate_size": 48, "head_dim": 12}),
    "gemma2": (
        "Gemma2",
        {
            **GEMMA,
            "sliding_window": 5,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {**GEMMA, "sliding_window": 5, "layer_types": KINDS, "rope_parameters": NESTED_ROPE},
    ),
    "olmo3": (
        "Olmo3",
        {
            "intermediate_size": 48,
            "sliding_window": 5,
            "layer_types": KINDS,
            "rope_parameters": {
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "ministral": (
        "Ministral",
        {"intermediate_size": 48, "head_dim": 12, "sliding_window": 5, "layer_types": KINDS},
    ),
    "ministral3": (
        "Ministral3",
        {
            "intermediate_size": 48,
            "head_dim": 12,
            "rope_parameters": {**YARN_ROPE, "llama_4_scaling_beta": 0.7},
        },
    ),
    "exaone4": ("Exaone4", {"intermediate_size": 48, "sliding_window": 5, "layer_types": KINDS}),
    "smollm3": ("SmolLM3", {"intermediate_size": 48, "no_rope_layers": [1, 0, 1]}),
    "granite": ("Granite", {"intermediate_size": 48, **GRANITE, "attention_bias": True}),
    "granite-moe": ("GraniteMoe", GRANITE_MOE),
    "granite-moe-shared": ("GraniteMoeShared", {**GRANITE_MOE, "shared_intermediate_size": 28}),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "intermediate_size": 48,
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "time_step_limit": (0.0, 9.0),
        },
    ),
    "granite-hybrid, experts, no rotation": (
        "GraniteMoeHybrid",
        {
            **GRANITE_MOE,
            "shared_intermediate_size": 28,
            "layer_types": ["full_attention"] * 3,
            "mamba_n_heads": 4,
            "time_step_limit": (0.0, 9.0),
        },
    ),
    "glm": ("Glm", {"intermediate_size": 48, "head_dim": 12}),
    "glm4": ("Glm4", {"intermediate_size": 48, "head_dim": 12}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "intermediate_size": 48,
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 500.0,
                "factor": 1.0,
                "alpha": 5.0,
            },
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"intermediate_size": 24, "head_dim": 12, "num_experts": 4, "moe_topk": 2},
    ),
    "olmoe": ("Olmoe", {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}),
    "llama4": (
        "Llama4Text",
        {
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "head_dim": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 5,
            "floor_scale": 3,
            "attn_scale": 0.7,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "arcee": ("Arcee", {"intermediate_size": 48}),
    "cohere": ("Cohere", {"intermediate_size": 48, "logit_scale": 0.25}),
    "cohere2": (
        "Cohere2",
        {
            "intermediate_size": 48,
            "logit_scale": 0.25,
            "sliding_window": 5,
            "layer_types": KINDS,
        },
    ),
    "starcoder2": ("Starcoder2", {"intermediate_size": 48, "sliding_window": 5}),
    "gpt2": (
        "GPT2",
        {
            "n_inner": 40,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "num_key_value_heads": ...,
        },
    ),
    "deepseek-v32": (
        "DeepseekV32",
        {**GLM4_MOE, **MLA, **INDEXER, "n_group": 4, "topk_group": 2},
    ),
    "glm-moe-dsa": (
        "GlmMoeDsa",
        {**GLM4_MOE, **MLA, **INDEXER, "indexer_types": ["full", "shared", "full"]},
    ),
    "phi3, longrope": (
        "Phi3",
        {
            "intermediate_size": 48,
            "original_max_position_embeddings": 8,
            "rope_parameters": LONGROPE,
        },
    ),
}
MODELS = {**FIRST, **FURTHER, **OPTIONS}
# As parameters of a test.
EACH = representatives(MODELS, FIRST)
# Models of `transformers` by another name: class without "ForCausalLM", both values of model_type.
_RENAMED = {"KimiK2": ("DeepseekV3", "kimi_k2", "deepseek_v3")}


def classes(family: str) -> tuple[Any, Any]:
    """Return the classes of configuration and model of `transformers`."""
    transformers = pytest.importorskip("transformers")
    if family in _RENAMED:
        return _renamed(family)
    others = {
        "GPT2": "GPT2LMHeadModel",
        "Gemma3Text": "Gemma3ForCausalLM",
        "Llama4Text": "Llama4ForCausalLM",
    }
    model = others.get(family)
    names = (f"{family}Config", model or f"{family}ForCausalLM")
    return tuple(getattr(transformers, name) for name in names)


@cache
def _renamed(family: str) -> tuple[Any, Any]:
    """Give a model another ``model_type``, as its publisher does in a file of its own."""
    transformers = pytest.importorskip("transformers")
    original, kind, _ = _RENAMED[family]
    config, model = classes(original)
    config = type(f"{family}Config", (config,), {"model_type": kind})
    model = type(f"{family}ForCausalLM", (model,), {"config_class": config})
    transformers.AutoConfig.register(kind, config)
    transformers.AutoModelForCausalLM.register(config, model)
    conversions = importlib.import_module("transformers.conversion_mapping")
    rules = conversions.get_checkpoint_conversion_mapping(_RENAMED[family][2])
    conversions.register_checkpoint_conversion_mapping(kind, rules)
    return config, model


def make_theirs(name: str, **more: Any) -> Any:
    """Make a model with random weights, in which norms differ from one.

    Args:
        name: One of `MODELS`.
        more: Further entries of its configuration.
    """
    torch.manual_seed(3)
    family, changes = MODELS[name]
    make_config, make_model = classes(family)
    entries = {**COMMON, **changes, **more}
    config = make_config(**{name: value for name, value in entries.items() if value is not ...})
    model = make_model(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms start as ones, which would hide their place
                middle = 0.0 if family.startswith("Gemma") else 1.0
                parameter.uniform_(middle - 0.5, middle + 0.5)
            elif key.endswith("_bias"):
                parameter.uniform_(-0.5, 0.5)
        model.get_input_embeddings().weight[config.pad_token_id].normal_(0.0, 0.2)  # was zero
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    return model


def save_theirs(name: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Save such a model as a folder; return it as it was saved, in eval mode."""
    theirs = make_theirs(name, **more).to(dtype).eval()
    for key, tensor in (*theirs.named_buffers(), *theirs.named_parameters()):
        if key.endswith("e_score_correction_bias"):
            tensor.data = tensor.data.float()  # as in published checkpoints
    theirs.save_pretrained(folder)
    return theirs


# Names of Ling 2 (`bailing_moe_v2`) for those of GLM-4.5, whose blocks it has.
_BAILING_NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "self_attn": "attention",
    "e_score_correction_bias": "expert_bias",
}


def save_bailing(folder: Path) -> Any:
    """Save a tiny Ling 2, which `transformers` does not have; return the same model as GLM-4.5."""
    from safetensors.torch import load_file, save_file

    theirs = save_theirs(
        "glm4-moe, groups, qk norm, biases",
        folder,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 600.0, "partial_rotary_factor": 0.5},
    )
    path, tensors = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        for old, new in _BAILING_NAMES.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    for name in [name for name in tensors if "q_proj" in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("q_proj", "query_key_value")] = torch.cat(parts)
    save_file(tensors, path, metadata={"format": "pt"})
    same = """hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        max_position_embeddings tie_word_embeddings rms_norm_eps initializer_range pad_token_id
        vocab_size intermediate_size moe_intermediate_size first_k_dense_replace n_group topk_group
        hidden_act num_experts_per_tok norm_topk_prob routed_scaling_factor
        attention_dropout use_qk_norm"""
    config = {name: getattr(theirs.config, name) for name in same.split()}
    config |= {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe_v2",
        "num_experts": theirs.config.n_routed_experts,
        "num_shared_experts": theirs.config.n_shared_experts,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_theta": 600.0,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "use_bias": False,
        "use_qkv_bias": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return theirs
