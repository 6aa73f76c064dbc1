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

FOLDER = Path(register.__file__).parents[1]
MODULES = (
    *("ops/activations.py", "ops/dense.py", "ops/dropout.py", "ops/echo_counts.py"),
    *("ops/normed_rotation.py", "ops/permutation.py", "ops/quantize.py", "ops/rotation.py"),
    *("ops/routing.py", "ops/topk.py", "ops/optim.py"),
    *("moe/echo/device_plan.py", "moe/echo/reroute.py"),
)
# T tokens, E experts, k choices, H features, R ranks.
T, E, K, H, R = 6, 4, 2, 128, 2
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def ids(*shape: int) -> Tensor:
    return on_gpu(*shape, dtype=torch.int64)


def numbers(*shape: int) -> Tensor:
    return on_gpu(*shape, dtype=torch.float64)


def examples(x: Callable[..., Tensor]) -> dict[str, tuple[Any, ...]]:
    """Return arguments of each operation; ``x`` makes a tensor of the dtype to be tested."""
    rotary = on_gpu(T, 16), on_gpu(T, 16)
    heads = x(T, 1, 2, 2 * 32), x(T, 1, 1, 32), x(T, 1, 1, 32)
    norms = x(32), x(32)
    rule = 1, False, False, True, 1.0
    plan = ids(R, K), ids(R, R, K), ids(R), ids(5), ids(1), ids(E + R * K), E
    return {
        "swiglu": (x(T, 2 * H), on_gpu(T), ids()),
        "swiglu_backward": (x(T, H), x(T, 2 * H), on_gpu(T), None),
        "gelu": (x(T, H), None, None),
        "gelu_backward": (x(T, H), x(T, H), None, ids()),
        "rms_norm": (x(T, H), x(H), 1e-6),
        "add_rms_norm": (x(T, H), x(T, H), x(H), 1e-6),
        "rms_norm_backward": (x(T, H), x(T, H), x(H), on_gpu(T, 1), True, True, x(T, H)),
        "counter_dropout": (x(T, 1, H), ids(1), ids(T), ids(), 0, 0.5),
        "sort_by_expert": (ids(T, K), E),
        "permute": (x(T, H), ids(T, K), T * K, on_gpu(T, K)),
        "permute_both": (x(T, H), on_gpu(T, K), ids(T, K), T * K),
        "unpermute_both": (x(T * K, H), on_gpu(T * K), ids(T, K)),
        "unpermute": (x(T * K, H), ids(T, K), None),
        "row_dots": (x(T, H), x(T * K, H), ids(T, K)),
        "quantize_rows": (x(T, H), ids()),
        "quantize_columns": (x(T, H), ids(E), True),
        "quantize_blocks": (x(E, T, H), False),
        "split_and_rotate": (x(T, 1, 1, 4 * 32), *rotary, 32),
        "split_and_rotate_backward": (*heads, *rotary),
        "norm_and_rotate": (x(T, 1, 1, 4 * 32), *norms, *rotary, 32, 1e-6),
        "norm_and_rotate_backward": (
            *(*heads, x(T, 1, 1, 4 * 32), *norms, on_gpu(T, 1, 1, 3), *rotary),
            *(True, True),
        ),
        "top_k": (x(T, E), K),
        "route": (on_gpu(T, E), None, None, ids(E), K, *rule, True, 0.1, 0.1),
        "route_backward": (
            *(on_gpu(T, K), on_gpu(T, E), ids(T, K), on_gpu(1, E), on_gpu(), None),
            *(*rule, 0.1, 0.0),
        ),
        "adamw_step_": (
            *(on_gpu(T), on_gpu(T), on_gpu(T), on_gpu(T), on_gpu(T, dtype=torch.bfloat16)),
            *(numbers(6), 0.1, 0.9, 0.99, 1e-8, 0.1, 0.1, 0.1, 1.0),
        ),
        "decide_step_": (numbers(4), numbers(3), numbers(6), 0.9, 0.99, 1.0, 0.0, 0.0),
        "sum_of_squares": (x(T, H),),
        "plan_offload": (ids(R, E), K, True, 0, 10**6, 0),
        "count_plan_": (numbers(8), *plan),
        "count_held_": (numbers(8), ids(R, K), 0, 2, 100),
        "reroute": (ids(T, K), ids(E), ids(E), ids(R, K), ids(R, K)),
    }


def shapes(results: Any) -> list[tuple[Any, ...]]:
    found = results if isinstance(results, (tuple, list)) else (results,)
    return [(each.shape, each.dtype, each.device) for each in found if each is not None]


@pytest.mark.usefixtures("kernels")
def test_every_operation_has_an_example() -> None:
    assert set(IMPLEMENTATIONS) == set(examples(on_gpu))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
def test_the_kernel_is_called(name: str, dtype: torch.dtype) -> None:
    COMPILED.clear()
    implementation, fake = IMPLEMENTATIONS[name]
    args = examples(lambda *shape: on_gpu(*shape, dtype=dtype))[name]
    results = implementation(*args)
    assert [name] == COMPILED, "the operation was computed by torch operations"
    assert shapes(results) == shapes(fake(*args))


@pytest.mark.usefixtures("kernels")
def test_other_dtypes_go_to_torch_operations() -> None:
    implementation, _ = IMPLEMENTATIONS["permute"]
    # On a CPU device, as torch without CUDA cannot index a fake tensor of a GPU.
    tokens, row_map = torch.empty(T, H, dtype=torch.float64), torch.zeros(T, K, dtype=torch.int64)
    COMPILED.clear()
    assert implementation(tokens, row_map, T * K, None).shape == (T * K, H)
    assert COMPILED == []


@pytest.mark.usefixtures("kernels")
def test_a_device_that_runs_no_kernel_takes_torch_operations() -> None:
    COMPILED.clear()
    implementation, fake = IMPLEMENTATIONS["rms_norm"]
    args = examples(on_gpu)["rms_norm"]
    a100 = cuda_module.DeviceFacts(capability=(8, 0))
    with cuda_module.assume_device(a100), pytest.warns(UserWarning, match="the device is sm_80"):
        results = implementation(*args)
    assert COMPILED == []
    assert shapes(results) == shapes(fake(*args))
