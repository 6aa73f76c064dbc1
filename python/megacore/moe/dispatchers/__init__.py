"""Token dispatchers: one interface, three exchange strategies.

* ``allgather``: all tokens are sent to all ranks. The host reads one number per layer.
* ``alltoall``: each copy is sent to the rank of its expert. The host reads sizes once per layer.
* ``static``: the same with buffers of fixed size, without host sync. Copies that exceed a buffer
  are counted and dropped. Rows are exchanged by equal-split all-to-alls (``StaticDispatcher``), or
  written directly into peer memory (``PeerDispatcher``).

A rank that has all experts uses ``LocalDispatcher`` for the first two.
"""

from __future__ import annotations

from megacore.moe.dispatchers.all_to_all import (
    AllToAllDispatcher,
    StaticBudget,
    StaticDispatcher,
    static_receive_rows,
)
from megacore.moe.dispatchers.allgather import AllGatherDispatcher
from megacore.moe.dispatchers.base import (
    Dispatcher,
    DispatchPlan,
    ExpertPlacement,
    ExpertRows,
    PendingCombine,
    PendingDispatch,
    Routing,
)
from megacore.moe.dispatchers.capacity import Capacity
from megacore.moe.dispatchers.host_peers import HostPeers
from megacore.moe.dispatchers.local import LocalDispatcher
from megacore.moe.dispatchers.make import make_dispatcher, make_peers
from megacore.moe.dispatchers.peer import PeerDispatcher
from megacore.moe.dispatchers.peer_memory import Peers

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "Capacity",
    "DispatchPlan",
    "Dispatcher",
    "ExpertPlacement",
    "ExpertRows",
    "HostPeers",
    "LocalDispatcher",
    "PeerDispatcher",
    "Peers",
    "PendingCombine",
    "PendingDispatch",
    "Routing",
    "StaticBudget",
    "StaticDispatcher",
    "make_dispatcher",
    "make_peers",
    "static_receive_rows",
]
