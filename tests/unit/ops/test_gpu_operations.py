"""The GPU's functions of compiled operations, without a GPU: on emulated kernels, for CPU tensors.

`make test-cpp` compiles them. Results are compared with those of the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.moe.echo import reroute
from megacore.ops import cuda_module, dense, gemm_cuda, normed_rotation, permutation
from megacore.ops.kernel_choice import leaving
from megacore.qualification import compare, operation_names
from tests.support.emulated_kernels import load_kernels
from tests.unit.ops.test_compiled import OPS, arguments_of, strided_arguments, without_times

NAMES = sorted(set(arguments_of()) - {"grouped_product"})
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def define_emulated(names: Iterable[str]) -> Iterator[Any]:
    """Yield the namespace of operations on emulated kernels."""
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("the emulated kernels are not compiled as they are now; see make test-cpp")
    library = torch.library.Library("megacore_emulated", "DEF")  # type: ignore[no-untyped-call]
    for name in names:
        schema = str(getattr(OPS, f"_{name}").default._schema).removeprefix("megacore::")
        library.define(schema)  # type: ignore[no-untyped-call]
    assert kernels.megacore_register_emulated(b"megacore_emulated")
    yield torch.ops.megacore_emulated
    library._destroy()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def emulated() -> Iterator[Any]:
    yield from define_emulated([*NAMES, "grouped_gemm_"])


def gpu_arguments(name: str, dtype: torch.dtype) -> list[Any]:
    """Arguments with the widths that the GPU's kernels take."""
    given = arguments_of(dtype)[name]
    draw = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    if name in ("rms_norm", "add_rms_norm", "rms_norm_backward"):
        wide = [random(3, 2, 32) if isinstance(x, Tensor) and x.dim() == 3 else x for x in given]
        wide = [random(32) if isinstance(x, Tensor) and x.dim() == 1 else x for x in wide]
        if name == "rms_norm_backward":
            wide[3] = torch.rand(3, 2, 1, generator=draw) + 0.5
        return wide
    if name.startswith("norm_and_rotate"):
        tables = [torch.randn(4, 16, generator=draw) for _ in range(2)]
        weights, qkv = (random(32), random(32)), random(3, 2, 2, 4 * 32)
        if name == "norm_and_rotate":
            return [qkv, *weights, *tables, 32, 1e-5]
        scale = torch.rand(3, 2, 2, 3, generator=draw) + 0.5
        heads = random(3, 2, 4, 32), random(3, 2, 2, 32), random(3, 2, 2, 32)
        return [*heads, qkv, *weights, scale, *tables, True, True]
    return given


def copied(arguments: list[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in arguments]


def results(operation: Any, arguments: list[Any]) -> list[Tensor]:
    found = operation(*arguments)
    found = [found] if isinstance(found, Tensor) else list(found or ())
    written = [x for x in arguments if isinstance(x, Tensor)]
    return [*without_times(operation.__name__, found), *written]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.dtype == torch.float8_e4m3fn:  # of one bit pattern in both
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        tolerance = 1e-2 if one.dtype in (torch.bfloat16, torch.float16) else 3e-6
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_the_cpu(emulated: Any, name: str, dtype: torch.dtype) -> None:
    arguments = gpu_arguments(name, dtype)
    found = results(getattr(emulated, f"_{name}"), copied(arguments))
    expected = results(getattr(OPS, name), copied(arguments))
    if name in ("adamw_step_", "decide_step_"):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert_same(found, expected)


def moved(tensor: Tensor) -> Tensor:
    """The same numbers one element behind an address that kernels can load packs from."""
    memory = tensor.new_empty(tensor.numel() + 1)
    assert memory.data_ptr() % 16 == 0
    return memory[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("name", NAMES)
def test_any_strides_and_addresses_are_taken(emulated: Any, name: str) -> None:
    arguments = gpu_arguments(name, torch.bfloat16)
    expected = results(getattr(emulated, f"_{name}"), copied(arguments))
    strided = strided_arguments(name, arguments)
    assert_same(results(getattr(emulated, f"_{name}"), strided), expected)
    if name not in ("swiglu", "gelu", "swiglu_backward", "gelu_backward"):
        shifted = [moved(x) if isinstance(x, Tensor) else x for x in arguments]
        assert_same(results(getattr(emulated, f"_{name}"), shifted), expected)


def test_wrong_shapes_are_refused_with_both(emulated: Any) -> None:
    with pytest.raises(ValueError, match=r"weight must be \(8,\), as wide as x \(2, 8\), got \(7,"):
        emulated._rms_norm(torch.ones(2, 8), torch.ones(7), 0.0)


@pytest.mark.parametrize("product", ["forward", "input_grad", "weight_grad"])
def test_grouped_products_reach_their_launcher(
    emulated: Any, monkeypatch: pytest.MonkeyPatch, product: gemm_cuda.Product
) -> None:
    monkeypatch.setattr(gemm_cuda, "_grouped_gemm", emulated._grouped_gemm_)
    rows, w = torch.ones(6, 16).bfloat16(), torch.ones(2, 16, 16).bfloat16()
    splits, first_row = torch.tensor([2, 3]), torch.tensor(1)
    first, second, out = (rows, rows, w.float()) if product == "weight_grad" else (rows, w, rows)
    mask = torch.tensor([True, False]) if product == "weight_grad" else None
    with pytest.raises(RuntimeError, match="no grouped product"):
        gemm_cuda.launch_grouped(
            product, first, second, splits, out, accumulate_mask=mask, first_row=first_row
        )
    with pytest.raises(ValueError, match=r"m_splits must have 2 int64 entries, .* got \(3,\)"):
        gemm_cuda.launch_grouped(product, first, second, torch.ones(3).long(), out)


@pytest.mark.parametrize("is_balanced", [False, True])
def test_plans_are_those_of_the_cpu(emulated: Any, is_balanced: bool) -> None:
    num_clones = 0
    for seed, (ranks, experts) in enumerate([(1, 4), (2, 2), (4, 8), (7, 21), (4, 16)]):
        random = torch.Generator().manual_seed(seed)
        counts = (torch.rand(ranks, experts, generator=random) ** seed * 300).long()
        options = seed % ranks, seed % 3 + 1, is_balanced, 10_000 * (seed % 2), 10**6, 0
        found = results(emulated._plan_offload, [counts, *options])
        expected = results(OPS.plan_offload, [counts, *options])
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        num_clones += int(expected[5][1])
    assert num_clones > 0


# Sizes that the GPU's kernels do not take: their operations go to the reference.
FITS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "rms_norm_backward"), dense._cuda_fits),
    "split_and_rotate": lambda *args: args[3] % 2 == 0,
    "split_and_rotate_backward": lambda *args: args[0].shape[-1] % 2 == 0,
    "norm_and_rotate": normed_rotation._cuda_fits,
    "norm_and_rotate_backward": normed_rotation._backward_cuda_fits,
    "sort_by_expert": permutation._sorts,
    "reroute": reroute._fits,
}
LIMITS = {"MAX_NORM_BYTES": 1 << 16, "MAX_NORMED_HEAD_BYTES": 1 << 10, "MAX_SORTED_EXPERTS": 512}


@pytest.mark.parametrize("num_sizes", [4, pytest.param(8, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", NAMES)
def test_a_qualification_finds_no_fault(
    emulated: Any, monkeypatch: pytest.MonkeyPatch, name: str, num_sizes: int
) -> None:
    monkeypatch.setattr(compare, "AWKWARD", compare.AWKWARD[:num_sizes])
    monkeypatch.setattr(cuda_module, "_CUDA", SimpleNamespace(**LIMITS))
    kernel, fits, calls = getattr(emulated, f"_{name}"), FITS.get(name), 0

    def run(*arguments: Any) -> Any:
        nonlocal calls
        if fits is not None and not fits(*arguments):
            with leaving(operation_names("cpu"), "cpu"):
                return getattr(OPS, name)(*arguments)
        calls += 1
        return kernel(*arguments)

    own = torch.library.Library("megacore", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the CPU's kernel is there
        own.impl(f"_{name}", run, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
    try:
        assert compare.first_difference(name, torch.device("cpu")) is None
    finally:
        own._destroy()  # type: ignore[no-untyped-call]
    assert calls >= 4
