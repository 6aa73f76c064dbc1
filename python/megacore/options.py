"""Checks of options: frozen dataclasses that a component takes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints


def check_options(value: object, kind: type, name: str) -> None:
    """Check that an argument is of the class of its options.

    Raises:
        TypeError: If not, with both classes.
    """
    if not isinstance(value, kind):
        found = value.__name__ if isinstance(value, type) else type(value).__name__
        place = ".".join(kind.__module__.split(".")[:2])
        raise TypeError(f"{name} must be a {place}.{kind.__name__}, got {found}")


@cache
def _hints_of(kind: type) -> Mapping[str, Any]:
    # Annotations are compiled at each call, and options are made in each step of training.
    return get_type_hints(kind)


def check_values(
    options: object,
    *,
    least: Mapping[str, float] | None = None,
    below: Mapping[str, float] | None = None,
) -> None:
    """Check the values of options.

    Args:
        options: A dataclass; fields of type ``Literal`` must have one of its values.
        least: Smallest value of numbers by name; ``None`` values are skipped.
        below: Bound above numbers by name, not reached.

    Raises:
        ValueError: With the name, the rule and the value.
    """
    kind: Any = type(options)
    for name, hint in _hints_of(kind).items():
        value, choices = getattr(options, name), get_args(hint)
        if get_origin(hint) is Literal and value not in choices:
            raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")
    for name, bound in (least or {}).items():
        value = getattr(options, name)
        if value is not None and not value >= bound:
            raise ValueError(f"{name} must be at least {bound:g}, got {value!r}")
    for name, bound in (below or {}).items():
        value = getattr(options, name)
        if not value < bound:
            raise ValueError(f"{name} must be below {bound:g}, got {value!r}")
