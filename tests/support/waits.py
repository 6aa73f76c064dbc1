"""Finds what would make the host wait for a GPU, in a run that needs none.

Tensors of the meta device have shapes but no values, so whatever reads a value raises there. What
copies between the host and the device, or has a result whose size is a value, is recognised among
the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megacore import host_values
from megacore.host_values import HostRead

_ATEN = torch.ops.aten
# Their results have a size, or a number on the host, that depends on values.
_READS_VALUES = frozenset(
    {
        _ATEN._local_scalar_dense.default,
        _ATEN.nonzero.default,
        _ATEN.masked_select.default,
        _ATEN._unique2.default,
        _ATEN.unique_consecutive.default,
        _ATEN.unique_dim.default,
        _ATEN.bincount.default,
        _ATEN.equal.default,
        _ATEN.is_nonzero.default,
    }
)
_TAKES_INDICES = frozenset({_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default})
_COPIES = frozenset({_ATEN._to_copy.default, _ATEN.copy_.default})
_MAKES_TENSORS = ("tensor", "as_tensor", "asarray")


class WouldWait(Exception):
    """An operation for which the host waits for the device."""


def _on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        reads = func in _READS_VALUES and any(map(_on_device, given))
        if func is _ATEN.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            reads = any(map(_on_device, given))
        if func in _TAKES_INDICES and _on_device(args[0]):
            # A mask is turned into positions first; an index of the host is copied.
            reads = any(
                isinstance(index, Tensor) and (index.dtype == torch.bool or _on_host(index))
                for index in args[1]
            )
        if reads:
            raise WouldWait(f"{func} waits for the device")
        if func in _COPIES:
            to = kwargs.get("device")
            ends = {x.device.type for x in given if isinstance(x, Tensor)}
            if len(ends if to is None else ends | {to.type}) > 1:
                raise WouldWait(f"{func} copies between host and device")
        return func(*args, **kwargs)


def _watched(name: str) -> Callable[..., Tensor]:
    """A function of torch that makes tensors; numbers are copied below the operations."""
    function: Callable[..., Tensor] = getattr(torch, name)

    def make(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        result = function(data, *args, **kwargs)
        if _on_device(result) and not _on_device(data):
            raise WouldWait(f"torch.{name} copies between host and device")
        return result

    return make


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise `WouldWait`, or what torch raises for tensors without values."""
    with ExitStack() as stack:
        for name in _MAKES_TENSORS:
            stack.enter_context(patch.object(torch, name, _watched(name)))
        stack.enter_context(_Operations())
        stack.enter_context(host_values.listen(_refuse))
        yield


def _refuse(read: HostRead) -> None:
    raise WouldWait(f"the host reads the {read.name}")
