"""Choice of the dispatcher of a layer, and of peer memory or collectives for a group."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import torch

from megacore.errors import ConfigError
from megacore.moe.dispatchers.all_to_all import (
    AllToAllDispatcher,
    StaticBudget,
    StaticDispatcher,
    static_receive_rows,
)
from megacore.moe.dispatchers.allgather import AllGatherDispatcher
from megacore.moe.dispatchers.base import Dispatcher, ExpertPlacement
from megacore.moe.dispatchers.capacity import Capacity
from megacore.moe.dispatchers.device_peers import SymmetricPeers, reason_against
from megacore.moe.dispatchers.host_peers import HostPeers
from megacore.moe.dispatchers.local import LocalDispatcher
from megacore.moe.dispatchers.peer import PeerDispatcher
from megacore.moe.dispatchers.peer_memory import Peers, no_peers
from megacore.moe.dispatchers.peer_trial import exchange_fault
from megacore.parallel.process_groups import Group

Kind = Literal["allgather", "alltoall", "static"]
Transport = Literal["auto", "collective", "peer"]


def make_dispatcher(
    kind: Kind,
    placement: ExpertPlacement,
    *,
    budget: StaticBudget,
    peers: Peers | None,
    capacity: Capacity | None = None,
    receive_rows: Callable[[int, int], int] | None = None,
) -> Dispatcher:
    """Make a dispatcher.

    Args:
        kind: All-gather; all-to-all of each copy to its rank; or the same in buffers of fixed size,
            without host sync. A group of one exchanges nothing, except with ``static``.
        placement: Experts of each rank, or its experts and slots.
        budget: Buffer size of ``static``.
        peers: Peer memory of ``static``; ``None`` for collectives.
        capacity: Limit of the rows of each expert.
        receive_rows: Rows of a rank for (tokens of a member, copies per token), for ``static``.
            Default: those of the budget and the capacity.
    """
    if kind == "static" and peers is not None:
        if receive_rows is None:
            receive_rows = static_receive_rows(placement, budget, capacity)
        return PeerDispatcher(placement, peers=peers, receive_rows=receive_rows, capacity=capacity)
    if kind == "static":
        return StaticDispatcher(
            placement, budget=budget, receive_rows=receive_rows, capacity=capacity
        )
    if placement.group.size == 1:
        return LocalDispatcher(placement, capacity=capacity)
    if kind == "allgather":
        return AllGatherDispatcher(placement, capacity=capacity)
    return AllToAllDispatcher(placement, capacity=capacity)


def make_peers(
    group: Group, device: torch.device, *, transport: Transport, row_bytes: int
) -> Peers | None:
    """Create the peer memory through which the members of ``group`` exchange rows, if used.

    Args:
        group: The ranks that hold all experts once.
        device: Device of the rows.
        transport: ``moe.static_transport``.
        row_bytes: Size of a row.

    Returns:
        ``None`` for a group of one, and where rows are exchanged by collectives.

    Raises:
        ConfigError: If ``transport`` is ``"peer"`` and the members cannot reach each other's
            memory.

    Sync:
        All members exchange a pattern through the memory, and agree on whether it arrived.
    """
    if transport == "collective" or group.size == 1 or device.type not in ("cpu", "cuda"):
        return None
    peers: Peers | None = None
    if device.type == "cuda":
        note = reason_against(group, device)
        if not note:
            peers = SymmetricPeers(group, device, row_bytes=row_bytes)
    elif group.host is not None:
        peers = HostPeers(group, row_bytes=row_bytes)
    else:
        note = group.describe()
    if peers is not None:
        note = exchange_fault(peers, device)
        if not note:
            return peers
        if transport == "auto":
            text = f"group {group.name} exchanges rows by collectives, not in memory of peers"
            warnings.warn(f"{text}: {note}", stacklevel=2)
    if transport == "peer":
        raise ConfigError(no_peers(note))
    return None
