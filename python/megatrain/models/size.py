"""Model size: its parameters, their number, and those of a rank; without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatrain.config import ModelConfig, MoEConfig, ParallelConfig
from megatrain.models.shape import GPTShape


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of the whole model, including the padding of the vocabulary.

    Attributes:
        total: All parameters.
        active: Parameters used by one token: without the experts that it is not routed to.
        padding: Parameters of rows that only pad the vocabulary.
    """

    total: int
    active: int
    padding: int


def count_parameters(config: ModelConfig, moe: MoEConfig | None = None) -> ParameterCount:
    """Count the parameters of ``[model]`` and ``[moe]`` sections.

    Example:
        >>> config = ModelConfig(hidden_size=8, num_heads=2, num_kv_heads=1, ffn_hidden_size=16,
        ...                      num_layers=3, vocab_size=10, vocab_pad_multiple=4)
        >>> count_parameters(config).total, count_parameters(config).padding
        (1880, 16)
        >>> count = count_parameters(config, MoEConfig(num_experts=4, ffn_hidden_size=16))
        >>> count.total, count.active
        (5432, 3128)
    """
    shape, moe = GPTShape.from_config(config), MoEConfig() if moe is None else moe
    norm = sum(param.numel for param in norm_params(config, ParallelConfig()))
    num_matrices = 1 if shape.tie_embeddings else 2
    total = num_matrices * shape.padded_vocab * shape.hidden + norm
    total += config.num_mtp_layers * (2 * shape.hidden**2 + 3 * norm)
    idle = 0
    for index in range(config.mtp_layers.stop):
        for param in layer_params(config, moe, index):
            total += param.numel
            if param.expert:
                idle += param.numel // moe.num_experts * (moe.num_experts - moe.top_k)
    padding = num_matrices * (shape.padded_vocab - shape.vocab) * shape.hidden
    return ParameterCount(total=total, active=total - idle, padding=padding)


class LocalParam(NamedTuple):
    """A parameter of a rank: its elements there, and the buffer that it belongs to.

    Attributes:
        numel: Elements.
        expert: Whether it belongs to experts.
        partial: Whether its gradients are sums over tp ranks.
        shared: Whether other stages have copies of it.
    """

    numel: int
    expert: bool = False
    partial: bool = False
    shared: bool = False


def layer_params(
    model: ModelConfig, moe: MoEConfig, index: int, parallel: ParallelConfig | None = None
) -> Iterator[LocalParam]:
    """List the parameters of a layer on a rank, in the order in which the model makes them.

    Args:
        model: The ``[model]`` section.
        moe: The ``[moe]`` section.
        index: Global index of the layer.
        parallel: The ``[parallel]`` section. Default: one rank.
    """
    parallel = ParallelConfig() if parallel is None else parallel
    shape = GPTShape.from_config(model)
    hidden, tp, sp = shape.hidden, parallel.tp, parallel.sequence_parallel
    yield from norm_params(model, parallel)
    if model.mla.kv_rank:
        yield from _latent_params(model, parallel)
    else:
        yield from _attention_params(model, shape, parallel)
    yield from norm_params(model, parallel)
    if not moe.is_moe_layer(index):
        yield LocalParam(2 * shape.ffn // tp * hidden)
        yield LocalParam(hidden * shape.ffn // tp)
        return
    if moe.shared_ffn_hidden_size:
        yield LocalParam(2 * moe.shared_ffn_hidden_size // tp * hidden)
        yield LocalParam(hidden * moe.shared_ffn_hidden_size // tp)
        if moe.shared_gate:
            yield LocalParam(hidden, partial=sp)
    yield LocalParam(moe.num_experts * hidden, partial=True)
    if moe.biases:
        yield LocalParam(moe.num_experts, partial=True)
    experts = moe.num_experts // parallel.ep
    width = (moe.ffn_hidden_size or shape.ffn) // (parallel.etp or tp)
    inner = (2 if moe.gated else 1) * width
    yield LocalParam(experts * inner * hidden, expert=True)
    yield LocalParam(experts * width * hidden, expert=True)
    if moe.biases:
        yield LocalParam(experts * inner, expert=True)
        yield LocalParam(experts * hidden, expert=True)


def norm_params(model: ModelConfig, parallel: ParallelConfig) -> list[LocalParam]:
    """List the parameters of a norm over the residual stream."""
    param = LocalParam(model.hidden_size, partial=parallel.sequence_parallel)
    return [param] * (2 if model.norm == "layernorm" else 1)


def _attention_params(
    model: ModelConfig, shape: GPTShape, parallel: ParallelConfig
) -> Iterator[LocalParam]:
    hidden, tp = shape.hidden, parallel.tp
    width, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    qkv = width + 2 * keys
    yield LocalParam(qkv * hidden // tp)
    if model.qkv_bias:
        yield LocalParam(qkv // tp)
    yield LocalParam(hidden * width // tp)
    if model.output_bias:
        yield LocalParam(hidden, partial=parallel.sequence_parallel)
    if model.qk_norm == "head":
        yield LocalParam(shape.head_dim, partial=True)
        yield LocalParam(shape.head_dim, partial=True)
    elif model.qk_norm == "full":
        yield LocalParam(width // tp)
        yield LocalParam(keys // tp)
    if model.attention_sinks:
        yield LocalParam(shape.num_heads // tp)


def _latent_params(model: ModelConfig, parallel: ParallelConfig) -> Iterator[LocalParam]:
    mla, hidden, heads = model.mla, model.hidden_size, model.num_heads // parallel.tp
    query = heads * (mla.nope_head_dim + mla.rope_head_dim)
    partial = parallel.sequence_parallel or not mla.q_rank
    if mla.q_rank:
        yield LocalParam(mla.q_rank * hidden, partial=partial)
        yield LocalParam(mla.q_rank, partial=partial)
    else:
        yield LocalParam(query * hidden)
    yield LocalParam((mla.kv_rank + mla.rope_head_dim) * hidden, partial=partial)
    yield LocalParam(mla.kv_rank, partial=partial)
    if mla.q_rank:
        yield LocalParam(query * mla.q_rank)
    yield LocalParam(heads * (mla.nope_head_dim + mla.v_head_dim) * mla.kv_rank)
    yield LocalParam(hidden * heads * mla.v_head_dim)
