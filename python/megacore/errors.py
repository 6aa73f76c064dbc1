"""Errors addressed to the user.

A command that fails with one prints its message and exits with 2 (1 for a lost peer).
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


class PeerLostError(MegacoreError, RuntimeError):
    """Another rank died or stopped answering."""
