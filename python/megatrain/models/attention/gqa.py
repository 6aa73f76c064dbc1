"""Causal grouped-query attention with rotary positions.

Shapes: S sequence, B batch, H hidden, D head dimension, G heads of keys and values of this rank,
N query heads of this rank (a multiple of G).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacore.ops.dense import wide_dtype
from megacore.ops.rotation import split_and_rotate
from megacore.parallel.batch import Documents
from megatrain.models.attention.blockwise import ScoreRule
from megatrain.models.attention.context_parallel import Masks, causal_attention
from megatrain.models.attention.kv_cache import Past
from megatrain.models.layers import ColumnLinear, ModelContext, RowLinear, make_qk_norm


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
        self.cp_comm = context.region.cp_comm
        window, is_chunk = config.window_of(layer), config.window_type == "chunk"
        self.chunk = window if is_chunk else None
        self.rule = ScoreRule(
            window=None if is_chunk else window,
            softcap=config.attention_softcap,
            scale=config.attention_scale,
        )
        infos = context.infos.gqa(name)
        self.qkv = ColumnLinear.of(infos, f"{name}.qkv", context=context)
        self.output = RowLinear.of(infos, f"{name}.output", context=context)
        self.qk_norm = make_qk_norm(name, layer, context)
        self.scaling = config.query_scaling if config.scales_queries(layer) else None
        self.region = context.region
        sinks = infos.get(f"{name}.sinks")
        self.sinks = None if sinks is None else context.params.zeros(sinks)
        # Set while a text is generated.
        self.past: Past | None = None

    def forward(
        self, qkv_SBX: Tensor, rotary: tuple[Tensor, Tensor], documents: Documents | None = None
    ) -> Tensor:
        """Compute causal attention and the output projection.

        Args:
            qkv_SBX: Output of the layer ``qkv`` for ``(S[/tp], B, H)``.
            rotary: Cosines and sines at the positions of these tokens, at least ``(S, R/2)`` each,
                for R rotated elements of a head.
            documents: Documents; attention does not cross their boundaries.

        Returns:
            ``(S[/tp], B, H)``.
        """
        qkv_SBGX = qkv_SBX.view(*qkv_SBX.shape[:2], self.num_local_groups, -1)
        if self.qk_norm is None:
            q_SBND, k_SBGD, v_SBGD = split_and_rotate(qkv_SBGX, *rotary, head_dim=self.head_dim)
        else:
            q_SBND, k_SBGD, v_SBGD = self.qk_norm(qkv_SBGX, rotary)
        if self.scaling is not None:
            q_SBND = self._scaled(q_SBND, documents)
        if self.past is not None:
            k_SBGD, v_SBGD = self.past.extend(torch.stack((k_SBGD, v_SBGD), 1)).unbind(1)
        mixed_SBND = causal_attention(
            q_SBND,
            k_SBGD,
            v_SBGD,
            group=self.cp,
            grouped=self.grouped,
            masks=self.masks,
            rule=self.rule,
            chunk=self.chunk,
            sinks=None if self.sinks is None else self.sinks.flatten(),
            documents=documents,
            comm=self.cp_comm,
        )
        output: Tensor = self.output(mixed_SBND.flatten(2))
        return output

    def _scaled(self, q_SBND: Tensor, documents: Documents | None) -> Tensor:
        """Multiply queries by the factor of ``model.query_scaling`` at their positions."""
        assert self.scaling is not None
        if documents is not None:
            positions = self.region.share(documents.positions).t()
        else:
            length, before = q_SBND.shape[0], 0 if self.past is None else len(self.past)
            device = q_SBND.device
            positions = self.region.share_positions(length * self.cp.size, device=device)[:, None]
            positions = before + positions
        steps = (positions + self.scaling.shift) // self.scaling.length
        factor = 1 + self.scaling.beta * torch.log1p(steps.to(wide_dtype(q_SBND)))
        return (q_SBND * factor[..., None, None]).to(q_SBND.dtype)
