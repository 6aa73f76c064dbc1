"""Background save: staging copy of the state, and a separate process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.optim import ParamPiece
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.host.shared_memory import meminfo
from megacore.parallel.process_groups import ProcessGroups
from megatrain.checkpoint.agreement import PATIENCE, gather_results, on_rank_0
from megatrain.checkpoint.chunks import Chunk, ChunkId, chunks_of
from megatrain.checkpoint.planner import HeldChunks, written_chunks

# A rank that writes more saves in the background by default.
MIN_BACKGROUND_BYTES = 1 << 30


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


def choose_background(
    pieces: Sequence[ParamPiece], groups: ProcessGroups, *, ranks_per_host: int
) -> tuple[bool, tuple[str, ...]]:
    """Decide whether saves run in the background: a save of little data is not worth the copies.

    Collective.

    Args:
        pieces: Pieces of this rank.
        groups: Process groups of this rank.
        ranks_per_host: Ranks of this host, each with a copy of what it writes.

    Returns:
        The same decision on every rank; a note if the memory of a host decided.
    """
    own = [piece for piece in pieces if not piece.info.is_shared_copy]
    num_bytes = sum(chunk.tensor.nbytes for chunk in written_chunks(chunks_of(own, groups)))
    available = meminfo().get("MemAvailable", 0)
    found = gather_results(lambda: (num_bytes, num_bytes * ranks_per_host, available), groups)

    def decide() -> tuple[bool, tuple[str, ...]]:
        if max(num_bytes for num_bytes, _, _ in found) <= MIN_BACKGROUND_BYTES:
            return False, ()
        for rank, (_, copies, available) in enumerate(found):
            if 2 * copies > available:
                return False, (
                    f"checkpoints are written while training waits: copies of {copies / 1e9:,.1f} "
                    f"GB would take more than half of the {available / 1e9:,.1f} GB of memory "
                    f"available on the host of rank {rank}; checkpoint.async = true makes them "
                    "anyway",
                )
        return True, ()

    return on_rank_0(decide, groups)


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
