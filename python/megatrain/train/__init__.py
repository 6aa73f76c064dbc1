"""The training loop: steps, graphs, metrics, console and results of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import lazy_names

if TYPE_CHECKING:
    from megatrain.train.callbacks import Callback
    from megatrain.train.metrics import METRICS, StepRecord
    from megatrain.train.step import StepMetrics
    from megatrain.train.trainer import Trainer, build_trainer

__all__ = [
    "METRICS",
    "Callback",
    "StepMetrics",
    "StepRecord",
    "Trainer",
    "build_trainer",
]

# Module of each name: plans and the command line need parts without torch.
_HOMES = {
    "Callback": "callbacks",
    "METRICS": "metrics",
    "StepMetrics": "step",
    "StepRecord": "metrics",
    "Trainer": "trainer",
    "build_trainer": "trainer",
}

__getattr__ = lazy_names(__name__, _HOMES)
