"""Log of the operations of a captured function, with the values that a real graph would freeze.

A real graph repeats the operations of its capture with the numbers of that time. Python code
that runs again may do something else without an error. The emulated backend therefore logs the
operations of a capture with their Python numbers, compares each replay with the log, and rejects
operations that cannot be recorded: those that wait for the device or read from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.graphs.errors import ReplayError, UnrecordableError, at_line, calling_line

_WAITING = {
    "aten._local_scalar_dense": "reads a number from the device",
    "aten.nonzero": "has a result whose size depends on values",
    "aten.masked_select": "has a result whose size depends on values",
    "aten._unique2": "has a result whose size depends on values",
    "aten.unique_dim": "has a result whose size depends on values",
    "aten.bincount": "has a result whose size depends on values",
    "aten.repeat_interleave": "has a result whose size depends on values",
    "aten.lift_fresh": "makes a tensor from numbers of the host",
}
_READING = {
    Tensor.tolist: "reads numbers from the device",
    Tensor.numpy: "reads numbers from the device",
    Tensor.cpu: "copies to the host",
}
Entry = tuple[str, tuple[Any, ...]]


class Recording:
    """Operation log of one captured function."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._refused: UnrecordableError | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Log the operations inside ``with``.

        Raises:
            UnrecordableError: On exit, for the first operation that a graph cannot record. The code
                runs to its end first, so that its collectives match those of other ranks; a real
                capture sends no messages.
        """
        try:
            with _NoReading(self._refuse), _Operations(self._append):
                yield
        except Exception as error:
            if self._refused is not None:
                self._refused.went_on = False
                raise self._refused from error
            raise
        if self._refused is not None:
            raise self._refused

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Compare the operations inside ``with`` with those of the capture.

        Raises:
            ReplayError: At the first difference.
        """
        position = 0

        def compare(entry: Entry) -> None:
            nonlocal position
            expected = self._entries[position] if position < len(self._entries) else None
            position += 1
            if entry != expected:
                raise ReplayError(
                    f"a replay repeats the capture, but the code now does something else: "
                    f"operation {position} is {_shown(entry)}, and was {_shown(expected)}"
                    f"{at_line(calling_line())}; a real graph freezes Python numbers and "
                    "decisions, so what changes must be a tensor"
                )

        with _Operations(compare):
            yield
        if position != len(self._entries):
            raise ReplayError(
                f"a replay repeats the capture, but the code now ends after {position} of "
                f"{len(self._entries)} operations; the next one was "
                f"{_shown(self._entries[position])}"
            )

    def _append(self, entry: Entry) -> None:
        reason = _WAITING.get(entry[0])
        if reason is not None:
            self._refuse(f"{entry[0]} {reason}")
        self._entries.append(entry)

    def _refuse(self, what: str) -> None:
        if self._refused is None:
            message = f"{what}, which a CUDA graph cannot record"
            self._refused = UnrecordableError(message, calling_line())


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, note: Callable[[Entry], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        name = f"{func.namespace}.{func._opname}"
        # Collectives are logged without arguments, which do not enter the computation.
        numbers = () if func.namespace == "c10d" else tuple(_numbers(args))
        if name in ("aten.index", "aten.index_put") and _has_mask(args):
            name = "aten.nonzero"
        self._note((name, numbers))
        return func(*args, **(kwargs or {}))


class _NoReading(TorchFunctionMode):
    """Rejects methods that read a CPU tensor directly but need an operation on a CUDA tensor."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        reason = _READING.get(func)
        if reason is not None:
            self._refuse(f"Tensor.{func.__name__} {reason}")
        return func(*args, **(kwargs or {}))


def _numbers(args: Any) -> Iterator[Any]:
    for value in args:
        if isinstance(value, (int, float)):
            yield value if value == value else "nan"  # which is not equal to itself
        elif isinstance(value, (list, tuple)):
            yield from _numbers(value)


def _has_mask(args: tuple[Any, ...]) -> bool:
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


def _shown(entry: Entry | None) -> str:
    return "nothing" if entry is None else f"{entry[0]}({', '.join(map(str, entry[1]))})"
