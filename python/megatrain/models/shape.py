"""Sizes of a GPT with derived values, and checks of tensor-parallel layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megacore.errors import ConfigError
from megatrain.config import ModelConfig
from megatrain.config.base import nearest_divisors, require_section

# Float32 logits of a microbatch above this many bytes are computed in blocks.
WHOLE_BYTES = 256 << 20
# Float32 logits of a block, unless this would make the products narrow.
BLOCK_BYTES = 64 << 20
_MIN_COLUMNS = 1024
_COLUMN_UNIT = 128


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """Sizes of the whole model, the same for every layout.

    Attributes:
        num_rotated: Rotated elements of a head.
        rope_head_dim: Rotated elements of a head with latent attention; 0 without.

    Example:
        >>> config = ModelConfig(num_kv_heads=2, ffn_hidden_size=384, vocab_size=300)
        >>> shape = GPTShape.from_config(config)
        >>> shape.head_dim, shape.q_per_kv, shape.padded_vocab
        (32, 2, 384)
    """

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    padded_vocab: int
    seq_length: int
    tie_embeddings: bool
    num_rotated: int = 0
    rope_head_dim: int = 0

    @classmethod
    def from_config(cls, config: ModelConfig) -> GPTShape:
        """Take the sizes from a ``[model]`` section.

        Raises:
            TypeError: If ``config`` is not a ``ModelConfig``.
            ConfigError: If ``vocab_size`` is not set, or ``padding_idx`` is not below it.
        """
        require_section(config, ModelConfig, "config")
        padded_vocab = config.padded_vocab_size
        vocab, padding = config.vocab_size or padded_vocab, config.padding_idx
        if padding is not None and padding >= vocab:
            raise ConfigError(
                f"model.padding_idx must be a token below model.vocab_size = {vocab}, got "
                f"{padding}; nearest: {vocab - 1}"
            )
        return cls(
            hidden=config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads or config.num_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_heads,
            ffn=config.ffn_hidden_size or config.default_ffn_hidden_size,
            vocab=vocab,
            padded_vocab=padded_vocab,
            seq_length=config.seq_length,
            tie_embeddings=config.tie_embeddings,
            num_rotated=config.num_rotated,
            rope_head_dim=config.mla.rope_head_dim if config.mla.kv_rank else 0,
        )

    @property
    def q_per_kv(self) -> int:
        """Number of query heads per head of keys and values."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_full_shape(self) -> tuple[int, int, int]:
        """``(num_kv_heads, (q_per_kv + 2) * head_dim, hidden)``, heads ordered ``q.. k v``."""
        return (self.num_kv_heads, (self.q_per_kv + 2) * self.head_dim, self.hidden)

    def shard(self, tp: int) -> GPTShape:
        """Return the sizes of a tp rank's part of heads and vocabulary."""
        return replace(
            self,
            num_heads=self.num_heads // tp,
            num_kv_heads=self.num_kv_heads // tp,
            padded_vocab=self.padded_vocab // tp,
        )

    def check_layout(self, *, tp: int, sequence_parallel: bool) -> None:
        """Check that the tensor-parallel size divides all split dimensions.

        Raises:
            ConfigError: If not, with every size that ``tp`` does not divide, and the nearest legal
            tp.
        """
        broken = [
            f"{name} = {size} (nearest tp: {nearest_divisors(tp, size)})"
            for name, size in self._split_sizes(sequence_parallel)
            if size % tp
        ]
        if broken:
            raise ConfigError(
                f"parallel.tp = {tp} must divide the sizes it splits, but not {', '.join(broken)}"
            )

    def _split_sizes(self, sequence_parallel: bool) -> Iterator[tuple[str, int]]:
        yield "model.num_heads", self.num_heads
        if not self.rope_head_dim:
            yield "model.num_kv_heads", self.num_kv_heads
        yield "model.ffn_hidden_size", self.ffn
        yield "the padded vocabulary", self.padded_vocab
        if sequence_parallel:
            yield "model.seq_length", self.seq_length


def block_columns(tokens: int, rows: int) -> int | None:
    """Return the columns of a block, or ``None`` where the whole logits are small.

    Args:
        tokens: Tokens of a microbatch on this rank, N.
        rows: Rows of this rank's part of the padded vocabulary, so that tp ranks agree.

    Example:
        >>> block_columns(4096, 131072), block_columns(4096, 8192)
        (4096, None)
    """
    if rows <= _MIN_COLUMNS or 4 * tokens * rows <= WHOLE_BYTES:
        return None
    return max(_MIN_COLUMNS, BLOCK_BYTES // (4 * tokens) // _COLUMN_UNIT * _COLUMN_UNIT)
