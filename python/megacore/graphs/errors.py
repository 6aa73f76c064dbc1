"""What goes wrong in capture and replay."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

import torch

from megacore.errors import MegacoreError

_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parent)


class CaptureError(MegacoreError, RuntimeError):
    """A module could not be captured; everything is as it was before."""


class ReplayError(MegacoreError, RuntimeError):
    """A replay that would not do what the caller means: other shapes, another order."""


def failing_line(error: BaseException) -> str:
    """The place in the user's code that an error comes from, ``"file:line: source"``, or ``""``."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        path = Path(frame.filename)
        if not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS):
            source = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{path.name}:{frame.lineno}: {source}"
    return ""
