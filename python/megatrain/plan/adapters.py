"""Bytes of the low-rank adapters of a layer on a rank, for predictions. Without torch."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.plan.adapter_shapes import AdapterShape
from megatrain.plan.spec import ModelSpec, RunSpec

# Adapters, and the products of those of dense layers, are float32.
WIDE = 4


def adapter_params(adapters: Sequence[AdapterShape], spec: RunSpec) -> tuple[float, float]:
    """Count the parameters of adapters on a rank: those of all ranks' data, and of experts."""
    dense = sum(each.numel(spec.tp, spec.etp) for each in adapters if not each.experts)
    return dense, sum(each.numel(spec.tp, spec.etp) * each.experts / spec.ep for each in adapters)


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
            WIDE * each.numel(spec.tp, spec.etp) * (each.experts / spec.ep + spec.slots)
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
    widest = max(
        (each.sizes(spec.tp, spec.etp)[1] for each in adapters if not each.experts), default=0.0
    )
    return (spec.width + WIDE - spec.width / 2) * widest
