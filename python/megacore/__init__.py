"""megacore: a distributed training runtime, a C++/CUDA core under a thin PyTorch package.

Importing it loads nothing heavy: its packages load on first use, as in ``megacore.parallel``.

Layout and schedules, pure functions without processes:
    parallel     ranks and groups (Topology, ProcessGroups), collectives
    pipeline     schedules, their simulation and their executor
    plan         layers, memory and time of a run before it starts
    view         pictures and traces of schedules and layouts

Parts of a training loop:
    buffers      parameter and gradient buffers, reduction and gathering
    optim        AdamW sharded over ranks, gradient norm, learning rate
    moe          routers, dispatchers, experts, clones of hot experts (moe.echo)
    models       GPT with all parallel layers, generation, Hugging Face import and export
    graphs       CUDA graphs of modules and steps
    ops          kernels as functions on tensors
    data         text, tokenizers, samples, blends
    checkpoint   saving and loading in any layout

The command and its parts:
    config       typed settings (docs/configuration.md)
    train        trainer, step, loop, metrics
    api          names for a model, data and callbacks of your own (docs/own-model.md)
    report       report.html of a run, comparison of runs
    launch       starting and watching ranks
    echo_study   planners of clones side by side
    cli          the megacore command
    errors       all error classes
"""

import importlib as _importlib

_PACKAGES = (
    "api",
    "buffers",
    "checkpoint",
    "cli",
    "config",
    "data",
    "echo_study",
    "errors",
    "graphs",
    "launch",
    "models",
    "moe",
    "ops",
    "optim",
    "parallel",
    "pipeline",
    "plan",
    "report",
    "train",
    "view",
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
