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


def capture_error(at: str, error: Exception, *, computes: bool) -> CaptureError:
    """Describe a failure of captured code, with its line.

    Args:
        at: What failed, such as ``"the capture of the training step"``.
        error: The cause.
        computes: Whether the code was executed, not only recorded.
    """
    went_on, line = False, ""
    if isinstance(error, UnrecordableError):
        went_on, line = error.went_on, error.line
    else:
        for frame in traceback.extract_tb(error.__traceback__):
            if _is_the_users(frame.filename):
                line = _place(frame.filename, frame.lineno or 0)
    return CaptureError(
        f"{at} failed: {type(error).__name__}: {error}{at_line(line)}",
        is_abrupt=computes and not went_on,
    )


def at_line(line: str) -> str:
    """Format a source line as the end of a sentence; empty without one."""
    return f" (at {line})" if line else ""


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
