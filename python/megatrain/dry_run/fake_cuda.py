"""CUDA tensors without values, on machines without CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from megacore.ops.cuda_module import DeviceFacts, assume_device

_ATEN = torch.ops.aten
# Compute capability by the name of a device; most are names of calibrations too.
CAPABILITIES = {
    "a100": (8, 0),
    "a100-40": (8, 0),
    "l40s": (8, 9),
    "rtx4090": (8, 9),
    "h100": (9, 0),
    "h100-500w": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "gb200": (10, 0),
    "b300": (10, 3),
    "gb300": (10, 3),
    "rtx5090": (12, 0),
}


@contextmanager
def fake_cuda(capability: tuple[int, int]) -> Iterator[torch.device]:
    """Make tensors of CUDA devices without values inside ``with``; others are as usual.

    Device branches, shapes and dtypes are those of a GPU. Backward passes abort the process where
    torch is built without CUDA, so run forward passes and updates only.

    Args:
        capability: Compute capability that the device claims to have.

    Yields:
        The device.
    """
    with (
        warnings.catch_warnings(),
        assume_device(DeviceFacts(capability=capability)),
        _OnFakeDevice(FakeTensorMode(allow_non_fake_inputs=True)),
        torch.no_grad(),
    ):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield torch.device("cuda", 0)


class _OnFakeDevice(TorchFunctionMode):
    """Runs the functions of torch that make or take CUDA tensors under a mode of fake tensors.

    Where torch is built without CUDA, some methods of tensors ask for a driver even so; they are
    replaced by operations that do not.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        del types
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        device = _target(*args, **kwargs)[0] if func is Tensor.to else kwargs.get("device")
        makes = device is not None and torch.device(device).type == "cuda"
        if not makes and not _has_fake(args) and not _has_fake(tuple(kwargs.values())):
            return args[0] if func is Tensor.pin_memory else func(*args, **kwargs)
        with self._fake:
            return _REPLACED.get(func, func)(*args, **kwargs)


def _has_fake(values: tuple[Any, ...] | list[Any]) -> bool:
    return any(
        isinstance(value, FakeTensor) or (isinstance(value, tuple | list) and _has_fake(value))
        for value in values
    )


def _getitem(x: Tensor, key: Any) -> Any:
    view, indices = _view(x, key)
    if indices:
        return _ATEN.index(view, indices)
    return _ATEN.alias(view) if view is x else view


def _setitem(x: Tensor, key: Any, value: Any) -> Any:
    view, indices = _view(x, key)
    if indices:
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=x.dtype, device=x.device)
        _ATEN.index_put_(view, indices, value)
    elif isinstance(value, Tensor):
        _ATEN.copy_(view, value)
    else:
        _ATEN.fill_(view, value)
    return None


def _view(x: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Apply numbers, slices and new dimensions of an index; return its tensors too."""
    keys = key if isinstance(key, tuple) else (key,)
    num_sized = sum(each is not None and each is not ... for each in keys)
    view, dim = x, 0
    found: dict[int, Tensor] = {}
    for each in keys:
        if each is ...:
            dim += x.dim() - num_sized
        elif each is None:
            view, dim = _ATEN.unsqueeze(view, dim), dim + 1
        elif isinstance(each, slice):
            if each != slice(None):
                view = _ATEN.slice(view, dim, each.start, each.stop, each.step or 1)
            dim += 1
        elif isinstance(each, Tensor | list):
            found[dim] = torch.as_tensor(each)
            dim += max(1, found[dim].dim() if found[dim].dtype == torch.bool else 1)
        else:
            view = _ATEN.select(view, dim, int(each))
    return view, [found.get(dim) for dim in range(max(found) + 1)] if found else []


def _copy_(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    copied: Tensor = _ATEN.copy_(x, source, non_blocking)
    return copied


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device, dtype = _target(x, *args, **kwargs)
    device, dtype = device or x.device, dtype or x.dtype
    if device.type == x.device.type and dtype == x.dtype:
        return x
    moved: Tensor = _ATEN._to_copy(x, dtype=dtype, device=device)
    return moved


def _target(x: Tensor, *args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return device and dtype of `Tensor.to`."""
    del x
    if args and isinstance(args[0], Tensor):
        return args[0].device, args[0].dtype
    kwargs.pop("copy", None)
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


_REPLACED: Mapping[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.copy_: _copy_,
    Tensor.to: _to,
    Tensor.cpu: lambda x, **_: _to(x, "cpu"),
    Tensor.contiguous: _ATEN.contiguous,
    Tensor.nonzero: _ATEN.nonzero,
    Tensor.__invert__: _ATEN.bitwise_not,
}
