"""Entries of ``config.json`` and the settings they correspond to, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megacore.errors import MegacoreError

Values = dict[str, Any]
"""Settings by dotted name, such as ``"model.hidden_size"``."""

# The default of an entry that a family needs.
REQUIRED = object()


@dataclass(frozen=True, kw_only=True)
class Key:
    """One entry of ``config.json``.

    Attributes:
        theirs: Name of the entry; the first is written, all are read.
        ours: Settings with this value; the first is written.
        kind: ``int`` for a positive integer, ``float`` for a finite number, ``bool``.
        default: Value of a missing entry; ``None`` leaves the setting empty.
        empty: Value of an entry that is null. Default: as if it were missing.
        least: Smallest integer.
        null: Setting that is written as an empty entry.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    kind: type = int
    default: Any = REQUIRED
    empty: Any = REQUIRED
    least: int = 1
    null: Any = None

    def read(self, config: Mapping[str, Any]) -> Any:
        """Return the value of the entry.

        Raises:
            MegacoreError: If it is missing and required, or not of its kind.
        """
        name = next((name for name in self.theirs if config.get(name) is not None), None)
        if name is None and self.empty is not REQUIRED and config.keys() & set(self.theirs):
            return self.empty
        if name is None and self.default is REQUIRED:
            raise MegacoreError(
                f"config.json has no {' or '.join(self.theirs)}, which a {config['model_type']} "
                "model needs"
            )
        return self.default if name is None else checked(name, config[name], self.kind, self.least)

    def settings(self, config: Mapping[str, Any]) -> Values:
        """Return the settings with the value of the entry; see `read`."""
        return dict.fromkeys(self.ours, self.read(config))

    def write(self, values: Values) -> dict[str, Any]:
        """Return the entry for settings."""
        value = values[self.ours[0]]
        return {self.theirs[0]: None if value == self.null else value}


class LayerRule(Protocol):
    """Entries that select layers, such as those with experts."""

    @property
    def names(self) -> tuple[str, ...]:
        """Entries that the rule reads."""

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return settings; ``values`` has those of the keys."""

    def write(self, values: Values) -> dict[str, Any]:
        """Return the entries for settings."""


def checked(name: str, value: Any, kind: type, least: int = 1) -> Any:
    """Return the value of an entry if it is of its kind.

    Raises:
        MegacoreError: If it is not.
    """
    is_flag = isinstance(value, bool)
    if kind is bool and not is_flag:
        raise MegacoreError(f"{name} in config.json must be true or false, got {value!r}")
    if kind is int and (is_flag or not isinstance(value, int) or value < least):
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise MegacoreError(f"{name} in config.json must be {wanted}, got {value!r}")
    if kind is float and (is_flag or not isinstance(value, int | float)):
        raise MegacoreError(f"{name} in config.json must be a number, got {value!r}")
    return float(value) if kind is float else value
