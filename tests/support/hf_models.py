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
    "vocab_size": 70,
    "max_position_embeddings": 32,
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
    "qwen3": ("Qwen3", {"intermediate_size": 48, "head_dim": 12}),
}


def make_theirs(name: str) -> Any:
    """Make a model with random weights, in which norms differ from one."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones, which would hide their place
                parameter.uniform_(0.5, 1.5)
    return model


def save_theirs(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save such a model as a folder; return it as it was saved, in eval mode."""
    theirs = make_theirs(name).to(dtype).eval()
    theirs.save_pretrained(folder)
    return theirs
