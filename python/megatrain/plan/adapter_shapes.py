"""Shapes of the low-rank adapters of a layer, for predictions. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megacore.parallel.param_info import ParamInfo
from megatrain.models.adapter_infos import projections_of


@dataclass(frozen=True, kw_only=True)
class AdapterShape:
    """Adapters of the projections of one parameter, whose first factors are one product.

    Attributes:
        rank: Sum of their ranks.
        inputs: Input features.
        outputs: Output features of the parameter.
        adapted: Output features with an adapter, each counted with its rank.
        experts: Number of experts; 0 outside of experts.
        splits_inputs: Whether tensor parallelism splits the inputs.
        splits_outputs: Whether it splits the outputs.
        has_norms: Whether the norms of rows are trained (DoRA).
    """

    rank: int
    inputs: int
    outputs: int
    adapted: int
    experts: int
    splits_inputs: bool
    splits_outputs: bool
    has_norms: bool

    @classmethod
    def of(cls, infos: Mapping[str, ParamInfo]) -> tuple[AdapterShape, ...]:
        """Find the adapters of the parameters of a layer."""
        found = []
        for info in infos.values():
            if info.wide or info.matrices is None:
                continue
            a = {
                each: infos[f"{each.name}.lora_a"]
                for each in projections_of(info)
                if f"{each.name}.lora_a" in infos
            }
            if a:
                shape = info.full_shape[1:] if info.expert else info.full_shape
                ranks = {each: own.full_shape[-2] for each, own in a.items()}
                splits_inputs = info.tp_dim == len(info.full_shape) - 1
                found.append(
                    cls(
                        rank=sum(ranks.values()),
                        inputs=shape[-1],
                        outputs=math.prod(shape[:-1]),
                        adapted=sum(each.rows * rank for each, rank in ranks.items()),
                        experts=info.full_shape[0] if info.expert else 0,
                        splits_inputs=splits_inputs,
                        splits_outputs=info.tp_dim is not None and not splits_inputs,
                        has_norms=any(f"{each.name}.lora_magnitude" in infos for each in a),
                    )
                )
        return tuple(found)

    def sizes(self, tp: int, etp: int) -> tuple[float, float]:
        """Return the input and output features on a rank; ``etp`` is the ``tp`` of experts."""
        shards = etp if self.experts else tp
        return (
            self.inputs / (shards if self.splits_inputs else 1),
            self.outputs / (shards if self.splits_outputs else 1),
        )

    def numel(self, tp: int, etp: int) -> float:
        """Count the parameters on a rank, of an expert."""
        inputs, outputs = self.sizes(tp, etp)
        return self.rank * inputs + self.adapted * outputs / self.outputs
