"""Tiny models and batches, and a plain GPT to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from megacore.parallel.batch import Microbatch
from megacore.parallel.process_groups import ProcessGroups
from megatrain.config import ModelConfig
from megatrain.models.gpt import GPTChunk


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, four query heads on two key heads, a vocabulary of 50 padded to 64."""
    fields = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 48,
        "vocab_size": 50,
        "vocab_pad_multiple": 32,
        "seq_length": 16,
        # Large weights, so that every part of the model matters to the loss.
        "init_std": 0.2,
    }
    return ModelConfig(**{**fields, **changes})


def whole_model(config: ModelConfig, **changes: Any) -> GPTChunk:
    """All layers in one process."""
    arguments = {
        "layers": range(config.num_layers),
        "has_embedding": True,
        "has_head": True,
        "groups": ProcessGroups.single(),
    }
    return GPTChunk(config, **{**arguments, **changes})


def random_batch(
    config: ModelConfig, *, batch: int = 3, sequence: int | None = None, step: int = 0
) -> Microbatch:
    """Random tokens, the same for the same arguments."""
    length = (sequence or config.seq_length) + 1
    generator = torch.Generator().manual_seed(step + 17)
    tokens = torch.randint(0, config.vocab_size, (batch, length), generator=generator)
    ids = torch.arange(batch) + step * batch
    return Microbatch(tokens=tokens[:, :-1], labels=tokens[:, 1:], sample_ids=ids, step=step)


def params_by_name(*chunks: GPTChunk) -> dict[str, nn.Parameter]:
    """Parameters of some chunks by global name."""
    return {info.name: parameter for chunk in chunks for info, parameter in chunk.param_infos()}


def plain_logits(config: ModelConfig, params: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """A GPT written for reading, ``(B, S)`` to ``(B, S, padded vocabulary)``; no dropout."""
    x = params["embedding"][tokens]
    for layer in range(config.num_layers):
        x = plain_layer(config, params, layer, x)
    x = plain_norm(x, params["final_norm"], config.norm_eps)
    return x @ params["embedding" if config.tie_embeddings else "head"].T


def plain_layer(config: ModelConfig, params: dict[str, Tensor], layer: int, x: Tensor) -> Tensor:
    """One dense layer."""
    names = {key: f"layers.{layer}.{key}" for key in ("attention", "mlp")}
    normed = plain_norm(x, params[f"{names['attention']}.norm"], config.norm_eps)
    x = x + _attention(config, params, names["attention"], normed)
    normed = plain_norm(x, params[f"{names['mlp']}.norm"], config.norm_eps)
    gate, up = params[f"{names['mlp']}.gate_up"]
    return x + (silu(normed @ gate.T) * (normed @ up.T)) @ params[f"{names['mlp']}.down"].T


def plain_loss(config: ModelConfig, params: dict[str, Tensor], batch: Microbatch) -> Tensor:
    """Mean cross entropy of the plain GPT over the true vocabulary."""
    logits = plain_logits(config, params, batch.tokens)[..., : config.vocab_size]
    return cross_entropy(logits.flatten(0, 1), batch.labels.flatten())


def plain_rotate(x: Tensor, position: int, base: float) -> Tensor:
    """Turn one head vector ``(D,)`` pair by pair."""
    half = x.shape[0] // 2
    turned = torch.empty_like(x)
    for i in range(half):
        angle = torch.tensor(position * base ** (-2 * i / x.shape[0]), dtype=torch.float64)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        turned[i] = x[i] * cos - x[i + half] * sin
        turned[i + half] = x[i + half] * cos + x[i] * sin
    return turned


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _attention(config: ModelConfig, params: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    head_dim = config.head_dim or config.hidden_size // config.num_heads
    num_shared = config.num_heads // config.num_kv_heads
    heads = []
    for weight in params[f"{name}.qkv"]:
        rows = (x @ weight.T).split(head_dim, dim=-1)
        key, value = _rotated(rows[num_shared], config.rope_base), rows[num_shared + 1]
        for query in rows[:num_shared]:
            scores = _rotated(query, config.rope_base) @ key.mT / head_dim**0.5
            future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value)
    return torch.cat(heads, dim=-1) @ params[f"{name}.output"].T


def _rotated(x: Tensor, base: float) -> Tensor:
    half = x.shape[-1] // 2
    inverse = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), inverse)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
