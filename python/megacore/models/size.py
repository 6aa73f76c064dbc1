"""How large a GPT is: parameters, and floating-point operations per token."""

from __future__ import annotations

from dataclasses import dataclass

from megacore.config import ModelConfig
from megacore.models.shape import GPTShape


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of the whole model, padding of the vocabulary included.

    Attributes:
        embedding: The token embedding.
        per_layer: One transformer layer.
        num_layers: Number of layers.
        final_norm: The norm before the output layer.
        head: The output layer; 0 if it is tied to the embedding.
    """

    embedding: int
    per_layer: int
    num_layers: int
    final_norm: int
    head: int

    @property
    def total(self) -> int:
        """All parameters."""
        layers = self.num_layers * self.per_layer
        return self.embedding + layers + self.final_norm + self.head


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the parameters of a resolved ``[model]`` section without making the model.

    Example:
        >>> config = ModelConfig(hidden_size=8, num_heads=2, num_kv_heads=1, ffn_hidden_size=16,
        ...                      num_layers=3, vocab_size=10, vocab_pad_multiple=4)
        >>> count_parameters(config)
        ParameterCount(embedding=96, per_layer=592, num_layers=3, final_norm=8, head=0)
    """
    shape = GPTShape.from_config(config)
    vocab_matrix = shape.padded_vocab * shape.hidden
    return ParameterCount(
        embedding=vocab_matrix,
        per_layer=_layer_matmul_weights(shape) + 2 * shape.hidden,
        num_layers=shape.num_layers,
        final_norm=shape.hidden,
        head=0 if shape.tie_embeddings else vocab_matrix,
    )


def flops_per_token(config: ModelConfig) -> int:
    """Floating-point operations of the matrix products of one token, forward and backward.

    ``6 * W + 6 * L * S * A`` with W the weights that a token is multiplied with (the layers and the
    output layer, without padding; not the embedding, which is a lookup), L layers, S the sequence
    length and A the summed width of the query heads. A product with a weight costs 2 operations in
    the forward and 4 in the backward pass. Attention multiplies a token with the keys and the
    values of the ``S / 2`` tokens that it sees on average: ``2 * A * S`` operations forward,
    twice that backward.

    Source:
        Chowdhery et al., arXiv:2204.02311, appendix B; the attention term is halved here because
        the causal kernel skips the masked half.

    Example:
        >>> config = ModelConfig(num_kv_heads=4, ffn_hidden_size=384, vocab_size=256)
        >>> flops_per_token(config)
        5701632
    """
    shape = GPTShape.from_config(config)
    weights = shape.num_layers * _layer_matmul_weights(shape) + shape.vocab * shape.hidden
    attention = shape.num_layers * shape.seq_length * shape.num_heads * shape.head_dim
    return 6 * (weights + attention)


def _layer_matmul_weights(shape: GPTShape) -> int:
    groups, group_width, hidden = shape.qkv_full_shape
    qkv = groups * group_width * hidden
    output = hidden * shape.num_heads * shape.head_dim
    return qkv + output + 3 * shape.ffn * hidden
