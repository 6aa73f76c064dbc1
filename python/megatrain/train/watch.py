"""Speed, memory, time by phase and stragglers of a run, without waiting for the device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from megacore.pipeline import Recompute, Schedule
from megatrain.plan.device import load_device, match_device
from megatrain.plan.layout import train_recompute
from megatrain.plan.spec_from_config import model_spec_of, run_spec
from megatrain.train.memory import memory_bytes
from megatrain.train.step import StepMetrics
from megatrain.train.trainer import Trainer

# Steps between two norms of the weights, and between two searches for the slowest rank.
INTERVAL = 10
_WAITS = ("pipeline_wait", "grad_reduce", "param_gather")
_TIMES = ("data", "pipeline_wait", "grad_reduce", "optimizer", "param_gather")


class RunWatch:
    """Measurements of one rank; those of all ranks arrive with the sums of the next step.

    Args:
        trainer: Training components of this rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        config, self._device = trainer.config, trainer.device
        self._optimizer, self._eager = trainer.optimizer, trainer.eager
        self._world_size = trainer.groups.topology.world_size
        self._tokens = config.train.global_batch_size * config.model.seq_length
        self._flops = self._recomputed = 0.0
        self._peak: float | None = None
        if config.model.factory is None:  # operations of a model of one's own are not known
            spec = model_spec_of(config)
            self._flops = spec.flops_per_token
            again = spec.recomputed_flops_per_token(config.train.recomputed)
            recompute = train_recompute(config.train)
            if again and recompute is not None:
                self._recomputed = again * _recomputed_share(trainer.schedule, recompute)
            calibration = calibration_name(config.run.calibration, self._device)
            self._peak = peak_flops(calibration, run_spec(config, 1).precision)
        kinds = ("allocated", "reserved") if self._device.type == "cuda" else ("resident", "shared")
        self._memory_names = [f"memory_{kind}_bytes" for kind in (*kinds, "peak")]
        # On a GPU the host does not wait; without exchanges there are no waits.
        exchanges = config.moe.num_experts > 0 and trainer.groups.etp_ep.size > 1
        self._calls = trainer.calls if exchanges and self._device.type == "cpu" else None
        self._busy_s = 0.0
        self._busy_of_all = np.zeros(self._world_size)
        self._saving_s = 0.0
        self._has_norm = False

    def before_step(self, step: int) -> None:
        """Report this rank's numbers to all ranks, as part of the sums of the next step."""
        self._has_norm = step % INTERVAL == 0
        if self._calls is not None:
            self._calls.waits.clear()
        squares = self._optimizer.param_square_sum() if self._has_norm else None
        self._eager.report((self._busy_s, *memory_bytes(self._device)), squares)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context of a save: its time is part of the next record."""
        start = time.perf_counter()
        yield
        self._saving_s += time.perf_counter() - start

    def measure(self, step: int, metrics: StepMetrics) -> dict[str, Any]:
        """Return fields of a ``StepRecord``; call it once after each step."""
        seconds, phases = metrics.step_time_s, metrics.phases
        self._busy_s = max(0.0, seconds - sum(phases.get(name, 0.0) for name in _WAITS))
        values = {f"time_{name}_s": phases.get(name, 0.0) for name in _TIMES}
        passes = phases.get("passes", 0.0) - phases.get("pipeline_wait", 0.0)
        values["time_forward_backward_s"] = max(0.0, passes)
        if self._calls is not None:
            values["time_all_to_all_s"] = self._calls.waits["all_to_all"]
        values["time_checkpoint_s"], self._saving_s = self._saving_s, 0.0
        values |= self._speed(self._tokens / seconds)
        memory = metrics.reports[:, 1:4].max(axis=0)
        values |= dict(zip(self._memory_names, map(int, memory), strict=True))
        if self._has_norm:
            values["param_norm"] = math.sqrt(metrics.reports[:, 4].sum())
        return values | self._slowest(step, metrics)

    def _speed(self, tokens_per_s: float) -> dict[str, float]:
        own = tokens_per_s / self._world_size
        found = {"tokens_per_s": tokens_per_s, "tokens_per_s_per_device": own}
        if self._flops:
            found["tflops_per_device"] = own * self._flops / 1e12
        if self._peak:
            found["mfu"] = own * self._flops / self._peak
            if self._recomputed:
                found["hfu"] = own * (self._flops + self._recomputed) / self._peak
        return found

    def _slowest(self, step: int, metrics: StepMetrics) -> dict[str, float]:
        self._busy_of_all += metrics.reports[:, 0]
        if self._world_size == 1 or (step + 1) % INTERVAL:
            return {}
        rank = int(self._busy_of_all.argmax())
        mean = float(self._busy_of_all.mean())
        highest = float(self._busy_of_all[rank])
        self._busy_of_all[:] = 0.0
        return {"slowest_rank": rank, "slowest_rank_ratio": highest / mean} if mean else {}


def peak_flops(calibration: str | None, precision: str) -> float | None:
    """Return the peak of matrix products in a number format; ``None`` if unknown.

    Args:
        calibration: From `calibration_name`.
        precision: Such as ``bf16``.

    Raises:
        ConfigError: If there is no such calibration.
    """
    if calibration is None:
        return None
    return load_device(calibration).peak_flops(precision) or None


def calibration_name(calibration: str | None, device: torch.device) -> str | None:
    """Return ``run.calibration``, or that of the GPU's name; ``None`` if there is neither."""
    if calibration is None and device.type == "cuda":
        return match_device(torch.cuda.get_device_name(device))
    return calibration


def _recomputed_share(schedule: Schedule, recompute: Recompute) -> float:
    """Return the share of forward passes that are repeated."""
    if recompute.keep == 0:
        return 1.0
    num_dropped = sum(
        len(schedule.program(rank, recompute=recompute).dropped)
        for rank in range(schedule.num_ranks)
    )
    stages_per_chain = schedule.num_stages // schedule.num_chains
    return num_dropped / (stages_per_chain * schedule.num_microbatches)
