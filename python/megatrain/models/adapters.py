"""Low-rank adapters of linear layers.

An adapter belongs to one parameter of a layer and adds to the result of its product, so that result
keeps its state: whole, split over tp, or a part of a sum over tp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megacore.moe.expert_adapters import ExpertAdapters, ExpertPart
from megacore.ops.counter_random import key_of
from megacore.ops.dropout import counter_dropout, keep_mask
from megacore.ops.low_rank import LowRankParts, add_low_rank, low_rank_sum
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.param_info import ParamInfo
from megatrain.config.lora import LoraConfig
from megatrain.models.adapter_infos import Projection, projections_of
from megatrain.models.dropout import current_batch
from megatrain.models.init import ParamFactory
from megatrain.models.mappings import Region


class InputDropout(nn.Module):
    """Dropout on the input of a layer's adapters, by the tokens of `current_batch`.

    Args:
        base: Description of the layer's parameter.
        p: Dropout probability.
        seed: Seed of the run.
        region: Its tensor-parallel region.
        inside: Whether the input is inside of the region.
    """

    def __init__(self, base: ParamInfo, p: float, seed: int, region: Region, inside: bool) -> None:
        super().__init__()
        self.p, self.region, self.inside = p, region, inside
        self.splits_inputs = base.tp_dim == len(base.full_shape) - 1
        self.use = f"dropout|{seed}|{{step}}|{base.name}"

    @property
    def random_uses(self) -> tuple[str, ...]:
        """Random-number uses, as in `StepKeys`."""
        return (self.use,)

    def forward(self, x_SBK: Tensor) -> Tensor:
        """Apply dropout to ``(S, B, K)``; off in eval mode."""
        if not self.training:
            return x_SBK
        batch, region = current_batch(), self.region
        if batch.keys is None:
            key: int | Tensor = key_of(self.use.format(step=batch.step))
        else:
            key = batch.keys.of(self.use)
        num_tokens, width = x_SBK.shape[0], x_SBK.shape[2]
        if self.inside:
            positions_S = region.share_positions(num_tokens * region.cp.size, device=x_SBK.device)
        else:
            positions_S = region.positions(num_tokens, device=x_SBK.device)
        first = region.group.position * width if self.splits_inputs else 0
        if first == 0:
            return counter_dropout(x_SBK, batch.sample_ids, positions_S, key=key, p=self.p)
        keep_SBK = keep_mask(
            key,
            p=self.p,
            sample_ids_B=batch.sample_ids,
            positions_S=positions_S,
            num_features=width,
            first_feature=first,
        )
        return x_SBK * (keep_SBK * (1.0 / (1.0 - self.p))).to(x_SBK.dtype)


class Adapter(nn.Module):
    """The adapters of the projections of one parameter of a linear layer.

    With DoRA, the rows of the sum of weight and adapter are scaled to norms that are trained.

    Args:
        base: Description of the parameter.
        weight: The parameter, which stays with its layer.
        infos: Descriptions of its adapters.
        lora: The ``[lora]`` section.
        params: Factory of the parameters.
        dropout: Dropout on the input.

    Source:
        LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353.
    """

    def __init__(
        self,
        base: ParamInfo,
        weight: nn.Parameter,
        infos: Mapping[str, ParamInfo],
        *,
        lora: LoraConfig,
        params: ParamFactory,
        dropout: InputDropout | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.dropout = lora.scale, dropout
        params = replace(params, initialize=True)  # weights of a base have no adapters
        every = projections_of(base)
        taken = [each for each in every if f"{each.name}.lora_a" in infos]
        self._splits_inputs = base.tp_dim == len(base.full_shape) - 1
        self._tp = params.tp
        splits_rows = base.tp_dim is not None and not self._splits_inputs
        self.parts = place_parts(every, taken, params.tp.size if splits_rows else 1)
        # Not registered: it is a parameter of the layer.
        self._weight = (weight,)
        self._names = [each.name.rpartition(".")[2] for each in taken]
        self.has_magnitude = lora.dora
        for name, each in zip(self._names, taken, strict=True):
            first = _first_factor(infos[f"{each.name}.lora_a"], lora, params)
            # Parameters of this module itself, whose calls are the uses of its parameters.
            self.register_parameter(f"{name}_a", first)
            self.register_parameter(f"{name}_b", params.zeros(infos[f"{each.name}.lora_b"]))
            if lora.dora:
                magnitude = params.ones(infos[f"{each.name}.lora_magnitude"])
                self.register_parameter(f"{name}_magnitude", magnitude)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapters of ``x``, ``(..., K)``, to the result of the layer, ``(..., N)``."""
        a, b = self._tensors("a"), self._tensors("b")
        x = x if self.dropout is None else self.dropout(x)
        y = add_low_rank(y, x, a, b, parts=self.parts, scale=self.scale)
        return (y * self._factor_N()).to(y.dtype) if self.has_magnitude else y

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return this rank's part of the weight with its adapters, ``(N, K)``, in its dtype."""
        whole_NK = self._sum_NK()
        if self.has_magnitude:
            whole_NK = whole_NK * self._factor_N()[:, None]
        return whole_NK.to(self._weight[0].dtype)

    @torch.no_grad()
    def start_magnitudes(self) -> None:
        """Set the norms of DoRA to those of the rows of the weight. Collective over tp."""
        if self.has_magnitude:
            for norms, magnitude in zip(self._norms(), self._tensors("magnitude"), strict=True):
                magnitude.copy_(norms)

    def _factor_N(self) -> Tensor:
        """Return the factor on each output feature: its trained norm over its norm."""
        magnitudes, norms = self._tensors("magnitude"), self._norms()
        pairs = zip(magnitudes, norms, strict=True)
        return self.parts.joined_rows([trained / norm for trained, norm in pairs], fill=1.0)

    @torch.no_grad()
    def _norms(self) -> list[Tensor]:
        """Return the norms of the rows of weight and adapters of each part, without gradients."""
        squares_N = self._sum_NK().square().sum(1)
        if self._splits_inputs:
            all_reduce_(squares_N, self._tp)
        return self.parts.rows(squares_N.sqrt())

    def _sum_NK(self) -> Tensor:
        """Return the sum of this rank's part of the weight and its adapters."""
        a, b = torch.cat(self._tensors("a")), self.parts.joined(self._tensors("b"))
        return low_rank_sum(self._weight[0].detach().flatten(0, -2), a, b, scale=self.scale)

    def _tensors(self, kind: str) -> list[Tensor]:
        return [getattr(self, f"{name}_{kind}") for name in self._names]


def make_expert_adapters(
    bases: Mapping[int, ParamInfo],
    infos: Mapping[str, ParamInfo],
    *,
    lora: LoraConfig,
    params: ParamFactory,
) -> ExpertAdapters | None:
    """Make the adapters of the experts of a rank; ``None`` without targets.

    Args:
        bases: Descriptions of the weights of each projection.
        infos: Descriptions of the parameters of the block, with those of adapters.
        lora: The ``[lora]`` section.
        params: Factory of the parameters.
    """
    params = replace(params, initialize=True)  # weights of a base have no adapters
    parts, places = {}, {}
    for projection, base in bases.items():
        every = projections_of(base)
        taken = [each for each in every if f"{each.name}.lora_a" in infos]
        if not taken:
            continue
        splits_rows = base.tp_dim != len(base.full_shape) - 1
        places[projection] = place_parts(every, taken, params.etp.size if splits_rows else 1)
        parts[projection] = [
            ExpertPart(
                a=_first_factor(infos[f"{each.name}.lora_a"], lora, params),
                b=params.experts(infos[f"{each.name}.lora_b"], std=0.0),
            )
            for each in taken
        ]
    return ExpertAdapters(parts, places=places, scale=lora.scale) if parts else None


def place_parts(
    every: Sequence[Projection], taken: Sequence[Projection], tp_size: int
) -> LowRankParts:
    """Place projections with adapters among the output features of a tp rank.

    Args:
        every: All projections of a parameter.
        taken: Those with adapters.
        tp_size: Ranks that split its output features.

    Example:
        >>> q, k, v = (Projection(name=name, rows=rows, groups=2) for name, rows in
        ...            (("q", 8), ("k", 4), ("v", 4)))
        >>> place_parts((q, k, v), (q, v), 1)
        LowRankParts(starts=(0, 6), widths=(4, 2), group_width=8, num_groups=2)
    """
    groups = every[0].groups
    num_groups = groups // tp_size if groups > 1 else 1
    places, first = {}, 0
    for each in every:
        width = each.rows // (num_groups * tp_size)
        places[each.name] = first, width
        first += width
    return LowRankParts(
        starts=tuple(places[each.name][0] for each in taken),
        widths=tuple(places[each.name][1] for each in taken),
        group_width=first,
        num_groups=num_groups,
    )


def _first_factor(info: ParamInfo, lora: LoraConfig, params: ParamFactory) -> nn.Parameter:
    """Draw A with a bound of ``K ** -0.5``, or with a standard deviation of ``1 / rank``."""
    make = params.experts if info.expert else params.normal
    if lora.init == "gaussian":
        return make(info, std=1.0 / (lora.rank or 1))
    return make(info, std=(3 * info.full_shape[-1]) ** -0.5, uniform=True)
