"""How tokens reach the ranks of their experts: one interface, three ways.

* ``allgather``: all tokens go to all ranks. The host reads one number per layer.
* ``alltoall``: each copy goes to the rank of its expert. The host reads sizes once per layer.
* ``static``: the same in buffers of fixed size. The host reads nothing; copies that a buffer has
  no room for are counted and left out.
"""

from __future__ import annotations

from megacore.moe.dispatchers.allgather import AllGatherDispatcher
from megacore.moe.dispatchers.base import (
    Dispatcher,
    DispatchPlan,
    ExpertPlacement,
    ExpertRows,
    PendingDispatch,
    Routing,
)
from megacore.moe.dispatchers.capacity import Capacity
from megacore.moe.dispatchers.exchange import AllToAllDispatcher, StaticBudget, StaticDispatcher

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "Capacity",
    "DispatchPlan",
    "Dispatcher",
    "ExpertPlacement",
    "ExpertRows",
    "PendingDispatch",
    "Routing",
    "StaticBudget",
    "StaticDispatcher",
]
