"""A transformer of one's own for ``megacore train examples/own_model/train.toml``.

Unlike megacore's GPT it has learned positions, attention and MLP (or experts) in parallel, and a
loss with a penalty on large logits. docs/own-model.md explains the parts.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from megatrain.api import (
    ColumnLinear,
    Embedding,
    Head,
    LossContext,
    Microbatch,
    MoEBlock,
    ResolvedConfig,
    RowLinear,
    StageContext,
    reduce_from_group,
    token_loss,
)


class Attention(nn.Module):
    """Causal attention; each tensor-parallel rank has some of the heads."""

    def __init__(self, name: str, context: StageContext) -> None:
        super().__init__()
        hidden, heads = context.shape.hidden, context.shape.num_heads
        self.num_heads = heads // context.groups.tp.size
        # (heads, q k v of a head, hidden): the heads are split.
        full_shape = (heads, 3 * hidden // heads, hidden)
        self.qkv = ColumnLinear(f"{name}.qkv", full_shape, tp_dim=0, context=context)
        self.output = RowLinear(f"{name}.output", hidden, context=context)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Apply attention: ``(S, B, H)`` to the same shape."""
        qkv = self.qkv(x_SBH).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)
        mixed = scaled_dot_product_attention(*qkv.chunk(3, dim=-1), is_causal=True)
        return self.output(mixed.permute(2, 0, 1, 3).flatten(2))


class Feed(nn.Module):
    """MLP with GELU; each tensor-parallel rank has some of the inner features."""

    def __init__(self, name: str, context: StageContext) -> None:
        super().__init__()
        hidden, inner = context.shape.hidden, context.shape.ffn
        self.up = ColumnLinear(f"{name}.up", (inner, hidden), tp_dim=0, context=context)
        self.down = RowLinear(f"{name}.down", inner, context=context)

    def forward(self, x_SBH: Tensor, _batch: Microbatch) -> Tensor:
        """Apply the MLP: ``(S, B, H)`` to the same shape."""
        return self.down(gelu(self.up(x_SBH)))


class Block(nn.Module):
    """Attention beside an MLP or experts; both read the same normalized stream."""

    def __init__(self, layer: int, context: StageContext) -> None:
        super().__init__()
        name, hidden = f"blocks.{layer}", context.shape.hidden
        self.norm = context.replicated(f"{name}.norm", lambda: nn.LayerNorm(hidden))
        self.attention = Attention(f"{name}.attention", context)
        if context.moe.is_moe_layer(layer):
            self.feed = MoEBlock(f"{name}.moe", layer, context, shared=None)
        else:
            self.feed = Feed(f"{name}.feed", context)

    def forward(self, x_SBH: Tensor, batch: Microbatch) -> Tensor:
        """Add both to the stream: ``(S, B, H)`` to the same shape."""
        normed = self.norm(x_SBH)
        return x_SBH + self.attention(normed) + self.feed(normed, batch)


class Model(nn.Module):
    """One pipeline stage: some blocks, on the first the embedding, on the last the head."""

    def __init__(self, layers: range, context: StageContext) -> None:
        super().__init__()
        hidden, length = context.shape.hidden, context.shape.seq_length
        self.region = context.region
        self.words = self.positions = self.norm = self.head = None
        if context.is_first:
            is_shared = context.shape.tie_embeddings and not context.is_last
            self.words = Embedding(context, is_shared=is_shared)
            self.positions = context.replicated("positions", lambda: nn.Embedding(length, hidden))
        self.blocks = nn.ModuleList(Block(layer, context) for layer in layers)
        if context.is_last:
            self.norm = context.replicated("norm", lambda: nn.LayerNorm(hidden))
            weight = context.tied_weight if self.words is None else self.words.words.weight
            self.head = Head(context, tied_weight=weight)

    def forward(self, hidden: Tensor | None, batch: Microbatch) -> Tensor:
        """Compute ``(S, B, H)`` for the next stage; on the last one this rank's logits."""
        if self.words is not None:
            hidden = self.words(batch)
            places = self.region.positions(hidden.shape[0], device=hidden.device)
            hidden = hidden + 0.02 * self.positions(places)[:, None]
        for block in self.blocks:
            hidden = block(hidden, batch)
        return hidden if self.head is None else self.head.columns(self.norm(hidden))


def build(_config: ResolvedConfig, layers: range, context: StageContext) -> nn.Module:
    """Build one pipeline stage (``model.factory``)."""
    if context.groups.cp.size > 1:
        raise ValueError("parallel.cp must be 1: this attention needs whole sequences")
    return Model(layers, context)


def loss(logits: Tensor, batch: Microbatch, context: LossContext) -> Tensor:
    """Compute the cross entropy and a penalty on large logits (``train.loss``)."""
    squares = reduce_from_group(logits.float().square().sum(-1), context.region.group)
    return token_loss(logits, batch, context) + 1e-4 * squares.mean() / context.vocab
