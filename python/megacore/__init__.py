"""megacore: a distributed training runtime, a C++/CUDA core under a thin PyTorch package.

Importing it loads nothing heavy: ``megacore.parallel`` and its siblings load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_SUBMODULES = (
    "buffers",
    "checkpoint",
    "cli",
    "config",
    "data",
    "errors",
    "launch",
    "models",
    "ops",
    "optim",
    "parallel",
    "pipeline",
    "plan",
    "report",
    "train",
    "view",
)

__all__ = ["__version__", *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("megacore._core").__version__
    if name in _SUBMODULES:
        return importlib.import_module(f"megacore.{name}")
    raise AttributeError(f"module 'megacore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
