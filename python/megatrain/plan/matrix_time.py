"""Time of an optimizer that computes with whole matrices, on the data-parallel rank with most."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.plan.device import Device
from megatrain.plan.link import link
from megatrain.plan.spec import RunSpec
from megatrain.plan.updates import OwnerWork


def matrix_work(spec: RunSpec, layers: Sequence[int]) -> tuple[OwnerWork, ...]:
    """Return the work with whole matrices of a rank with these layers."""
    if spec.updates is None:
        return ()
    shards = [
        max(1, holders // spec.instances) if spec.zero else 1
        for holders in (spec.dp * spec.cp, spec.edp)
    ]
    return spec.updates.matrix_work(
        layers, sizes=(spec.tp, spec.etp, spec.ep), shards=(shards[0], shards[1])
    )


def matrix_time(spec: RunSpec, device: Device, layers: Sequence[int]) -> float:
    """Predict the time of whole matrices in a step: products, and their exchange.

    Args:
        spec: Layout.
        device: Calibration.
        layers: Layers of the rank.
    """
    total = 0.0
    for work in matrix_work(spec, layers):
        precision = "bf16" if getattr(work.rule, "precision", "float32") == "bfloat16" else "fp32"
        total += work.flops / device.peak(precision)
        stride = min(spec.strides["cp"], spec.strides["dp"])
        holders, stride = (
            (spec.edp, spec.strides["edp"]) if work.is_expert else (spec.dp * spec.cp, stride)
        )
        shards = max(1, holders // spec.instances) if spec.zero else 1
        if shards > 1:
            sent = 2 * 4 * work.numel / shards
            total += sent / link(device, shards, stride).bandwidth
    return total


def matrix_bytes(spec: RunSpec, layers: Sequence[int]) -> float:
    """Predict the most bytes of tensors that a step with whole matrices holds beside the state."""
    return max((work.peak_bytes for work in matrix_work(spec, layers)), default=0.0)
