"""Background save: staging copy of the state, and a separate process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.process_groups import ProcessGroups
from megatrain.checkpoint.agreement import PATIENCE
from megatrain.checkpoint.chunks import Chunk, ChunkId
from megatrain.checkpoint.planner import HeldChunks


def background_groups(groups: ProcessGroups) -> ProcessGroups:
    """Create groups with a separate world group for one background thread per rank. Collective.

    Collectives of two threads on one group could be matched wrongly; a separate gloo group is
    isolated from the others and needs no device.
    """
    if groups.world.handle is None:
        return groups
    handle = dist.new_group(
        list(groups.world.ranks),
        timeout=PATIENCE,
        backend="gloo",
        group_desc="megacore checkpoint",
    )
    calls = groups.world.calls
    world = replace(
        groups.world,
        name="checkpoint",
        handle=handle,
        host=None,
        # Its order is not that of the main thread's calls.
        calls=calls and calls.separate("checkpoint"),
    )
    # Ranks connect at first use, through the store. Connect now, while only one thread per rank
    # uses the store, because two threads could deadlock.
    all_gather_objects(None, world)
    return replace(groups, world=world)


class Staging:
    """Host staging buffers of one rank's part of a checkpoint, reused by every save."""

    def __init__(self) -> None:
        self._buffers: dict[ChunkId, Tensor] = {}

    @torch.no_grad()
    def copy(self, held: HeldChunks, mine: Sequence[Chunk]) -> HeldChunks:
        """Copy the chunks that this rank writes.

        Sync:
            Waits for the device.
        """
        device = torch.device("cpu")
        for chunk in mine:
            values = held.values(chunk.id)
            device = values.device
            if chunk.id not in self._buffers:
                self._buffers[chunk.id] = torch.empty(
                    values.shape, dtype=values.dtype, pin_memory=values.is_cuda
                )
            self._buffers[chunk.id].copy_(values, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return held.over(self._buffers)
