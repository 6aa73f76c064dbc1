"""What goes wrong in capture and replay."""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

from megacore.errors import MegacoreError

_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parent)


class CaptureError(MegacoreError, RuntimeError):
    """A module could not be captured; everything is as it was before.

    Args:
        message: What failed, and where.
        is_abrupt: Whether the code stopped in the middle of what it really computes, as in warmup:
            other ranks may wait for the messages that it would have sent.
    """

    def __init__(self, message: str, *, is_abrupt: bool = False) -> None:
        super().__init__(message)
        self.is_abrupt = is_abrupt


class FormError(TypeError):
    """A module is called with, or returns, something else than tensors in a fixed structure."""


class ReplayError(MegacoreError, RuntimeError):
    """A replay that would not do what the caller means: other shapes, another order."""


class UnrecordableError(RuntimeError):
    """Captured code has done what no graph can record.

    Args:
        message: What it did.
        line: Where, ``"file:line: source"``.

    Attributes:
        went_on: Whether the code ran to its end in spite of that.
    """

    def __init__(self, message: str, line: str) -> None:
        super().__init__(message)
        self.line = line
        self.went_on = True


def is_abrupt(error: Exception, *, computes: bool) -> bool:
    """Whether an error has ended code that computes in earnest, before its end.

    Args:
        error: The error.
        computes: Whether the code was run, and not only recorded for later.
    """
    return computes and not (isinstance(error, UnrecordableError) and error.went_on)


def failing_line(error: BaseException) -> str:
    """The place in the user's code that an error comes from, ``"file:line: source"``, or ``""``."""
    if isinstance(error, UnrecordableError):
        return error.line
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if _is_the_users(frame.filename):
            return _place(frame.filename, frame.lineno or 0)
    return ""


def calling_line() -> str:
    """The innermost line of the user's code that is running, ``"file:line: source"``, or ``""``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_the_users(frame.f_code.co_filename):
            return _place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def _is_the_users(filename: str) -> bool:
    path = Path(filename)
    own = path.suffix != ".py" or any(path.is_relative_to(folder) for folder in _NOT_THE_USERS)
    return not own and "importlib" not in filename


def _place(filename: str, line: int) -> str:
    return f"{Path(filename).name}:{line}: {linecache.getline(filename, line).strip()}"
