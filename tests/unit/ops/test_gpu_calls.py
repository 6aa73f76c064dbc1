"""Operations with kernels on both devices call those of a GPU, with arguments as they are declared.

No GPU is needed: tensors are fake ones on a CUDA device. Kernels that are operations themselves are
recorded (`test_gpu_operations.py` runs them); for those that take addresses, the module of kernels
is a stand-in that compares keywords with ``_cuda.pyi``.
"""

from __future__ import annotations

import ast
import importlib
import runpy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megacore.ops import cuda_module, register

STUB = Path(register.__file__).parents[1] / "_cuda.pyi"
MODULES = (
    *("ops/activations.py", "ops/dense.py", "ops/dropout.py", "ops/echo_counts.py"),
    *("ops/normed_rotation.py", "ops/permutation.py", "ops/quantize.py", "ops/rotation.py"),
    *("ops/peer_exchange.py", "ops/routing.py", "ops/topk.py", "ops/optim.py"),
    *("moe/echo/device_plan.py", "moe/echo/reroute.py"),
)
# T tokens, E experts, k choices, H features, R ranks.
T, E, K, H, R = 6, 4, 2, 128, 2
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Kernels:
    """Stand-in for the CUDA module that records calls and checks their keywords."""

    def __init__(self) -> None:
        self.called: list[str] = []
        tree = ast.parse(STUB.read_text())
        self.functions = {
            node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        self.constants = {
            node.target.id
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }

    def compiled_archs(self) -> list[str]:
        return ["90a"]

    def grouped_gemm_archs(self) -> list[str]:
        return ["90a"]

    def runtime_version(self) -> int:
        return 13000

    def __getattr__(self, name: str) -> Any:
        if name in self.constants:
            return 1 << 16
        arguments = self.functions[name]
        declared = [argument.arg for argument in arguments.kwonlyargs]
        optional = {
            argument
            for argument, default in zip(declared, arguments.kw_defaults, strict=True)
            if default is not None
        }

        def kernel(**given: Any) -> int:
            assert set(given) <= set(declared), f"{name}: {set(given) - set(declared)}"
            assert set(declared) - optional <= set(given), f"{name}: {set(declared) - set(given)}"
            if "stream" in declared:
                self.called.append(name)
            return 8

        return kernel


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    stand_in = Kernels()
    monkeypatch.setattr(cuda_module, "_CUDA", stand_in)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(Tensor, "data_ptr", lambda _: 4096)
    facts = cuda_module.DeviceFacts(capability=(9, 0))
    with cuda_module.assume_device(facts), FakeTensorMode():
        yield stand_in


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
            runpy.run_path(str(STUB.parent / path))
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
    members = ids(R), ids(8), 0, [E, T * K, 4 * H], 1.0
    sent, arrived = (x(T, H), on_gpu(T, K), ids(T, K)), (x(T * K, H), on_gpu(T * K), ids())
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
        "peer_send_counts": (ids(T, K), *members, [E, R, 1]),
        "peer_plan": (*members, [E, R, 1], T * K),
        "peer_map_copies": (ids(T, K), ids(8), ids(E), ids(R, 1), T * K),
        "peer_start_push": (*sent, *members, 0, K, T * K),
        "peer_finish_push": (*arrived, *members, 0),
        "peer_reserve_pull": (*members, 1),
        "peer_start_pull": (*arrived, *members, 1, False),
        "peer_finish_pull": (*sent, *members, 1, K, T * K),
        "reroute": (ids(T, K), ids(E), ids(E), ids(R, K), ids(R, K)),
    }


def shapes(results: Any) -> list[tuple[Any, ...]]:
    found = results if isinstance(results, (tuple, list)) else (results,)
    return [(each.shape, each.dtype, each.device) for each in found if each is not None]


def test_every_operation_has_an_example(kernels: Kernels) -> None:
    del kernels
    assert set(IMPLEMENTATIONS) == set(examples(on_gpu))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
def test_the_kernel_is_called_as_its_stub_declares(
    kernels: Kernels, name: str, dtype: torch.dtype
) -> None:
    COMPILED.clear()
    implementation, fake = IMPLEMENTATIONS[name]
    args = examples(lambda *shape: on_gpu(*shape, dtype=dtype))[name]
    results = implementation(*args)
    assert kernels.called or [name] == COMPILED, "the operation was computed by torch operations"
    assert shapes(results) == shapes(fake(*args))


def test_other_dtypes_go_to_torch_operations(kernels: Kernels) -> None:
    implementation, _ = IMPLEMENTATIONS["permute"]
    # On a CPU device, as torch without CUDA cannot index a fake tensor of a GPU.
    tokens, row_map = torch.empty(T, H, dtype=torch.float64), torch.zeros(T, K, dtype=torch.int64)
    COMPILED.clear()
    assert implementation(tokens, row_map, T * K, None).shape == (T * K, H)
    assert kernels.called == COMPILED == []


def test_a_device_that_runs_no_kernel_takes_torch_operations(kernels: Kernels) -> None:
    COMPILED.clear()
    implementation, fake = IMPLEMENTATIONS["rms_norm"]
    args = examples(on_gpu)["rms_norm"]
    a100 = cuda_module.DeviceFacts(capability=(8, 0))
    with cuda_module.assume_device(a100), pytest.warns(UserWarning, match="the device is sm_80"):
        results = implementation(*args)
    assert kernels.called == COMPILED == []
    assert shapes(results) == shapes(fake(*args))
