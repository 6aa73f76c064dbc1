"""Errors of capture and replay."""

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
    """A failed capture of a module; the previous state is restored.

    Args:
        message: The failure and its place.
        is_abrupt: Whether the code stopped while it executed kernels, as in warmup: other ranks may
            then wait for messages that were never sent.
    """

    def __init__(self, message: str, *, is_abrupt: bool = False) -> None:
        super().__init__(message)
        self.is_abrupt = is_abrupt


class FormError(TypeError):
    """Call or result of a module that does not have tensors in a fixed structure."""


class ReplayError(MegacoreError, RuntimeError):
    """Replay that would not match the call, for example by shapes or order."""


class UnrecordableError(RuntimeError):
    """Operation in captured code that a graph cannot record.

    Args:
        message: Description of the operation.
        line: Source line, ``"file:line: source"``.

    Attributes:
        went_on: Whether the code still ran to its end.
    """

    def __init__(self, message: str, line: str) -> None:
        super().__init__(message)
        self.line = line
        self.went_on = True


def is_abrupt(error: Exception, *, computes: bool) -> bool:
    """Return whether an error interrupted code that was executing kernels.

    Args:
        error: The error.
        computes: Whether the code was executed, not only recorded.
    """
    return computes and not (isinstance(error, UnrecordableError) and error.went_on)


def failing_line(error: BaseException) -> str:
    """Return the innermost user line in a traceback, as ``"file:line: source"``, or ``""``."""
    if isinstance(error, UnrecordableError):
        return error.line
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if _is_the_users(frame.filename):
            return _place(frame.filename, frame.lineno or 0)
    return ""


def calling_line() -> str:
    """Return the innermost user line on the call stack, as ``"file:line: source"``, or ``""``."""
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
