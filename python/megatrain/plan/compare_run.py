"""Comparison of a run with its prediction, and what it teaches the calibration."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from megatrain.config import ResolvedConfig
from megatrain.plan.cost import LayerCosts
from megatrain.plan.device import Device, load_device
from megatrain.plan.footprint import footprints
from megatrain.plan.forecast import forecast
from megatrain.plan.spec_from_config import model_spec_of, run_spec
from megatrain.plan.state import state_bytes
from megatrain.plan.step_time import stage_layers

_ANY_DEVICE = "h100"
_ONCE = ("dp", "optimizer", "host_step")


def compare_with_prediction(
    config: ResolvedConfig,
    world_size: int,
    *,
    calibration: str,
    step_times_s: Sequence[float],
    passes_s: float | None,
    memory_bytes: float | None,
) -> dict[str, Any]:
    """Compare measured times and memory of a run with its prediction.

    Args:
        config: Resolved configuration.
        world_size: Number of ranks.
        calibration: Name of a device, or a calibration file.
        step_times_s: Times of the run's steps; the first ones are left out as warm-up.
        passes_s: Mean over ranks of the time in forward and backward passes of a step.
        memory_bytes: Most bytes allocated on a rank.

    Returns:
        ``predicted`` and ``measured`` numbers with the same keys, and ``most_off``: the key whose
        ratio is farthest from 1.
    """
    found = forecast(
        model_spec_of(config),
        run_spec(config, world_size),
        load_device(calibration),
        state_bytes(config, world_size),
    )
    settled = step_times_s[len(step_times_s) // 3 :]
    busy = found.step.timeline().busy
    predicted: dict[str, float | None] = {
        "step_s": found.step.seconds,
        "passes_s": statistics.fmean(busy),
        "outside_passes_s": sum(found.step.parts.get(kind, 0.0) for kind in _ONCE),
        "memory_bytes": found.fullest.allocated,
    }
    step = statistics.median(settled)
    measured: dict[str, float | None] = {
        "step_s": step,
        "passes_s": passes_s,
        "outside_passes_s": None if passes_s is None else max(0.0, step - passes_s),
        "memory_bytes": memory_bytes,
    }
    if config.parallel.pp > 1:  # waiting for other stages would count as outside of passes
        measured["outside_passes_s"] = None
    ratios = {
        key: value / predicted[key]  # type: ignore[operator]
        for key, value in measured.items()
        if value and predicted[key]
    }
    off = max(ratios, key=lambda key: abs(math.log(ratios[key])))
    return {
        "calibration": calibration,
        "predicted": predicted,
        "measured": measured,
        "most_off": off,
    }


def predicted_tensors(config: ResolvedConfig, world_size: int) -> list[dict[str, float]]:
    """Return the predicted bytes of tensors at the peak, by kind, of each pipeline position.

    Weights, gradients and optimizer state are exact. None of these kinds depends on the device.
    """
    model, spec = model_spec_of(config), run_spec(config, world_size)
    device = load_device(_ANY_DEVICE)
    layers = stage_layers(model, spec, LayerCosts(model, spec, device))
    found = footprints(model, spec, device, layers, state_bytes(config, world_size))
    return [
        {kind: size for kind, size in rank.parts.items() if size and kind != "workspace"}
        for rank in found
    ]


def learned_changes(base: Device, record: dict[str, Any]) -> dict[str, float]:
    """Return constants scaled so that the prediction of a compared run becomes its measurement.

    Passes scale with the rates of products, memory and the host; memory with the workspace.
    """
    predicted, measured = record["predicted"], record["measured"]
    slower = measured["passes_s"] / predicted["passes_s"]
    changes = {
        "peak_clock": base.peak_clock / slower,
        "memory_bound_efficiency": base.memory_bound_efficiency / slower,
        "memory_bound_permute": base.memory_bound_permute / slower,
        "host_layer_ms": base.host_layer_ms * slower,
        "host_moe_alltoall_ms": base.host_moe_alltoall_ms * slower,
    }
    if measured["memory_bytes"]:
        more = measured["memory_bytes"] / predicted["memory_bytes"]
        workspace = (1 + base.memory_workspace) * more - 1
        changes["memory_workspace"] = max(0.0, workspace)
    return changes
