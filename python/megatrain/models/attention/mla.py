"""Multi-head latent attention (MLA): keys and values are projections of a narrow latent.

The latents and the rotated part of the keys are the same on all tp ranks; the projections from the
latents are split by heads. With context parallelism, ranks exchange latents, which are much
narrower than keys and values, and project them on each rank.

Source:
    DeepSeek-V2, arXiv:2405.04434, section 2.1.

Shapes: S sequence, B batch, H hidden, N heads of this rank, C latent of keys and values, L both
latents, R rotated elements of a head, P elements that are not rotated, V elements of a value head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacore.ops.dense import rms_norm
from megacore.ops.rotation import rotate
from megacore.parallel.batch import Documents
from megacore.parallel.param_info import ParamInfo
from megatrain.config import ModelConfig
from megatrain.config.base import letter_of_layer
from megatrain.models.attention.blockwise import ScoreRule
from megatrain.models.attention.context_parallel import Masks, attend, needs_order
from megatrain.models.attention.exchange import gather
from megatrain.models.attention.kv_cache import Past
from megatrain.models.attention.rotary import magnitude
from megatrain.models.layers import ColumnLinear, ModelContext, RowLinear

# As in the published models, which have another epsilon for all other norms.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Attention with a latent for keys and values, and optionally one for queries.

    Args:
        name: Prefix of the parameters' names.
        layer: Global index of the layer.
        context: Construction context.
    """

    def __init__(self, name: str, layer: int, context: ModelContext) -> None:
        super().__init__()
        config, shape, mla = context.config, context.shape, context.config.mla
        self.mla = mla
        self.num_local_heads = shape.num_heads // context.region.group.size
        self.cp, self.masks = context.region.cp, Masks()
        self.rule = ScoreRule(
            window=config.window_of(layer), softcap=config.attention_softcap, scale=_scale(config)
        )
        self.qkv = LatentProjection(name, context)
        infos = context.infos.mla(name)
        self.q_up = None
        if mla.q_rank:
            self.q_up = ColumnLinear.of(infos, f"{name}.q_up", context=context, enters=False)
        self.kv_up = ColumnLinear.of(infos, f"{name}.kv_up", context=context, enters=False)
        self.output = RowLinear.of(infos, f"{name}.output", context=context)
        self.indexer = None
        if mla.index_heads and letter_of_layer(mla.index_pattern, layer) == "f":
            self.indexer = Indexer(name, context)
        # Set while a text is generated.
        self.past: Past | None = None

    def forward(
        self, latent_SBL: Tensor, rotary: tuple[Tensor, Tensor], documents: Documents | None = None
    ) -> Tensor:
        """Compute causal attention and the output projection.

        Args:
            latent_SBL: Output of `qkv` for ``(S[/tp], B, H)``.
            rotary: Cosines and sines at the positions of these tokens, at least ``(S, R/2)`` each.
            documents: Documents; attention does not cross their boundaries.

        Returns:
            ``(S[/tp], B, H)``.
        """
        mla = self.mla
        q_SBX, kv_SBC, k_rot_SBR = self.qkv.enter(latent_SBL)
        if self.q_up is not None:
            q_SBX = self.q_up(q_SBX)
        q_SBNX = q_SBX.view(*q_SBX.shape[:2], self.num_local_heads, -1)
        q_SBNP, q_SBNR = q_SBNX[..., : mla.nope_head_dim], q_SBNX[..., mla.nope_head_dim :]
        q_SBND = torch.cat((q_SBNP, rotate(q_SBNR, *rotary)), dim=-1)
        k_rot_SBR = rotate(k_rot_SBR[:, :, None], *rotary).squeeze(2)
        latent_SBX = torch.cat((kv_SBC, k_rot_SBR), dim=-1)
        if self.past is not None:
            return self._attend_to_latents(q_SBND, self.past.extend(latent_SBX))
        in_order = needs_order(q_SBND, self.rule, None, documents)
        (shared,) = gather((latent_SBX,), self.cp, in_order=in_order)
        kv_SBC, k_rot_SBR = torch.split_with_sizes(shared, self.qkv.widths[1:], dim=-1)
        heads = (self.num_local_heads, mla.nope_head_dim + mla.v_head_dim)
        kv_SBNX = self.kv_up(kv_SBC).view(*kv_SBC.shape[:2], *heads)
        k_SBNP, v_SBNV = kv_SBNX[..., : mla.nope_head_dim], kv_SBNX[..., mla.nope_head_dim :]
        k_rot_SBNR = k_rot_SBR[:, :, None].expand(*k_SBNP.shape[:3], -1)
        mixed_SBNV = attend(
            q_SBND,
            torch.cat((k_SBNP, k_rot_SBNR), dim=-1),
            v_SBNV,
            group=self.cp,
            grouped=False,
            masks=self.masks,
            rule=self.rule,
            documents=documents,
        )
        output: Tensor = self.output(mixed_SBNV.flatten(2))
        return output

    def _attend_to_latents(self, q_SBND: Tensor, shared_TBX: Tensor) -> Tensor:
        """Attend without keys and values of heads, which takes less time for few queries.

        The projection of latents to keys is applied to the queries, that to values to the result.

        Args:
            q_SBND: Queries, rotated.
            shared_TBX: Latents and rotated parts of keys of all tokens so far, ``(T, B, C + R)``.
        """
        mla = self.mla
        up_NXC: Tensor = self.kv_up.weight
        if self.kv_up.adapter is not None:
            up_NXC = self.kv_up.adapter.merged().view(up_NXC.shape)
        q_SBNP, q_SBNR = q_SBND[..., : mla.nope_head_dim], q_SBND[..., mla.nope_head_dim :]
        q_SBNC = torch.einsum("sbnp,npc->sbnc", q_SBNP, up_NXC[:, : mla.nope_head_dim])
        mixed_SBNC = attend(
            torch.cat((q_SBNC, q_SBNR), dim=-1),
            shared_TBX[:, :, None],
            shared_TBX[:, :, None, : mla.kv_rank],
            group=self.cp,
            grouped=True,
            masks=self.masks,
            rule=self.rule,
        )
        mixed_SBNV = torch.einsum("sbnc,nvc->sbnv", mixed_SBNC, up_NXC[:, mla.nope_head_dim :])
        output: Tensor = self.output(mixed_SBNV.flatten(2))
        return output


class Indexer(nn.Module):
    """Weights of the indexer of sparse attention, which are checkpointed but not used or trained.

    Attention to as many tokens as it chooses needs no choice.
    """

    def __init__(self, name: str, context: ModelContext) -> None:
        super().__init__()
        mla, hidden = context.config.mla, context.shape.hidden
        shapes = {
            "q_up": (mla.index_heads * mla.index_head_dim, mla.q_rank),
            "k": (mla.index_head_dim, hidden),
            "k_norm": (mla.index_head_dim,),
            "k_norm_bias": (mla.index_head_dim,),
            "weights": (mla.index_heads, hidden),
        }
        self.infos = {
            part: ParamInfo(
                name=f"{name}.indexer.{part}", full_shape=shape, tp_dim=None, weight_decay=False
            )
            for part, shape in shapes.items()
        }
        params = context.params
        for part, shape in shapes.items():
            zeros = torch.zeros(shape, dtype=params.dtype, device=params.device)
            self.register_buffer(part, zeros)

    def buffer_infos(self) -> list[tuple[ParamInfo, Tensor]]:
        """Return the weights with their descriptions."""
        return [(info, getattr(self, part)) for part, info in self.infos.items()]


class LatentProjection(nn.Module):
    """Projection of the residual stream to latents and the rotated part of the keys.

    With a latent for queries, tp ranks share the work by tokens if they have slices of the
    sequence, and only latents enter the tensor-parallel region. Without one, the residual stream
    enters it, for the queries of this rank's heads.
    """

    def __init__(self, name: str, context: ModelContext) -> None:
        super().__init__()
        mla, params, infos = context.config.mla, context.params, context.infos.mla(name)
        self.region = context.region
        self.linear = context.linear
        self.widths = [mla.q_rank, mla.kv_rank, mla.rope_head_dim]
        self.eps = LATENT_NORM_EPS
        self.has_q_latent = mla.q_rank > 0
        std = context.config.init_std
        self.q_down = self.q_norm = self.q = None
        if self.has_q_latent:
            self.q_down = params.normal(infos[f"{name}.q_down"], std=std)
            self.q_adapter = context.adapter(infos[f"{name}.q_down"], self.q_down, inside=False)
            self.q_norm = params.ones(infos[f"{name}.q_latent_norm"])
        else:
            self.q = params.normal(infos[f"{name}.q"], std=std)
            self.q_adapter = context.adapter(infos[f"{name}.q"], self.q)
        self.kv_down = params.normal(infos[f"{name}.kv_down"], std=std)
        self.kv_adapter = context.adapter(
            infos[f"{name}.kv_down"], self.kv_down, inside=not self.has_q_latent
        )
        self.kv_norm = params.ones(infos[f"{name}.kv_latent_norm"])

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Project ``(S[/tp], B, H)`` to queries or their latent, and the latent of keys and values.

        Both are joined along the last dimension and normalized: ``(S[/tp], B, L + R)`` with a
        latent for queries, else ``(S, B, N * (P + R) + C + R)``.
        """
        if self.q_down is not None and self.q_norm is not None:
            q = rms_norm(self._q(x_SBH, self.q_down), self.q_norm, self.eps)
        else:
            assert self.q is not None
            x_SBH = self.region.enter(x_SBH)
            q = self._q(x_SBH, self.q)
        kv = self.linear(x_SBH, self.kv_down)
        kv = kv if self.kv_adapter is None else self.kv_adapter(x_SBH, kv)
        kv_SBC, k_rot_SBR = torch.split_with_sizes(kv, self.widths[1:], dim=-1)
        return torch.cat((q, rms_norm(kv_SBC, self.kv_norm, self.eps), k_rot_SBR), dim=-1)

    def _q(self, x_SBH: Tensor, weight: Tensor) -> Tensor:
        q = self.linear(x_SBH, weight)
        return q if self.q_adapter is None else self.q_adapter(x_SBH, q)

    def enter(self, joined_SBL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of `forward`, inside the tensor-parallel region.

        Returns:
            The latent of queries, or the queries; the latent of keys and values ``(S, B, C)``; the
            rotated part of keys ``(S, B, R)``, before rotation.
        """
        if self.has_q_latent:
            joined_SBL = self.region.enter(joined_SBL)
        q_width = joined_SBL.shape[-1] - sum(self.widths[1:])
        widths = [q_width, *self.widths[1:]]
        q, kv_SBC, k_rot_SBR = torch.split_with_sizes(joined_SBL, widths, dim=-1)
        return q, kv_SBC, k_rot_SBR


def _scale(config: ModelConfig) -> float:
    """Return the factor on scores; ``yarn`` with ``mscale_all_dim`` raises it."""
    scaling, mla = config.rope_scaling, config.mla
    scale: float = (mla.nope_head_dim + mla.rope_head_dim) ** -0.5
    if scaling.type != "none" and scaling.mscale_all_dim:
        scale *= magnitude(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale
