"""Errors addressed to the user.

A command that fails with one prints its message and exits with 2 (1 for a lost peer or a diverged
training).
"""

from __future__ import annotations


class MegacoreError(Exception):
    """Base of every error addressed to the user: one clear sentence, no traceback needed."""


class ConfigError(MegacoreError, ValueError):
    """An invalid setting, or an invalid combination of settings."""


class DataError(MegacoreError, ValueError):
    """Training data that is missing, unreadable or too small."""


class CheckpointError(MegacoreError, RuntimeError):
    """A checkpoint that is missing, torn, unreadable or does not fit the model."""


class DiskFullError(CheckpointError):
    """A disk without room for a checkpoint."""


class DivergedError(MegacoreError, RuntimeError):
    """A training that must not continue: no finite gradients any more, or a loss spike."""


class PeerLostError(MegacoreError, RuntimeError):
    """Another rank died or stopped answering."""


def printable(text: str) -> str:
    r"""Escape control characters other than line breaks, which could change a terminal.

    Example:
        >>> printable("a\x1b[31mb\n")
        'a\\x1b[31mb\n'
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text
    )
