"""Collection of violated rules, with the places of the settings."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

from megatrain.config.resolved import ResolvedConfig
from megatrain.config.sections import Config
from megatrain.config.toml_file import toml_value


@dataclass(frozen=True, kw_only=True)
class ConfigErrors:
    """Violated rules of a configuration, and the format of a setting with its place.

    Attributes:
        config: The configuration before derived settings are filled.
        filled: The configuration with all of them.
        world_size: Number of processes.
        launcher: The option or environment that set it.
        accepts: Whether the layout rules hold on a number of processes with other sizes of
            parallel axes, as in ``accepts(8, tp=2, pp=4)``.
        found: The violated rules.
    """

    config: Config
    filled: ResolvedConfig
    world_size: int
    launcher: str
    accepts: Callable[..., bool]
    found: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        """Add one sentence."""
        self.found.append(problem)

    def shown(self, key: str) -> str:
        """Return ``"parallel.tp = 2 (demo.toml:9)"``, with the derived value if none is set."""
        find = operator.attrgetter(key)
        value = find(self.config)
        shown = find(self.filled) if value is None else value
        text = toml_value(shown) if isinstance(shown, list) else shown
        return f"{key} = {text} ({self.config.origin(key)})"


def count_of(number: int, noun: str) -> str:
    """Return ``"1 process"`` or ``"2 processes"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}es"
