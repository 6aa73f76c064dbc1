"""Model size: number of parameters."""

from __future__ import annotations

from dataclasses import dataclass

from megacore.config import ModelConfig, MoEConfig
from megacore.models.shape import GPTShape


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of the whole model, including the padding of the vocabulary.

    Attributes:
        embedding: The token embedding.
        per_layer: One dense transformer layer.
        num_layers: Number of dense layers.
        final_norm: The norm before the output layer.
        head: The output layer; 0 if it is tied to the embedding.
        per_moe_layer: One MoE layer.
        num_moe_layers: Number of MoE layers.
        per_moe_layer_idle: The experts of one MoE layer that a token is not routed to.
        per_mtp_layer: Parameters of a layer for multi-token prediction besides its transformer
            layer, which is counted with the other layers.
        num_mtp_layers: Number of layers for multi-token prediction.
    """

    embedding: int
    per_layer: int
    num_layers: int
    final_norm: int
    head: int
    per_moe_layer: int = 0
    num_moe_layers: int = 0
    per_moe_layer_idle: int = 0
    per_mtp_layer: int = 0
    num_mtp_layers: int = 0

    @property
    def total(self) -> int:
        """All parameters."""
        layers = self.num_layers * self.per_layer + self.num_moe_layers * self.per_moe_layer
        layers += self.num_mtp_layers * self.per_mtp_layer
        return self.embedding + layers + self.final_norm + self.head

    @property
    def active(self) -> int:
        """Parameters used by one token: without the experts that it is not routed to."""
        return self.total - self.num_moe_layers * self.per_moe_layer_idle


def count_parameters(config: ModelConfig, moe: MoEConfig | None = None) -> ParameterCount:
    """Count the parameters of ``[model]`` and ``[moe]`` sections.

    Example:
        >>> config = ModelConfig(hidden_size=8, num_heads=2, num_kv_heads=1, ffn_hidden_size=16,
        ...                      num_layers=3, vocab_size=10, vocab_pad_multiple=4)
        >>> count_parameters(config).total
        1880
        >>> count = count_parameters(config, MoEConfig(num_experts=4, ffn_hidden_size=16))
        >>> count.total, count.active
        (5432, 3128)
    """
    shape, moe = GPTShape.from_config(config), MoEConfig() if moe is None else moe
    num_layers = config.mtp_layers.stop
    num_moe = len(moe.moe_layers(num_layers))
    vocab_matrix = shape.padded_vocab * shape.hidden
    common = _attention_weights(config, shape) + _small_weights(config, shape)
    return ParameterCount(
        embedding=vocab_matrix,
        per_layer=common + _dense_weights(shape),
        num_layers=num_layers - num_moe,
        final_norm=_norm_size(config),
        head=0 if shape.tie_embeddings else vocab_matrix,
        per_moe_layer=common + _moe_weights(shape, moe, experts=moe.num_experts) if num_moe else 0,
        num_moe_layers=num_moe,
        per_moe_layer_idle=(moe.num_experts - moe.top_k) * _expert_weights(shape, moe)
        if num_moe
        else 0,
        per_mtp_layer=2 * shape.hidden**2 + 3 * _norm_size(config),
        num_mtp_layers=config.num_mtp_layers,
    )


def _attention_weights(config: ModelConfig, shape: GPTShape) -> int:
    if config.mla.kv_rank:
        mla, heads = config.mla, shape.num_heads
        q_width = heads * (mla.nope_head_dim + mla.rope_head_dim)
        q = mla.q_rank * (shape.hidden + q_width) if mla.q_rank else shape.hidden * q_width
        down = shape.hidden * (mla.kv_rank + mla.rope_head_dim)
        up = mla.kv_rank * heads * (mla.nope_head_dim + mla.v_head_dim)
        return q + down + up + heads * mla.v_head_dim * shape.hidden
    groups, group_width, hidden = shape.qkv_full_shape
    qkv = groups * group_width * hidden
    output = hidden * shape.num_heads * shape.head_dim
    return qkv + output


def _dense_weights(shape: GPTShape) -> int:
    return 3 * shape.ffn * shape.hidden


def _expert_weights(shape: GPTShape, moe: MoEConfig) -> int:
    num_matrices, width = (3 if moe.gated else 2), moe.ffn_hidden_size or shape.ffn
    biases = (num_matrices - 1) * width + shape.hidden if moe.biases else 0
    return num_matrices * width * shape.hidden + biases


def _moe_weights(shape: GPTShape, moe: MoEConfig, *, experts: int) -> int:
    """Count the router, ``experts`` experts and the shared expert of one layer."""
    shared = 3 * moe.shared_ffn_hidden_size * shape.hidden + moe.shared_gate * shape.hidden
    router = moe.num_experts * (shape.hidden + moe.biases)
    return router + experts * _expert_weights(shape, moe) + shared


def _small_weights(config: ModelConfig, shape: GPTShape) -> int:
    """Count the norms and biases of one layer."""
    biases = shape.num_heads + 2 * shape.num_kv_heads if config.qkv_bias else 0
    normed = 2 if config.qk_norm is True else shape.num_heads + shape.num_kv_heads
    heads = (biases + normed * bool(config.qk_norm)) * shape.head_dim
    heads += shape.num_heads * config.attention_sinks
    heads += config.mla.q_rank + config.mla.kv_rank
    return 2 * _norm_size(config) + heads + (shape.hidden if config.output_bias else 0)


def _norm_size(config: ModelConfig) -> int:
    return config.hidden_size * (2 if config.norm == "layernorm" else 1)
