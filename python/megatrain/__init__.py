"""megatrain: trains GPT and MoE models with megacore; the parts of the ``megacore`` command.

Importing it loads nothing heavy: its packages load on first use, as in ``megatrain.models``.

    api          names for a model, data and callbacks of your own (docs/own-model.md)
    models       GPT with all parallel layers
    data         text, tokenizers, samples, blends
    checkpoint   saving and loading in any layout
    hf           Hugging Face folders: import and export
    generation   text from a trained model
    train        trainer, step, loop, metrics
    dry_run      two steps of one rank without its devices and peers
    config       typed settings (docs/configuration.md)
    plan         layers, memory and time of a run before it starts
    view         pictures and traces of schedules and layouts
    report       report.html of a run, comparison of runs
    launch       starting and watching ranks
    hang         the cause of a run that does not respond
    echo_study   planners of clones side by side
    cli          the megacore command
"""

import importlib as _importlib

_PACKAGES = (
    "api",
    "checkpoint",
    "cli",
    "config",
    "data",
    "dry_run",
    "echo_study",
    "generation",
    "hang",
    "hf",
    "launch",
    "models",
    "plan",
    "report",
    "train",
    "view",
)

__all__ = list(_PACKAGES)


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return _importlib.import_module(f"megatrain.{name}")
    raise AttributeError(f"module 'megatrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
