"""The errors a user can meet.

A command that ends in one prints its sentence and exits with 2 (1 for a lost peer).
"""

from __future__ import annotations


class MegacoreError(Exception):
    """Base of every error addressed to the user: one clear sentence, no traceback needed."""


class ConfigError(MegacoreError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(MegacoreError, ValueError):
    """Training data that is missing, unreadable or too small."""


class CheckpointError(MegacoreError, RuntimeError):
    """A checkpoint that is missing, torn, unreadable or does not fit the model."""


class DiskFullError(CheckpointError):
    """A disk without room for a checkpoint."""


class PeerLostError(MegacoreError, RuntimeError):
    """Another rank died or stopped answering."""
