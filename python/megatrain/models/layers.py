"""Layers with and without tensor parallelism: linear, embedding, norm, dropout.

Shapes: S sequence, B batch, H hidden. With sequence parallelism, tensors outside of tensor-parallel
regions are slices ``(S/tp, B, H)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm

from megacore.moe.dispatchers import Peers, StaticBudget
from megacore.moe.echo.slots import SlotBuffers
from megacore.ops.dense import add_rms_norm, rms_norm, wide_dtype
from megacore.ops.dropout import counter_dropout
from megacore.ops.fp8 import fp8_linear
from megacore.ops.linear import linear
from megacore.ops.normed_rotation import norm_and_rotate
from megacore.ops.rotation import split_and_rotate
from megacore.parallel.batch import Microbatch
from megacore.parallel.param_info import Matrices, ParamInfo
from megacore.parallel.process_groups import ProcessGroups
from megatrain.config import LoraConfig, ModelConfig, MoEConfig
from megatrain.models.adapters import Adapter, InputDropout
from megatrain.models.dropout import DropoutKey, Site, dropout_use
from megatrain.models.init import ParamFactory
from megatrain.models.mappings import Region, copy_to_group, reduce_from_group
from megatrain.models.param_infos import GPTInfos, Infos
from megatrain.models.shape import GPTShape


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """Construction context shared by the layers of one model chunk.

    Attributes:
        config: The ``[model]`` section.
        shape: Derived sizes.
        region: The tp group and whether the sequence is split.
        params: Factory of the parameters.
        moe: The ``[moe]`` section.
        groups: Process groups of this rank.
        budget: Buffer size of the ``static`` dispatcher, shared by all layers.
        slots: Memory for clones of experts, shared by all layers.
        lora: The ``[lora]`` section.
        peers: Peer memory of the ``static`` dispatcher, shared by all layers; ``None``: it uses
            collectives.
        recompute: Activations to recompute in the backward pass: ``"layer"``, or parts of layers
            as in ``train.recompute``.
        fp8: Whether the products of linear layers and experts have 8-bit operands.
        force_balanced: Give all experts the same number of tokens, regardless of scores.
    """

    config: ModelConfig
    shape: GPTShape
    region: Region
    params: ParamFactory
    moe: MoEConfig
    groups: ProcessGroups
    budget: StaticBudget
    slots: SlotBuffers
    lora: LoraConfig
    peers: Peers | None = None
    recompute: frozenset[str] = frozenset()
    fp8: bool = False
    force_balanced: bool = False

    @property
    def infos(self) -> GPTInfos:
        """Descriptions of the parameters of blocks."""
        return GPTInfos(
            config=self.config,
            moe=self.moe,
            shape=self.shape,
            sequence_parallel=self.region.sequence_parallel,
            lora=self.lora,
        )

    def adapter(
        self, info: ParamInfo, weight: nn.Parameter, *, inside: bool = True
    ) -> Adapter | None:
        """Make the adapters of a linear layer's weight; ``None`` if it has no target.

        ``inside`` tells whether its input is inside the tensor-parallel region.
        """
        infos = self.infos.adapters(info)
        if not infos:
            return None
        dropout = None
        if self.lora.dropout > 0.0:
            dropout = InputDropout(info, self.lora.dropout, self.params.seed, self.region, inside)
        return Adapter(info, weight, infos, lora=self.lora, params=self.params, dropout=dropout)

    @property
    def linear(self) -> Callable[..., Tensor]:
        """Function of linear layers: ``(x, weight, bias=None)`` to ``x @ weight.T + bias``.

        It gets the parameter itself, of any shape ``(..., K)``.
        """
        return fp8_linear if self.fp8 else linear

    @property
    def output_std(self) -> float:
        """Standard deviation of projections that write to the residual stream.

        There are two such projections per layer; the factor makes the variance of the stream at the
        end of the model independent of its depth.
        """
        return self.config.init_std / math.sqrt(2 * self.shape.num_layers)


def make_norm(name: str, context: ModelContext) -> RMSNorm | LayerNorm:
    """Make the norm of ``model.norm`` over the last dimension, ``(..., H)`` to the same shape."""
    kind = LayerNorm if context.config.norm == "layernorm" else RMSNorm
    return kind(name, context)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension; the weight is replicated over tp."""

    def __init__(self, name: str, context: ModelContext) -> None:
        super().__init__()
        self.eps, self.plus_one = context.config.norm_eps, context.config.norm_plus_one
        (info,) = context.infos.norm(name).values()
        self.weight = _norm_weight(info, context)

    @overload
    def forward(self, x_SBH: Tensor) -> Tensor: ...
    @overload
    def forward(self, x_SBH: Tensor, added_SBH: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(
        self, x_SBH: Tensor, added_SBH: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize ``(..., H)``; the shape is unchanged.

        With a second tensor, add it first and return the sum and the normalized sum.
        """
        weight = one_more(self.weight) if self.plus_one else self.weight
        if added_SBH is None:
            return rms_norm(x_SBH, weight, self.eps)
        return add_rms_norm(x_SBH, added_SBH, weight, self.eps)


def one_more(weight: Tensor) -> Tensor:
    """Return one plus a weight, in float32 at least, as its small values need.

    In bfloat16, the norms take it with torch operations.
    """
    return 1 + weight.to(wide_dtype(weight))


def _norm_weight(info: ParamInfo, context: ModelContext) -> nn.Parameter:
    """Make a weight of an RMSNorm that scales by one."""
    make = context.params.zeros if context.config.norm_plus_one else context.params.ones
    return make(info)


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension; weight and bias, if any, are replicated over tp."""

    def __init__(self, name: str, context: ModelContext) -> None:
        super().__init__()
        self.eps = context.config.norm_eps
        weight, *bias = context.infos.norm(name, bias=context.config.norm_bias).values()
        self.weight = context.params.ones(weight)
        self.bias = context.params.zeros(bias[0]) if bias else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Normalize ``(..., H)``; the shape is unchanged."""
        return layer_norm(x_SBH, self.weight.shape, self.weight, self.bias, self.eps)


def make_qk_norm(
    name: str, layer: int, context: ModelContext
) -> HeadNorms | WidthNorms | UnitNorms | None:
    """Make the norm of queries and keys of ``model.qk_norm`` for a layer, by its global index.

    The modules take ``(S, B, G, (Q + 2) * D)``, for each of G key heads its Q query heads, the key
    and the value, and return them as `split_and_rotate`, rotated by the tables ``rotary``.
    """
    if context.config.qk_norm == "none":
        return None
    if context.config.qk_norm == "unit":
        is_rotated = context.config.rotation_of(layer) != "none"
        return UnitNorms(context) if is_rotated else None
    kind = WidthNorms if context.config.qk_norm == "full" else HeadNorms
    return kind(name, context)


class HeadNorms(nn.Module):
    """RMSNorm of each head's query and key; one weight for all heads, replicated over tp."""

    def __init__(self, name: str, context: ModelContext) -> None:
        super().__init__()
        config = context.config
        self.eps, self.plus_one = config.norm_eps, config.norm_plus_one
        self.after = config.qk_norm == "head_after"
        self.q_weight, self.k_weight = (
            _norm_weight(info, context) for info in context.infos.qk_norm(name).values()
        )

    def forward(
        self, qkv_SBGX: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize queries and keys, then rotate them, or first rotate; see `make_qk_norm`."""
        q_weight: Tensor = self.q_weight
        k_weight: Tensor = self.k_weight
        if self.plus_one:
            q_weight, k_weight = one_more(q_weight), one_more(k_weight)
        head_dim = len(q_weight)
        if not self.after:
            return norm_and_rotate(
                qkv_SBGX, q_weight, k_weight, *rotary, head_dim=head_dim, eps=self.eps
            )
        q_SBND, k_SBGD, v_SBGD = split_and_rotate(qkv_SBGX, *rotary, head_dim=head_dim)
        return rms_norm(q_SBND, q_weight, self.eps), rms_norm(k_SBGD, k_weight, self.eps), v_SBGD


class UnitNorms(nn.Module):
    """RMSNorm of each head's query and key, without a weight."""

    ones: Tensor

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.eps, device = context.config.norm_eps, context.params.device
        ones = torch.ones(context.shape.head_dim, dtype=context.params.dtype, device=device)
        self.register_buffer("ones", ones, persistent=False)

    def forward(
        self, qkv_SBGX: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize queries and keys, then rotate them; see `make_qk_norm`."""
        return norm_and_rotate(
            qkv_SBGX, self.ones, self.ones, *rotary, head_dim=len(self.ones), eps=self.eps
        )


class WidthNorms(nn.Module):
    """RMSNorm of the queries, and of the keys, of all heads together.

    The sums of squares are over the heads of all tp ranks; each rank has the weights of its heads.
    """

    def __init__(self, name: str, context: ModelContext) -> None:
        super().__init__()
        shape = context.shape
        self.eps, self.group = context.config.norm_eps, context.region.group
        self.head_dim = shape.head_dim
        self.widths = [shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim]
        self.plus_one = context.config.norm_plus_one
        self.q_weight, self.k_weight = (
            _norm_weight(info, context) for info in context.infos.qk_norm(name).values()
        )

    def forward(
        self, qkv_SBGX: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize queries and keys, then rotate them; see `make_qk_norm`."""
        heads = qkv_SBGX.view(*qkv_SBGX.shape[:3], -1, self.head_dim)
        parts = [part.to(wide_dtype(heads)) for part in (heads[..., :-2, :], heads[..., -2:-1, :])]
        squares = torch.stack([part.square().sum((-3, -2, -1)) for part in parts])
        # Ranks use the sum for different heads, so its gradients are summed too.
        squares = copy_to_group(reduce_from_group(squares, self.group), self.group)
        weights: list[Tensor] = [self.q_weight, self.k_weight]
        if self.plus_one:
            weights = [one_more(weight) for weight in weights]
        normed = [
            (part * (total / width + self.eps).rsqrt()[..., None, None, None])
            .mul(weight.view(part.shape[-3:]))
            .to(heads.dtype)
            for part, total, width, weight in zip(parts, squares, self.widths, weights, strict=True)
        ]
        qkv_SBGX = torch.cat((*normed, heads[..., -1:, :]), dim=-2).flatten(-2)
        return split_and_rotate(qkv_SBGX, *rotary, head_dim=self.head_dim)


class ColumnLinear(nn.Module):
    """A linear layer whose output features are split over tp, with a bias if asked for.

    With ``enters=False`` the input is inside the tensor-parallel region already. The weight may
    have several output dimensions, one of which is split. The output is this rank's part with these
    dimensions flattened. ``matrices`` are those of ``ParamInfo``; by default one.
    """

    def __init__(
        self,
        name: str,
        full_shape: tuple[int, ...],
        *,
        tp_dim: int,
        context: ModelContext,
        bias: bool = False,
        enters: bool = True,
        matrices: Matrices | None = None,
    ) -> None:
        super().__init__()
        self.region = context.region
        self.linear = context.linear
        self.enters = enters and context.region.group.size > 1
        infos = context.infos.column(name, full_shape, tp_dim=tp_dim, bias=bias, matrices=matrices)
        self.weight = context.params.normal(infos[name], std=context.config.init_std)
        self.bias = context.params.zeros(infos[f"{name}_bias"]) if bias else None
        self.adapter = context.adapter(infos[name], self.weight)

    @classmethod
    def of(
        cls, infos: Infos, name: str, *, context: ModelContext, enters: bool = True
    ) -> ColumnLinear:
        """Make the layer ``name`` of a described block."""
        info = infos[name]
        assert info.tp_dim is not None
        return cls(
            name,
            info.full_shape,
            tp_dim=info.tp_dim,
            context=context,
            bias=f"{name}_bias" in infos,
            enters=enters,
            matrices=info.matrices,
        )

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Project ``(S[/tp], B, H)`` to ``(S, B, output features / tp)``."""
        bias = None if self.bias is None else self.bias.flatten()
        x_SBH = self.region.enter(x_SBH) if self.enters else x_SBH
        if self.adapter is None:
            return self.linear(x_SBH, self.weight, bias)
        adapted_SBF: Tensor = self.adapter(x_SBH, self.linear(x_SBH, self.weight))
        return adapted_SBF if bias is None else adapted_SBF + bias


class RowLinear(nn.Module):
    """A linear layer whose input features are split over tp, with a bias if asked for."""

    def __init__(
        self, name: str, num_inputs: int, *, context: ModelContext, bias: bool = False
    ) -> None:
        super().__init__()
        self.region = context.region
        self.linear = context.linear
        self.leaves = context.region.group.size > 1
        infos = context.infos.row(name, num_inputs, bias=bias)
        self.weight = context.params.normal(infos[name], std=context.output_std)
        self.bias = context.params.zeros(infos[f"{name}_bias"]) if bias else None
        self.adapter = context.adapter(infos[name], self.weight)

    @classmethod
    def of(cls, infos: Infos, name: str, *, context: ModelContext) -> RowLinear:
        """Make the layer ``name`` of a described block."""
        num_inputs = infos[name].full_shape[1]
        return cls(name, num_inputs, context=context, bias=f"{name}_bias" in infos)

    def forward(self, x_SBF: Tensor) -> Tensor:
        """Project ``(S, B, input features / tp)`` to ``(S[/tp], B, H)``."""
        output_SBH = self.linear(x_SBF, self.weight)
        if self.adapter is not None:
            output_SBH = self.adapter(x_SBF, output_SBH)
        output_SBH = self.region.leave(output_SBH) if self.leaves else output_SBH
        return output_SBH if self.bias is None else output_SBH + self.bias


class VocabEmbedding(nn.Module):
    """Token embedding whose rows, the vocabulary, are split over tp."""

    def __init__(self, weight: nn.Parameter, *, context: ModelContext) -> None:
        super().__init__()
        self.region = context.region
        self.weight = weight
        num_rows = weight.shape[0]
        self.first_row = self.region.group.position * num_rows
        # Rounded, as a tensor of that format would be.
        factor = torch.tensor(context.config.embedding_factor, dtype=weight.dtype)
        self.factor: float = factor.item()
        padding = context.config.padding_idx
        row = -1 if padding is None else padding - self.first_row
        # Row of this rank without gradient.
        self.padding_row = row if 0 <= row < num_rows else None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Embed ``(B, S)`` int64 to ``(S[/tp], B, H)``."""
        tokens_SB = tokens_BS.t()
        if self.region.group.size == 1:
            return self._scaled(embedding(tokens_SB, self.weight, self.padding_row))
        num_rows = self.weight.shape[0]
        rows_SB = tokens_SB - self.first_row
        elsewhere_SB = (rows_SB < 0) | (rows_SB >= num_rows)
        part_SBH = embedding(rows_SB.masked_fill(elsewhere_SB, 0), self.weight, self.padding_row)
        return self._scaled(self.region.leave(part_SBH.masked_fill(elsewhere_SB[..., None], 0.0)))

    def _scaled(self, x_SBH: Tensor) -> Tensor:
        return x_SBH if self.factor == 1.0 else x_SBH * self.factor


class ResidualDropout(nn.Module):
    """Dropout on a tensor before it is added to the residual stream; off in eval mode."""

    def __init__(self, *, layer: int, site: Site, context: ModelContext) -> None:
        super().__init__()
        self.p = context.config.dropout
        self.seed = context.params.seed
        self.layer = layer
        self.site = site
        self.region = context.region

    @property
    def random_uses(self) -> tuple[str, ...]:
        """Random-number uses, as in `StepKeys`."""
        if self.p == 0.0:
            return ()
        return (dropout_use(seed=self.seed, layer=self.layer, site=self.site),)

    def forward(self, x_SBH: Tensor, batch: Microbatch) -> Tensor:
        """Apply dropout to ``(S[/tp], B, H)``; the shape is unchanged."""
        if not self.training or self.p == 0.0:
            return x_SBH
        key: int | Tensor
        if batch.keys is None:
            use = DropoutKey(seed=self.seed, step=batch.step, layer=self.layer, site=self.site)
            key = use.as_int64()
        else:
            key = batch.keys.of(self.random_uses[0])
        positions_S = self.region.positions(x_SBH.shape[0], device=x_SBH.device)
        return counter_dropout(x_SBH, batch.sample_ids, positions_S, key=key, p=self.p)
