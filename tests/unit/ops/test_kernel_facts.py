"""Reasons and lines on kernels, with devices and builds that are not there."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megacore.ops import cuda_module, gemm_cuda
from megacore.ops.cuda_module import DeviceFacts, KernelBuild, assume_device, runs_kernels
from megacore.ops.fp8 import fp8_linear
from megacore.ops.kernel_facts import Fp8Products, kernel_text
from megatrain.cli.doctor import _grouped_products

BOTH = KernelBuild(archs=("90a", "100a"), grouped=("90a", "100a"), cuda=13000)
# Of `make cuda`.
FOUR = KernelBuild(archs=("80", "90a", "100a", "120a"), grouped=("90a", "100a"), cuda=13000)
DEVICES = {
    "A100": (8, 0),
    "L40S": (8, 9),
    "RTX 4090": (8, 9),
    "H100": (9, 0),
    "B200": (10, 0),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the device and the build that the functions see; the caches are emptied."""
    with ExitStack() as stack:

        def become(
            capability: tuple[int, int], build: KernelBuild, driver: int | None = None
        ) -> torch.device:
            module = SimpleNamespace(
                compiled_archs=lambda: list(build.archs),
                grouped_gemm_archs=lambda: list(build.grouped),
                runtime_version=lambda: build.cuda,
            )
            monkeypatch.setattr(cuda_module, "_CUDA", module if build.archs else None)
            stack.enter_context(assume_device(DeviceFacts(capability=capability, driver=driver)))
            return torch.device("cuda", 0)

        yield become


@pytest.mark.parametrize(
    ("capability", "build", "reason"),
    [
        ((9, 0), BOTH, None),
        ((10, 0), BOTH, None),
        ((8, 0), KernelBuild(archs=("80",)), "exist for compute capability 9.0 and 10.0 only"),
        ((12, 0), KernelBuild(archs=("120a",)), "and the device has 12.0"),
        ((8, 9), BOTH, "and the device has 8.9"),
        ((9, 0), KernelBuild(archs=("90a",)), "without CUTLASS's headers"),
        ((9, 0), KernelBuild(archs=("80",)), "kernels for sm_80, and the device is sm_90"),
        ((10, 0), KernelBuild(archs=("90a",), grouped=("90a",)), "for sm_90a, and the device is"),
        ((9, 0), KernelBuild(), "installed without CUDA kernels"),
    ],
)
def test_a_missing_grouped_product_has_its_true_reason(
    device: Any, capability: tuple[int, int], build: KernelBuild, reason: str | None
) -> None:
    found = gemm_cuda.grouped_obstacle(device(capability, build), 8, 64, 64)
    assert found is None if reason is None else reason in str(found)
    if capability[0] not in (9, 10):
        assert "CUTLASS" not in str(found)


def test_doctor_asks_for_headers_only_where_they_would_help() -> None:
    assert _grouped_products(["90a"], ["90a"]) == "built for 90a"
    assert "CUTLASS_ROOT" in _grouped_products([], ["90a"])
    assert _grouped_products([], ["80", "89"]).startswith("none: they exist for 90a, 100a only")


@pytest.mark.parametrize(
    ("name", "build", "expected"),
    [
        ("H100", BOTH, "sm_90a, grouped products native"),
        ("B200", BOTH, "sm_100a, grouped products native"),
        (
            "A100",
            BOTH,
            "none: this build has kernels for sm_90a and sm_100a, and the device is sm_80; "
            "MEGACORE_CUDA_ARCHS=80 pip install . builds them, grouped products one per",
        ),
        (
            "RTX 4090",
            BOTH,
            "none: this build has kernels for sm_90a and sm_100a, and the device is",
        ),
        ("L40S", KernelBuild(archs=("80",), cuda=13000), "sm_80, grouped products one per expert"),
        ("H100", KernelBuild(), "none: megacore was installed without CUDA kernels"),
        ("A100", FOUR, "sm_80, grouped products one per expert"),
        ("L40S", FOUR, "sm_80, grouped products one per expert"),
        ("RTX 4090", FOUR, "sm_80, grouped products one per expert"),
        ("H100", FOUR, "sm_90a, grouped products native"),
        ("B200", FOUR, "sm_100a, grouped products native"),
    ],
)
def test_the_line_names_what_runs(name: str, build: KernelBuild, expected: str) -> None:
    facts = DeviceFacts(capability=DEVICES[name], driver=13000)
    line = kernel_text(build, facts, has_torch_grouped=False)
    assert line.startswith(expected)
    assert "grouped products of torch" in kernel_text(KernelBuild(), facts, has_torch_grouped=True)


def test_a_driver_older_than_the_toolkit_runs_no_kernels() -> None:
    old = DeviceFacts(capability=(9, 0), driver=12080)
    assert BOTH.obstacle(old) == (
        "the driver supports CUDA 12.8, and the kernels were built with 13.0; update it, or build "
        "with an older toolkit"
    )
    assert kernel_text(BOTH, old, has_torch_grouped=True).endswith("grouped products of torch")
    assert BOTH.obstacle(DeviceFacts(capability=(9, 0), driver=13010)) is None
    assert BOTH.obstacle(DeviceFacts(capability=(9, 0))) is None


@pytest.mark.parametrize("name", DEVICES)
def test_operations_take_the_kernels_that_a_device_runs(device: Any, name: str) -> None:
    runs = name in ("H100", "B200")
    on = device(DEVICES[name], BOTH)
    warns = nullcontext() if runs else pytest.warns(UserWarning, match="take torch's kernels: this")
    with warns:
        assert runs_kernels(on) == runs
    assert runs_kernels(on) == runs  # told once
    assert (gemm_cuda.grouped_obstacle(on, 8, 64, 64) is None) == runs


def test_answers_on_a_device_end_with_its_assumption(device: Any) -> None:
    on, sizes = device(DEVICES["H100"], BOTH), (8, 64, 64)
    assert gemm_cuda.grouped_obstacle(on, *sizes) is None
    assert gemm_cuda.fp8_obstacle(on, torch.bfloat16, *sizes) is None
    with assume_device(DeviceFacts(capability=DEVICES["B200"])):
        assert "9.0 only" in str(gemm_cuda.fp8_obstacle(on, torch.bfloat16, *sizes))
    assert gemm_cuda.fp8_obstacle(on, torch.bfloat16, *sizes) is None


def test_a_build_without_kernels_warns_of_nothing(device: Any) -> None:
    assert not runs_kernels(device((9, 0), KernelBuild()))


class Linear(nn.Module):
    linear = staticmethod(fp8_linear)

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))


def _products(device: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> Fp8Products:
    gpu = device((9, 0), BOTH)
    monkeypatch.setattr(nn.Parameter, "device", property(lambda _: gpu))
    return Fp8Products.of([nn.ModuleList([Linear(64, 32), Linear(72, 32), nn.Linear(8, 8)])], dtype)


def test_emulated_layers_are_named(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _products(device, monkeypatch, torch.bfloat16)
    assert found.text() == "emulated in 1 of 2 products"
    [note] = found.notes("bfloat16")
    assert "slower than bfloat16 alone" in note
    assert note.endswith("multiples of 16: 1.weight (out 72, in 32)")


def test_a_dtype_without_kernels_emulates_all(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _products(device, monkeypatch, torch.float32)
    assert found.text() == "emulated"
    assert found.notes("float32") == (
        "train.fp8 is emulated, slower than float32 alone: 8-bit products exist for bfloat16, not "
        "for float32",
    )


def test_a_device_without_kernels_is_named(device: Any) -> None:
    gpu = device((8, 0), KernelBuild(archs=("80",)))
    reason = gemm_cuda.fp8_obstacle(gpu, torch.bfloat16, 1, 64, 64)
    assert reason == (
        "8-bit products exist for compute capability 9.0 only, and the device has 8.0"
    )
    model = nn.ModuleList([Linear(64, 32)])
    assert "on the CPU" in Fp8Products.of([model], torch.bfloat16).notes("bfloat16")[0]
