"""The training loop: steps, graphs, metrics, console and results of a run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacore.train.callbacks import Callback
    from megacore.train.metrics import METRICS, StepRecord
    from megacore.train.step import StepMetrics
    from megacore.train.trainer import Trainer, build_trainer

__all__ = [
    "METRICS",
    "Callback",
    "StepMetrics",
    "StepRecord",
    "Trainer",
    "build_trainer",
]

# Module of each name.
_HOMES = {
    "Callback": "callbacks",
    "METRICS": "metrics",
    "StepMetrics": "step",
    "StepRecord": "metrics",
    "Trainer": "trainer",
    "build_trainer": "trainer",
}


def __getattr__(name: str) -> Any:
    # Plans and the command line need parts without torch.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
