"""Numeric option values: parsing and lower bounds."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from megacore.errors import ConfigError

LARGEST = 2**31 - 1
LARGEST_INT64 = 2**63 - 1


def whole_number(text: str) -> int:
    """Parse an integer within the range of the planners, for ``argparse``.

    Example:
        >>> whole_number("12")
        12
    """
    return _bounded(text, LARGEST)


def seed_number(text: str) -> int:
    """Parse a seed, for ``argparse``."""
    return _bounded(text, LARGEST_INT64)


def number(text: str) -> float:
    """Parse a number, for ``argparse``.

    Example:
        >>> number("1e-3")
        0.001
    """
    try:
        return float(text)
    except ValueError:
        message = f"expected a number, but got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def require_at_least(args: argparse.Namespace, **least: int) -> None:
    """Check the lower bounds of options; options that were not given (None) are legal.

    Raises:
        ConfigError: With the option, its value and its lower bound.

    Example:
        >>> require_at_least(argparse.Namespace(top_k=2), top_k=1)
    """
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must be at least {smallest}, got {value}")


def refuse_given(args: argparse.Namespace, names: Iterable[str], sentence: str) -> None:
    """Refuse options that would be ignored.

    Args:
        args: Arguments of the command line.
        names: Options, as attributes of ``args``.
        sentence: Message, with ``{}`` for the option.

    Raises:
        ConfigError: If one of the options was given.

    Example:
        >>> refuse_given(argparse.Namespace(top=None), ["top"], "{} belongs to a search")
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False:
            # Not format: the sentence may quote what the user wrote, with braces.
            raise ConfigError(sentence.replace("{}", f"--{name.replace('_', '-')}"))


def _bounded(text: str, largest: int) -> int:
    try:
        value = int(text)
    except ValueError:
        message = f"expected a whole number, but got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
    if abs(value) > largest:
        raise argparse.ArgumentTypeError(f"{text} is out of range; the largest is {largest}")
    return value
