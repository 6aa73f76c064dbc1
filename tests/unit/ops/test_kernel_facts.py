"""Reasons and lines on kernels, with devices and builds that are not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megacore.ops import gemm_cuda
from megacore.ops.fp8 import fp8_linear
from megacore.ops.kernel_facts import Fp8Products, KernelBuild, kernel_text
from megatrain.cli.doctor import _grouped_products

H100 = KernelBuild(archs=("90a", "100a"), grouped=("90a", "100a"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the capability and the build that the functions see; the caches are emptied."""

    def become(capability: tuple[int, int], build: KernelBuild) -> torch.device:
        module = SimpleNamespace(
            compiled_archs=lambda: list(build.archs), grouped_gemm_archs=lambda: list(build.grouped)
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(gemm_cuda, "has_cuda_kernels", lambda: bool(build.archs))
        monkeypatch.setattr(gemm_cuda, "cuda_kernels", lambda: module)
        empty()
        return torch.device("cuda", 0)

    def empty() -> None:
        gemm_cuda.grouped_obstacle.cache_clear()
        gemm_cuda._fp8_obstacle.cache_clear()

    yield become
    empty()


@pytest.mark.parametrize(
    ("capability", "build", "reason"),
    [
        ((9, 0), H100, None),
        ((10, 0), H100, None),
        ((8, 0), KernelBuild(archs=("80",)), "exist for compute capability 9.0 and 10.0 only"),
        ((12, 0), KernelBuild(archs=("120a",)), "and the device has 12.0"),
        ((8, 9), H100, "and the device has 8.9"),
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
    ("capability", "build", "expected"),
    [
        ((9, 0), H100, "sm_90a, grouped products native"),
        ((8, 0), H100, "none for sm_80: this build has sm_90a, sm_100a, grouped products one per"),
        ((8, 9), KernelBuild(archs=("80",)), "sm_80, grouped products one per expert"),
        ((10, 3), H100, "none for sm_103"),
        ((9, 0), KernelBuild(), "none: megacore was installed without CUDA kernels"),
    ],
)
def test_the_line_names_what_runs(
    capability: tuple[int, int], build: KernelBuild, expected: str
) -> None:
    line = kernel_text(build, capability, has_torch_grouped=False)
    assert line.startswith(expected)
    assert "grouped products of torch" in kernel_text(
        KernelBuild(), capability, has_torch_grouped=True
    )


class Linear(nn.Module):
    linear = staticmethod(fp8_linear)

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))


def _products(device: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> Fp8Products:
    gpu = device((9, 0), H100)
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
