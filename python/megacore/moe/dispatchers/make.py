"""Choice between peer memory and collectives for a group."""

from __future__ import annotations

from typing import Literal

import torch

from megacore.errors import ConfigError
from megacore.moe.dispatchers.peers import HostPeers, Peers, no_peers
from megacore.moe.dispatchers.symmetric_peers import SymmetricPeers, reason_against
from megacore.parallel.process_groups import Group

Transport = Literal["auto", "collective", "peer"]


def make_peers(
    group: Group, device: torch.device, *, transport: Transport, row_bytes: int
) -> Peers | None:
    """Create the peer memory through which the members of ``group`` exchange rows, if used.

    Args:
        group: The ranks that hold all experts once.
        device: Device of the rows.
        transport: ``debug.static_transport``.
        row_bytes: Size of a row.

    Returns:
        ``None`` for a group of one, and where rows are exchanged by collectives.

    Raises:
        ConfigError: If ``transport`` is ``"peer"`` and the members cannot reach each other's
            memory.

    Sync:
        On CUDA a collective agrees on whether all members can access each other's memory.
    """
    if transport == "collective" or group.size == 1 or device.type not in ("cpu", "cuda"):
        return None
    if device.type == "cuda":
        note = reason_against(group, device)
        if not note:
            return SymmetricPeers(group, device, row_bytes=row_bytes)
    elif group.host is not None:
        return HostPeers(group, row_bytes=row_bytes)
    else:
        note = group.describe()
    if transport == "peer":
        raise ConfigError(no_peers(note))
    return None
