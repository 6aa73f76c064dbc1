"""A save behind the step: a copy of the state, a thread, and a group for its agreements."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from megacore.checkpoint.planner import ChunkSavePlanner
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.process_groups import ProcessGroups

# The slowest disk decides; a rank that is lost is found by the failure monitor.
_PATIENCE = timedelta(hours=1)
# What a process that ends still grants a save that is nearly done, in seconds.
_GRACE_S = 1.0


def background_groups(groups: ProcessGroups) -> ProcessGroups:
    """The same groups with a world of its own for one background thread per rank. Collective.

    Collectives of two threads on one group would mix; those of an own gloo group do not meet the
    others, and need no device.
    """
    if groups.world.handle is None:
        return groups
    handle = dist.new_group(
        list(groups.world.ranks),
        timeout=_PATIENCE,
        backend="gloo",
        group_desc="megacore checkpoint",
    )
    world = replace(groups.world, name="checkpoint", handle=handle, host=None)
    # Ranks connect at first use, through the store. Now, while one thread uses it: two of each rank
    # could wait for each other.
    all_gather_objects(None, world)
    return replace(groups, world=world)


class Staging:
    """Host memory that holds one rank's part of a checkpoint; made once, used for every save."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, Tensor] = {}

    @torch.no_grad()
    def copy(self, planner: ChunkSavePlanner, plan: SavePlan) -> ChunkSavePlanner:
        """Copy what this rank writes; returns a planner over the copies.

        Sync:
            Waits for the device.
        """
        device = torch.device("cpu")
        for item in plan.items:
            values = planner.resolve_data(item)
            device = values.device
            if item.index not in self._buffers:
                self._buffers[item.index] = torch.empty(
                    values.shape, dtype=values.dtype, pin_memory=values.is_cuda
                )
            self._buffers[item.index].copy_(values, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return planner.over(self._buffers)


class BackgroundTask:
    """An action in a thread that does not keep the process alive.

    Args:
        action: What to do.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="megacore-checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or badly."""
        return not self._thread.is_alive()

    def result(self) -> None:
        """Wait for the end.

        Raises:
            Exception: What the action raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Leave it to itself, after a last moment to get done."""
        self._thread.join(timeout=_GRACE_S)

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:  # shown in the main thread
            self._error = error
