"""megacore: a distributed training runtime, a C++/CUDA core under a thin PyTorch package.

It needs torch and numpy alone. Importing it loads nothing heavy: its packages load on first use, as
in ``megacore.parallel``.

    parallel     ranks and groups (Topology, ProcessGroups), collectives
    pipeline     schedules, their simulation and their executor
    buffers      parameter and gradient buffers, reduction and gathering
    optim        AdamW sharded over ranks, gradient norm, learning rate
    moe          routers, dispatchers, experts, clones of hot experts (moe.echo)
    graphs       CUDA graphs of modules and steps
    qualification  trial of kernels on a device, and the choice between them and torch
    ops          kernels as functions on tensors
    calls        recorder of the collectives and messages of a rank
    errors       all error classes

The trainer that is built on it (settings, GPT, data, checkpoints, planning, the ``megacore``
command) is the package ``megatrain``.
"""

import importlib as _importlib

_PACKAGES = (
    "buffers",
    "calls",
    "errors",
    "graphs",
    "moe",
    "ops",
    "optim",
    "parallel",
    "pipeline",
    "qualification",
)

__all__ = ["__version__", *_PACKAGES]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _importlib.import_module("megacore._core").__version__
    if name in _PACKAGES:
        return _importlib.import_module(f"megacore.{name}")
    raise AttributeError(f"module 'megacore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
