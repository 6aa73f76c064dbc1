"""Low-rank adapters of a layer, for predictions: their sizes, bytes and products. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megacore.parallel.param_info import ParamInfo
from megatrain.models.adapter_infos import projections_of

if TYPE_CHECKING:
    from megatrain.plan.spec import ModelSpec, RunSpec

# Adapters, and the products of those of dense layers, are float32.
WIDE = 4


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

    def sizes(self, spec: RunSpec) -> tuple[float, float]:
        """Return the input and output features on a rank."""
        shards = spec.etp if self.experts else spec.tp
        return (
            self.inputs / (shards if self.splits_inputs else 1),
            self.outputs / (shards if self.splits_outputs else 1),
        )

    def numel(self, spec: RunSpec) -> float:
        """Count the parameters on a rank, of an expert."""
        inputs, outputs = self.sizes(spec)
        return self.rank * inputs + self.adapted * outputs / self.outputs


def adapter_params(adapters: Sequence[AdapterShape], spec: RunSpec) -> tuple[float, float]:
    """Count the parameters of adapters on a rank: those of all ranks' data, and of experts."""
    dense = sum(each.numel(spec) for each in adapters if not each.experts)
    return dense, sum(each.numel(spec) * each.experts / spec.ep for each in adapters)


def kept_bytes(
    adapters: Sequence[AdapterShape], model: ModelSpec, spec: RunSpec
) -> tuple[float, float]:
    """Return the bytes that adapters keep for the backward pass: per token, and in all.

    The results of the first factors; with clones, also the factors of all experts of a rank.
    """
    copies = model.moe.top_k / spec.tp * spec.load(model.moe.num_experts)
    per_token = sum(
        each.rank * (copies * spec.width if each.experts else WIDE) for each in adapters
    )
    factors = 0.0
    if spec.slots:
        factors = sum(
            WIDE * each.numel(spec) * (each.experts / spec.ep + spec.slots)
            for each in adapters
            if each.experts
        )
    return per_token, factors


def adding_bytes(adapters: Sequence[AdapterShape], spec: RunSpec) -> float:
    """Return the bytes per token while an adapter is added to a result of 16 bits.

    The result, the sum in float32, and the rounded sum, of which half again is kept afterwards.
    """
    if spec.width == WIDE:
        return 0.0
    widest = max((each.sizes(spec)[1] for each in adapters if not each.experts), default=0.0)
    return (spec.width + WIDE - spec.width / 2) * widest
