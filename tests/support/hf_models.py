"""Tiny random models of `transformers`, one or more for each supported family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
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


def make_theirs(name: str, **more: Any) -> Any:
    """Make a model with random weights, in which norms differ from one.

    Args:
        name: One of `MODELS`.
        more: Further entries of its configuration.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **changes, **more})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms start as ones, which would hide their place
                parameter.uniform_(0.5, 1.5)
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
    for key, buffer in theirs.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()  # as in published checkpoints
    theirs.save_pretrained(folder)
    return theirs
