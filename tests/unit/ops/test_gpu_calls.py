"""Operations with kernels on both devices call those of a GPU, with arguments as they are declared.

No GPU is needed: tensors are fake ones on a CUDA device, and the kernels are recorded
(`test_gpu_operations.py` runs them).
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megacore.ops import cuda_module, register
from tests.unit.ops.test_gpu_operations import FLOATS, gpu_arguments

FOLDER = Path(register.__file__).parents[1]
MODULES = (
    *("ops/activations.py", "ops/dense.py", "ops/dropout.py", "ops/echo_counts.py"),
    *("ops/normed_rotation.py", "ops/permutation.py", "ops/quantize.py", "ops/rotation.py"),
    *("ops/routing.py", "ops/topk.py", "ops/optim.py"),
    *("moe/echo/device_plan.py", "moe/echo/reroute.py"),
)


class Kernels:
    """Stand-in for the CUDA module: its facts, with limits that nothing exceeds."""

    def compiled_archs(self) -> list[str]:
        return ["90a"]

    def grouped_gemm_archs(self) -> list[str]:
        return ["90a"]

    def runtime_version(self) -> int:
        return 13000

    def plan_offload_bytes(self, **_: int) -> int:
        return 1 << 10

    def __getattr__(self, name: str) -> int:
        if not name.startswith("MAX_"):
            raise AttributeError(name)
        return 1 << 16


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda_module, "_CUDA", Kernels())
    facts = cuda_module.DeviceFacts(capability=(9, 0))
    with cuda_module.assume_device(facts), FakeTensorMode():
        yield


# Operations of C++ that were called.
COMPILED: list[str] = []


def record(schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        COMPILED.append(schema.split("(", 1)[0])
        return fake(*args)

    return kernel


def gpu_implementations() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Run the modules again with a registration that only collects: name to GPU and fake."""
    found: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def collect(schema: str, *, cuda: Any, fake: Any, **_: Any) -> Any:
        found[schema.split("(", 1)[0]] = cuda, fake
        return SimpleNamespace(pass_autograd=lambda: None)

    for path in MODULES:  # not for the first time below: modules import one another
        importlib.import_module("megacore." + path.removesuffix(".py").replace("/", "."))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(register, "define_op", collect)
        patch.setattr(register, "compiled", record)
        patch.setattr(register, "define_gradient", lambda *_: None)
        for path in MODULES:
            runpy.run_path(str(FOLDER / path))
    return found


IMPLEMENTATIONS = gpu_implementations()


# Before fake tensors are on, which no generator fills.
ARGUMENTS = {
    (name, dtype): gpu_arguments(name, dtype) for name in IMPLEMENTATIONS for dtype in FLOATS
}


def on_gpu(name: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return the arguments of an operation, on a GPU."""
    return [
        torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x
        for x in ARGUMENTS[name, dtype]
    ]


def shapes(results: Any) -> list[tuple[Any, ...]]:
    found = results if isinstance(results, (tuple, list)) else (results,)
    return [(each.shape, each.dtype, each.device) for each in found if each is not None]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
def test_the_kernel_is_called(name: str, dtype: torch.dtype) -> None:
    COMPILED.clear()
    implementation, fake = IMPLEMENTATIONS[name]
    args = on_gpu(name, dtype)
    results = implementation(*args)
    assert [name] == COMPILED, "the operation was computed by torch operations"
    assert shapes(results) == shapes(fake(*args))


@pytest.mark.usefixtures("kernels")
def test_other_dtypes_go_to_torch_operations() -> None:
    implementation, _ = IMPLEMENTATIONS["permute"]
    # On a CPU device, as torch without CUDA cannot index a fake tensor of a GPU.
    tokens, row_map = torch.empty(6, 8, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.int64)
    COMPILED.clear()
    assert implementation(tokens, row_map, 12, None).shape == (12, 8)
    assert COMPILED == []


@pytest.mark.usefixtures("kernels")
def test_a_device_that_runs_no_kernel_takes_torch_operations() -> None:
    COMPILED.clear()
    implementation, fake = IMPLEMENTATIONS["rms_norm"]
    args = on_gpu("rms_norm")
    a100 = cuda_module.DeviceFacts(capability=(8, 0))
    with cuda_module.assume_device(a100), pytest.warns(UserWarning, match="the device is sm_80"):
        results = implementation(*args)
    assert COMPILED == []
    assert shapes(results) == shapes(fake(*args))
