"""Reads of device values by the host, all through one function.

A read waits for the device, so a step has as few as possible; each has a name. Tensors without
data, on torch's meta device or fake, answer with assumed values: this is how a rank runs without a
device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True, kw_only=True)
class HostRead:
    """One read of device values.

    Attributes:
        name: Name of the values.
        place: File and line of the read, as ``"megacore/optim/shard.py:12"``.
    """

    name: str
    place: str


_LISTENER: ContextVar[Callable[[HostRead], None] | None] = ContextVar("listener", default=None)


def to_host(tensor: Tensor, name: str, *, assumed: Callable[[], Any] | None = None) -> Tensor:
    """Copy a tensor to the CPU; a tensor of the CPU is returned itself.

    Args:
        tensor: Any shape.
        name: Name of the values for lists of all reads.
        assumed: Returns the values of a tensor without data, as nested lists. Default: NaN, 0 for
            integers.

    Sync:
        Waits for the device.
    """
    _announce(name)
    return _copy(tensor, assumed)


def read(tensor: Tensor, name: str, *, assumed: Callable[[], Any] | None = None) -> Any:
    """Return the values of a tensor as numbers in nested lists, like ``tensor.tolist()``.

    Arguments are those of :func:`to_host`.

    Sync:
        Waits for the device.

    Example:
        >>> read(torch.tensor([2, 3]), "sizes"), read(torch.empty(2, device="meta"), "norms")
        ([2, 3], [nan, nan])
    """
    _announce(name)
    return _copy(tensor, assumed).tolist()


def _announce(name: str) -> None:
    """Name a read to the listener; the place is that of the caller's caller."""
    listener = _LISTENER.get()
    if listener is not None:
        frame = sys._getframe(2)
        listener(HostRead(name=name, place=short_place(frame.f_code.co_filename, frame.f_lineno)))


def _copy(tensor: Tensor, assumed: Callable[[], Any] | None) -> Tensor:
    if has_data(tensor):
        return tensor.cpu()
    with _disable_current_modes():
        if assumed is not None:
            return torch.tensor(assumed(), dtype=tensor.dtype, device="cpu").view(tensor.shape)
        empty = math.nan if tensor.dtype.is_floating_point else 0
        return torch.full(tuple(tensor.shape), empty, dtype=tensor.dtype, device="cpu")


def has_data(tensor: Tensor) -> bool:
    """Return whether a tensor has values that can be read.

    Example:
        >>> has_data(torch.ones(1)), has_data(torch.ones(1, device="meta"))
        (True, False)
    """
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


@contextmanager
def listen(listener: Callable[[HostRead], None]) -> Iterator[None]:
    """Call ``listener`` at every :func:`read` inside ``with``.

    Example:
        >>> found = []
        >>> with listen(found.append):
        ...     _ = read(torch.ones(1), "ones")
        >>> found[0].name
        'ones'
    """
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def short_place(path: str, line: int) -> str:
    """Return file and line, without the folders above the package.

    Example:
        >>> short_place("/usr/lib/site-packages/megacore/optim/shard.py", 12)
        'megacore/optim/shard.py:12'
    """
    parts = path.replace("\\", "/").split("/")
    for package in ("megacore", "megatrain"):
        if package in parts[:-1]:
            start = len(parts) - 1 - parts[::-1].index(package)
            parts = parts[start:]
            break
    return f"{'/'.join(parts)}:{line}"
