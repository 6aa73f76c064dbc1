"""A run before it starts: layout, schedule, memory, all as functions of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import lazy_names

if TYPE_CHECKING:
    from megatrain.plan.compare_run import predicted_tensors
    from megatrain.plan.device import load_device
    from megatrain.plan.forecast import Forecast
    from megatrain.plan.run_plan import RankPlan, RunPlan, plan_run
    from megatrain.plan.spec import ModelSpec, RunSpec

__all__ = [
    "Forecast",
    "ModelSpec",
    "RankPlan",
    "RunPlan",
    "RunSpec",
    "load_device",
    "plan_run",
    "predicted_tensors",
]

# Module of each name: plans and the command line need parts without torch.
_HOMES = {
    "Forecast": "forecast",
    "ModelSpec": "spec",
    "RankPlan": "run_plan",
    "RunPlan": "run_plan",
    "RunSpec": "spec",
    "load_device": "device",
    "plan_run": "run_plan",
    "predicted_tensors": "compare_run",
}

__getattr__ = lazy_names(__name__, _HOMES)
