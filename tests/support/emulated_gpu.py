"""A pytest plugin that runs tests of kernels without a GPU: `pytest -p tests.support.emulated_gpu`.

Tensors "on the GPU" are tensors of the CPU. Operations take the way of CUDA tensors, and their
kernels are the emulated ones that `make test-cpp` compiles. This shows that the tests of kernels
run as they are written, and what the kernels give where the expected values are made by other
means; `tests/unit/ops/test_gpu_operations.py` compares each of them with its twin of the CPU.

Skipped are tests that capture graphs, need grouped products of CUTLASS, or are marked `real_gpu`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.resources
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.support.emulated_kernels import load_kernels

_NEEDS_A_GPU = "needs a GPU: emulated kernels are not enough"
_SLOW = ("5000-2048", "4096-256-8-1", "96-1000-32-96", "5000003")  # more than 5 s, by parameters


class _OnTheCpu(TorchFunctionMode):
    """Makes tensors that are asked for on a GPU on the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].clone()
        if func is torch.Tensor.to:
            args, kwargs["copy"] = tuple(map(_on_cpu, args)), kwargs.get("copy", True)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return func(*args, **kwargs)


def _on_cpu(device: Any) -> Any:
    is_gpu = isinstance(device, str | torch.device) and torch.device(device).type == "cuda"
    return torch.device("cpu") if is_gpu else device


class _Stream:
    """The only stream: work is done when its launch returns."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, other: _Stream) -> None:
        pass

    def wait_event(self, event: _Event) -> None:
        pass


class _Event:
    """A point of the only stream, which it has reached."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        del enable_timing

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _unavailable(*_args: Any, **_options: Any) -> Any:
    pytest.skip(_NEEDS_A_GPU)


def _stand_in(library: ctypes.CDLL) -> types.ModuleType:
    """Return what `megacore._cuda` is to Python."""
    module = types.ModuleType("megacore._cuda")
    numbers = {
        "device_count": 1,
        "runtime_version": 13000,
        "driver_version": 13000,
        "compiled_archs": ["80"],
        "grouped_gemm_archs": [],
    }
    for name, value in numbers.items():
        setattr(module, name, lambda value=value: value)
    for name, order in (
        ("peer_sort_numel", ("num_tokens", "num_choices", "num_experts")),
        ("plan_offload_bytes", ("num_ranks", "num_experts", "num_spare_slots")),
    ):
        setattr(module, name, _sized(getattr(library, f"megacore_{name}"), order))

    def limit(name: str) -> int:
        library.megacore_limit.restype = ctypes.c_int64
        value: int = library.megacore_limit(name.encode())
        if value < 0:
            raise AttributeError(name)
        return value

    module.__getattr__ = limit  # type: ignore[method-assign]
    return module


def _sized(function: Any, order: Sequence[str]) -> Callable[..., int]:
    function.restype = ctypes.c_int64
    return lambda **sizes: int(function(*(ctypes.c_int64(sizes[name]) for name in order)))


def _import_operations() -> None:
    """Import all operations, with the implementation for GPUs in the place of that for CPUs."""
    # Without its package, which imports the others.
    package = types.ModuleType("megacore.ops")
    package.__path__ = [f"{importlib.import_module('megacore').__path__[0]}/ops"]
    sys.modules["megacore.ops"] = package
    register = importlib.import_module("megacore.ops.register")
    define_op = register.define_op
    register.define_op = lambda schema, *, cpu, cuda, fake: define_op(  # noqa: ARG005
        schema, cpu=cuda, cuda=cuda, fake=fake
    )
    del sys.modules["megacore.ops"]
    importlib.import_module("megacore.ops")


def _replace_torch_cuda() -> None:
    properties = types.SimpleNamespace(major=8, minor=0, shared_memory_per_block_optin=227 * 1024)
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: properties,
        "set_sync_debug_mode": lambda _: None,
        "is_current_stream_capturing": lambda: False,
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": lambda _: contextlib.nullcontext(),
    }
    for name in ("CUDAGraph", "graph", "memory_allocated", "_sleep"):
        replaced[name] = _unavailable
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]


def pytest_configure() -> None:
    """Replace the GPU, before the tests are imported."""
    library = load_kernels()
    if library is None:
        pytest.exit("the emulated kernels are not compiled as they are now; run make test-cpp", 1)
    sys.modules["megacore._cuda"] = _stand_in(library)
    _replace_torch_cuda()
    _import_operations()
    for source in importlib.resources.files("megacore.ops").iterdir():
        if source.name.endswith(".py"):  # all register their operations
            importlib.import_module(f"megacore.ops.{source.name[:-3]}")
    assert library.megacore_register_emulated(b"megacore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only a GPU can run."""
    for item in items:
        if item.get_closest_marker("real_gpu"):
            item.add_marker(pytest.mark.skip(reason=_NEEDS_A_GPU))
        elif any(parameters in item.name for parameters in _SLOW):
            item.add_marker(pytest.mark.skip(reason="takes too long on emulated kernels"))


@pytest.fixture(autouse=True)
def _tensors_on_the_cpu() -> Iterator[None]:
    with _OnTheCpu():
        yield
