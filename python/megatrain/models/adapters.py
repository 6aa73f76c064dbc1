"""Low-rank adapters of linear layers.

An adapter belongs to one parameter of a layer and adds to the result of its product, so that result
keeps its state: whole, split over tp, or a part of a sum over tp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from megacore.ops.low_rank import LowRankParts, add_low_rank
from megacore.parallel.param_info import ParamInfo
from megatrain.config.lora import LoraConfig
from megatrain.models.adapter_infos import Projection, projections_of
from megatrain.models.init import ParamFactory


class Adapter(nn.Module):
    """The adapters of the projections of one parameter of a linear layer.

    Args:
        base: Description of the parameter.
        infos: Descriptions of its adapters.
        lora: The ``[lora]`` section.
        params: Factory of the parameters.
    """

    def __init__(
        self,
        base: ParamInfo,
        infos: Mapping[str, ParamInfo],
        *,
        lora: LoraConfig,
        params: ParamFactory,
    ) -> None:
        super().__init__()
        self.scale = lora.scale
        params = replace(params, initialize=True)  # weights of a base have no adapters
        every = projections_of(base)
        taken = [each for each in every if f"{each.name}.lora_a" in infos]
        splits_rows = base.tp_dim not in (None, len(base.full_shape) - 1)
        self.parts = place_parts(every, taken, params.tp.size if splits_rows else 1)
        self._names = [each.name.rpartition(".")[2] for each in taken]
        for name, each in zip(self._names, taken, strict=True):
            first = _first_factor(infos[f"{each.name}.lora_a"], lora, params)
            # Parameters of this module itself, whose calls are the uses of its parameters.
            self.register_parameter(f"{name}_a", first)
            self.register_parameter(f"{name}_b", params.zeros(infos[f"{each.name}.lora_b"]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapters of ``x``, ``(..., K)``, to the result of the layer, ``(..., N)``."""
        a, b = (self._factors(factor) for factor in "ab")
        return add_low_rank(y, x, a, b, parts=self.parts, scale=self.scale)

    def _factors(self, factor: str) -> list[Tensor]:
        return [getattr(self, f"{name}_{factor}") for name in self._names]


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
    if lora.init == "gaussian":
        return params.normal(info, std=1.0 / (lora.rank or 1))
    return params.normal(info, std=(3 * info.full_shape[-1]) ** -0.5, uniform=True)
