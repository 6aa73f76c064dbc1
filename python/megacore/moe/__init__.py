"""Mixture of experts: routers, dispatchers, layers and cloning of hot experts (ECHO).

Names are imported on first use; options and planning do not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import lazy_names
from megacore.moe.options import EchoOptions, RouterOptions

if TYPE_CHECKING:
    from megacore.moe.balance import RouterGroups
    from megacore.moe.dispatchers import (
        AllGatherDispatcher,
        AllToAllDispatcher,
        Dispatcher,
        ExpertPlacement,
        LocalDispatcher,
        StaticDispatcher,
    )
    from megacore.moe.echo.device_plan import DevicePlan, plan_offload_on_device
    from megacore.moe.echo.plan import OffloadPlan, plan_offload
    from megacore.moe.echo.reroute import reroute_tokens
    from megacore.moe.experts import GroupedExperts
    from megacore.moe.layer import MoELayer
    from megacore.moe.router import (
        RoutingResult,
        TokenNames,
        TopKRouter,
        update_expert_biases,
    )

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "DevicePlan",
    "Dispatcher",
    "EchoOptions",
    "ExpertPlacement",
    "GroupedExperts",
    "LocalDispatcher",
    "MoELayer",
    "OffloadPlan",
    "RouterGroups",
    "RouterOptions",
    "RoutingResult",
    "StaticDispatcher",
    "TokenNames",
    "TopKRouter",
    "plan_offload",
    "plan_offload_on_device",
    "reroute_tokens",
    "update_expert_biases",
]

_MODULES = {
    "AllGatherDispatcher": "dispatchers",
    "AllToAllDispatcher": "dispatchers",
    "DevicePlan": "echo.device_plan",
    "Dispatcher": "dispatchers",
    "ExpertPlacement": "dispatchers",
    "GroupedExperts": "experts",
    "LocalDispatcher": "dispatchers",
    "MoELayer": "layer",
    "OffloadPlan": "echo.plan",
    "RouterGroups": "balance",
    "RoutingResult": "router",
    "StaticDispatcher": "dispatchers",
    "TokenNames": "router",
    "TopKRouter": "router",
    "plan_offload": "echo.plan",
    "plan_offload_on_device": "echo.device_plan",
    "reroute_tokens": "echo.reroute",
    "update_expert_biases": "router",
}

__getattr__ = lazy_names(__name__, _MODULES)
