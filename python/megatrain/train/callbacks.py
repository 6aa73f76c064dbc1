"""Callbacks of the user's own: classes of ``train.callbacks``, called by the training loop."""

from __future__ import annotations

from typing import Any, Protocol

from megacore.errors import ConfigError
from megatrain.config import ResolvedConfig
from megatrain.config.user_objects import call_object, import_object
from megatrain.train.metrics import StepRecord
from megatrain.train.trainer import Trainer

METHODS = ("on_start", "on_step", "on_end")


class Callback(Protocol):
    """Interface of callbacks, and a base class whose methods do nothing.

    Every rank has an instance and calls it with equal records, so a callback may use collectives;
    output and files belong to rank 0 (``trainer.groups.rank``).

    Args:
        config: The resolved configuration.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        pass

    def on_start(self, trainer: Trainer) -> None:
        """Start: the model is built, and the checkpoint, if any, is loaded."""

    def on_step(self, record: StepRecord) -> None:
        """Take the metrics of a step, after its update and its validation."""

    def on_end(self) -> None:
        """End: the last step is done, or the run stops early."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint as JSON values; that of rank 0 is saved. Optional."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a state of a checkpoint, on every rank, before `on_start`. Optional."""


def make_callbacks(config: ResolvedConfig) -> list[Callback]:
    """Import and construct the callbacks of a resolved configuration, in their order.

    Raises:
        ConfigError: If one cannot be imported or constructed, or lacks a method.
    """
    made = []
    for name in config.train.callbacks:
        shown = f'train.callbacks = "{name}"'
        one = call_object(import_object(name, setting="train.callbacks"), config, shown=shown)
        missing = [method for method in METHODS if not callable(getattr(one, method, None))]
        if missing:
            raise ConfigError(
                f"{shown} must be a class with {', '.join(METHODS)}, but it lacks "
                f"{', '.join(missing)}; derive it from megatrain.api.Callback"
            )
        made.append(one)
    return made
