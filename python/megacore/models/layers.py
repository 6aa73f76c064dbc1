"""Layers that tensor parallelism splits, and those it does not: linear, embedding, norm, dropout.

Shapes: S sequence, B batch, H hidden. With sequence parallelism, tensors outside of tensor-parallel
regions are slices ``(S/tp, B, H)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from megacore.config import ModelConfig, MoEConfig
from megacore.models.dropout import DropoutKey, Site, dropout, dropout_use, keep_mask
from megacore.models.functional import rms_norm
from megacore.models.init import ParamFactory
from megacore.models.mappings import Region
from megacore.models.shape import GPTShape
from megacore.moe.dispatchers import Peers, StaticBudget
from megacore.moe.echo.message_exchange import SlotBuffers
from megacore.parallel.batch import Microbatch
from megacore.parallel.params import ParamInfo
from megacore.parallel.process_groups import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """What the layers of one model chunk are built from.

    Attributes:
        config: The ``[model]`` section.
        shape: The same, filled in.
        region: The tp group and whether the sequence is split.
        params: Makes the parameters.
        moe: The ``[moe]`` section.
        groups: Process groups of this rank.
        budget: Size of the ``static`` dispatcher's buffers, one for all layers.
        slots: Memory for clones of experts, one for all layers.
        peers: Memory through which the ``static`` dispatcher reaches other ranks, one for all
            layers; ``None``: it uses collectives.
        recompute: What makes its activations again in the backward pass: ``"layer"``, or parts of
            layers as in ``train.recompute_modules``.
    """

    config: ModelConfig
    shape: GPTShape
    region: Region
    params: ParamFactory
    moe: MoEConfig
    groups: ProcessGroups
    budget: StaticBudget
    slots: SlotBuffers
    peers: Peers | None = None
    recompute: frozenset[str] = frozenset()

    @property
    def output_std(self) -> float:
        """Standard deviation of projections that write to the residual stream.

        There are two per layer; the factor keeps the variance of the stream at the end of the model
        independent of its depth.
        """
        return self.config.init_std / math.sqrt(2 * self.shape.num_layers)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension; every tp rank holds the whole weight."""

    def __init__(self, name: str, context: ModelContext) -> None:
        super().__init__()
        self.eps = context.config.norm_eps
        self.weight = context.params.ones(
            ParamInfo(
                name=name,
                full_shape=(context.shape.hidden,),
                tp_dim=None,
                sequence_parallel=context.region.sequence_parallel,
                weight_decay=False,
            )
        )

    def forward(self, x_SBH: Tensor) -> Tensor:
        """``(..., H)`` to the same shape."""
        return rms_norm(x_SBH, self.weight, self.eps)


class HeadNorm(nn.Module):
    """RMSNorm of each head's vector; one weight for all heads, which tp ranks share."""

    def __init__(self, name: str, context: ModelContext) -> None:
        super().__init__()
        self.eps = context.config.norm_eps
        self.weight = context.params.ones(
            ParamInfo(
                name=name,
                full_shape=(context.shape.head_dim,),
                tp_dim=None,
                # Each tp rank saw its own heads only, so gradients are summed in any case.
                sequence_parallel=True,
                weight_decay=False,
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(..., D)`` to the same shape."""
        return rms_norm(x, self.weight, self.eps)


class ColumnLinear(nn.Module):
    """A linear layer without bias whose output features are split over tp.

    The weight may have several output dimensions, of which one is split; the output has them
    flattened, this rank's part.
    """

    def __init__(
        self, name: str, full_shape: tuple[int, ...], *, tp_dim: int, context: ModelContext
    ) -> None:
        super().__init__()
        self.region = context.region
        self.weight = context.params.normal(
            ParamInfo(name=name, full_shape=full_shape, tp_dim=tp_dim), std=context.config.init_std
        )

    def forward(self, x_SBH: Tensor) -> Tensor:
        """``(S[/tp], B, H)`` to ``(S, B, output features / tp)``."""
        return linear(self.region.enter(x_SBH), self.weight.flatten(0, -2))


class RowLinear(nn.Module):
    """A linear layer without bias whose input features are split over tp."""

    def __init__(self, name: str, num_inputs: int, *, context: ModelContext) -> None:
        super().__init__()
        self.region = context.region
        self.weight = context.params.normal(
            ParamInfo(name=name, full_shape=(context.shape.hidden, num_inputs), tp_dim=1),
            std=context.output_std,
        )

    def forward(self, x_SBF: Tensor) -> Tensor:
        """``(S, B, input features / tp)`` to ``(S[/tp], B, H)``."""
        return self.region.leave(linear(x_SBF, self.weight))


class VocabEmbedding(nn.Module):
    """Token embedding whose rows, the vocabulary, are split over tp."""

    def __init__(self, weight: nn.Parameter, *, context: ModelContext) -> None:
        super().__init__()
        self.region = context.region
        self.weight = weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """``(B, S)`` int64 to ``(S[/tp], B, H)``."""
        tokens_SB = tokens_BS.t()
        if self.region.group.size == 1:
            return embedding(tokens_SB, self.weight)
        num_rows = self.weight.shape[0]
        rows_SB = tokens_SB - self.region.group.position * num_rows
        elsewhere_SB = (rows_SB < 0) | (rows_SB >= num_rows)
        part_SBH = embedding(rows_SB.masked_fill(elsewhere_SB, 0), self.weight)
        return self.region.leave(part_SBH.masked_fill(elsewhere_SB[..., None], 0.0))


class ResidualDropout(nn.Module):
    """Dropout on a tensor that is about to join the residual stream; off in eval mode."""

    def __init__(self, *, layer: int, site: Site, context: ModelContext) -> None:
        super().__init__()
        self.p = context.config.dropout
        self.seed = context.params.seed
        self.layer = layer
        self.site = site
        self.region = context.region

    @property
    def random_uses(self) -> tuple[str, ...]:
        """What it draws random numbers for, in the words of `StepKeys`."""
        if self.p == 0.0:
            return ()
        return (dropout_use(seed=self.seed, layer=self.layer, site=self.site),)

    def forward(self, x_SBH: Tensor, batch: Microbatch) -> Tensor:
        """``(S[/tp], B, H)`` to the same shape."""
        if not self.training or self.p == 0.0:
            return x_SBH
        key: DropoutKey | Tensor
        if batch.keys is None:
            key = DropoutKey(seed=self.seed, step=batch.step, layer=self.layer, site=self.site)
        else:
            key = batch.keys.of(self.random_uses[0])
        keep_SBH = keep_mask(
            key,
            p=self.p,
            sample_ids_B=batch.sample_ids,
            positions_S=self.region.positions(x_SBH.shape[0], device=x_SBH.device),
            num_features=x_SBH.shape[2],
        )
        return dropout(x_SBH, keep_SBH, self.p)
