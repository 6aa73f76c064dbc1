"""Causal grouped-query attention with rotary positions.

Shapes: S sequence, B batch, H hidden, D head dimension, G heads of keys and values of this rank,
N query heads of this rank (a multiple of G).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacore.models.context_parallel import Masks, ScoreRule, causal_attention
from megacore.models.functional import split_and_rotate
from megacore.models.layers import ColumnLinear, HeadNorm, ModelContext, RowLinear


class Attention(nn.Module):
    """Attention with one column-parallel layer for queries, keys and values.

    A tp rank owns whole heads: a key head and its query heads are on the same rank, so attention
    itself needs no communication over tp. There is no dropout on attention probabilities: its mask
    would have ``S * S`` elements per head, and current models train without it.
    """

    def __init__(self, name: str, layer: int, context: ModelContext) -> None:
        super().__init__()
        shape, config = context.shape, context.config
        self.head_dim = shape.head_dim
        self.num_local_groups = shape.num_kv_heads // context.region.group.size
        self.grouped = shape.q_per_kv > 1
        self.cp, self.masks = context.region.cp, Masks()
        self.rule = ScoreRule(window=config.window_of(layer), softcap=config.attention_softcap)
        self.qkv = ColumnLinear(
            f"{name}.qkv", shape.qkv_full_shape, tp_dim=0, context=context, bias=config.qkv_bias
        )
        width = shape.num_heads * shape.head_dim
        self.output = RowLinear(f"{name}.output", width, context=context, bias=config.output_bias)
        normed = config.qk_norm
        self.q_norm = HeadNorm(f"{name}.q_norm", context) if normed else None
        self.k_norm = HeadNorm(f"{name}.k_norm", context) if normed else None

    def forward(self, qkv_SBX: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Compute causal attention and the output projection.

        Args:
            qkv_SBX: Output of the layer ``qkv`` for ``(S[/tp], B, H)``.
            rotary: Cosines and sines at the positions of these tokens, at least ``(S, R/2)`` each,
                for R rotated elements of a head.

        Returns:
            ``(S[/tp], B, H)``.
        """
        qkv_SBGX = qkv_SBX.view(*qkv_SBX.shape[:2], self.num_local_groups, -1)
        if self.q_norm is not None and self.k_norm is not None:
            heads = qkv_SBGX.view(*qkv_SBGX.shape[:3], -1, self.head_dim)
            q, k = self.q_norm(heads[..., :-2, :]), self.k_norm(heads[..., -2:-1, :])
            qkv_SBGX = torch.cat((q, k, heads[..., -1:, :]), dim=-2).flatten(-2)
        q_SBND, k_SBGD, v_SBGD = split_and_rotate(qkv_SBGX, *rotary, head_dim=self.head_dim)
        mixed_SBND = causal_attention(
            q_SBND,
            k_SBGD,
            v_SBGD,
            group=self.cp,
            grouped=self.grouped,
            masks=self.masks,
            rule=self.rule,
        )
        output: Tensor = self.output(mixed_SBND.flatten(2))
        return output
