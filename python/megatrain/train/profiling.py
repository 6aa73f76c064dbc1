"""Profiles of some steps: a trace of torch's profiler per rank, and a snapshot of GPU memory."""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megacore.parallel.collectives import all_gather_objects, barrier
from megacore.parallel.process_groups import Group
from megatrain.files import describe_os_error
from megatrain.view.merged_trace import CLOCK_KEY

FOLDER = "profile"
_ROUNDS = 9


class StepProfiler:
    """Profiler of a range of steps on one rank.

    Args:
        steps: Steps to profile.
        folder: Folder of the run.
        world: All ranks.
        device: Device of this rank.
        settle: Finishes communication that the step has left in flight: gloo's threads record into
            the profile, which must not end before them.
    """

    def __init__(
        self,
        steps: range,
        folder: Path,
        *,
        world: Group,
        device: torch.device,
        settle: Callable[[], None],
    ) -> None:
        self._steps = steps
        self._folder = folder / FOLDER
        self._world = world
        self._device = device
        self._settle = settle
        self._profile: profile | None = None
        self._clock = ""

    def before_step(self, step: int) -> None:
        """Start before the first of the steps. Collective on that step.

        Sync:
            Waits for the device and all ranks on that step.
        """
        if step not in self._steps or self._profile is not None:
            return
        # Its library reports its start and end on standard error by default.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        self._clock = json.dumps(_clock_of_rank(self._world))
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()
        barrier(self._world)

    def after_step(self, step: int) -> str | None:
        """Stop after the last of the steps; returns a note for the user."""
        return self.stop() if step + 1 >= self._steps.stop else None

    def stop(self) -> str | None:
        """Write the files of a profile in progress; returns a note, ``None`` without a profile.

        Collective if there is one.
        """
        if self._profile is None:
            return None
        profiler, self._profile = self._profile, None
        self._settle()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler.add_metadata_json(CLOCK_KEY, self._clock)
        profiler.stop()
        rank = self._world.rank
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"rank_{rank}.json.gz"))
            if self._device.type == "cuda":
                path = self._folder / f"memory_{rank}.pickle"
                torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
                torch.cuda.memory._record_memory_history(enabled=None)
        except OSError as error:
            return f"the profile was not written: {self._folder}: {describe_os_error(error)}"
        return f"profile of rank {rank} in {self._folder}; megacore trace merge joins all ranks"


def _clock_of_rank(world: Group) -> dict[str, object]:
    """Measure the clock of this rank against that of rank 0. Collective.

    Ranks leave a barrier at nearly the same moment; the median over some rounds is the offset.
    Ranks of one kernel share its clock, without an offset.
    """
    times = []
    for _ in range(_ROUNDS):
        barrier(world)
        times.append(time.time_ns())
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
    first_kernel, first_times = all_gather_objects((kernel, times), world)[0]
    offset = statistics.median(a - b for a, b in zip(times, first_times, strict=True))
    return {
        "rank": world.rank,
        "host": socket.gethostname(),
        "offset_us": 0.0 if kernel == first_kernel else offset / 1e3,
    }
