"""How tokens reach the ranks of their experts: one interface, three ways.

* ``allgather``: all tokens go to all ranks. The host reads one number per layer.
* ``alltoall``: each copy goes to the rank of its expert. The host reads sizes once per layer.
* ``static``: the same in buffers of fixed size. The host reads nothing; copies that a buffer has
  no room for are counted and left out. Rows travel by equal-split all-to-alls
  (``StaticDispatcher``), or are written straight into memory of peers (``PeerDispatcher``).
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
from megacore.moe.dispatchers.exchange import (
    AllToAllDispatcher,
    StaticBudget,
    StaticDispatcher,
    static_receive_rows,
)
from megacore.moe.dispatchers.make import make_peers
from megacore.moe.dispatchers.peer import PeerDispatcher
from megacore.moe.dispatchers.peers import HostPeers, Peers

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "Capacity",
    "DispatchPlan",
    "Dispatcher",
    "ExpertPlacement",
    "ExpertRows",
    "HostPeers",
    "PeerDispatcher",
    "Peers",
    "PendingDispatch",
    "Routing",
    "StaticBudget",
    "StaticDispatcher",
    "make_peers",
    "static_receive_rows",
]
