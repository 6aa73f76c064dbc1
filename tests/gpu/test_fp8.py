"""8-bit operands on the GPU: rounding against torch operations, products against emulated ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacore.ops.fp8 import fp8_grouped_gemm, fp8_linear
from megacore.ops.gemm_cuda import takes_fp8_kernels
from megacore.ops.kernel_choice import leaving
from megacore.ops.quantize import (
    BLOCK,
    quantize_blocks,
    quantize_blocks_reference,
    quantize_columns,
    quantize_columns_reference,
    quantize_rows,
    quantize_rows_reference,
    row_blocks,
)
from tests.gpu.test_grouped_gemm import SPLITS, synchronising_is_an_error
from tests.support.quantize import assert_same, awkward

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TAIL = 37  # rows of no expert


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 128), (130, 200), (70, 1032), (9, 1031)])
def test_rows_and_blocks_have_the_bits_of_the_reference(
    rows: int, width: int, dtype: torch.dtype
) -> None:
    x = awkward(rows, width, dtype).cuda()
    w = torch.stack([x, x.flip(0)])
    used = torch.tensor(rows // 2, device="cuda")
    with synchronising_is_an_error():
        found = quantize_rows(x)
        some = quantize_rows(x, used)
        blocks = [quantize_blocks(w, transposed=turned) for turned in (False, True)]
    expected = quantize_rows_reference(x)
    assert_same(found, expected)
    half = slice(rows // 2)
    assert_same((some[0][half], some[1][half]), (expected[0][half], expected[1][half]))
    for turned in (False, True):
        assert_same(blocks[turned], quantize_blocks_reference(w, turned))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("width", [200, 33])
def test_columns_have_the_bits_of_the_reference(kind: str, width: int, dtype: torch.dtype) -> None:
    counts = SPLITS[kind]
    x, splits = (
        awkward(sum(counts) + TAIL, width, dtype).cuda(),
        torch.tensor(counts, device="cuda"),
    )
    with synchronising_is_an_error():
        found = [quantize_columns(x, splits, transposed=turned) for turned in (False, True)]
    used = row_blocks(splits, len(x))[0][: sum(counts)].unique()
    elements = torch.arange(BLOCK * width, device="cuda")
    places = (
        slice(sum(counts)),
        (used[:, None] * BLOCK * width + elements).flatten(),
    )
    for turned in (False, True):
        expected = quantize_columns_reference(x, splits, turned)
        values, scales = found[turned]
        place = places[turned]
        assert_same((values[place], scales[used]), (expected[0][place], expected[1][used]))


def _product(
    x: Tensor, w: Tensor, splits: Tensor | None, grad: Tensor, main_grad: Tensor | None
) -> tuple[Tensor, ...]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    if splits is None:
        y = fp8_linear(x, w[0])
    else:
        y = fp8_grouped_gemm(x, w, splits, main_grad=main_grad)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad, main_grad if w.grad is None else w.grad.float()


@pytest.fixture
def _needs_kernels() -> None:
    if not takes_fp8_kernels(torch.empty(1, device="cuda", dtype=torch.bfloat16), 1, 16, 16):
        pytest.skip("products of 8-bit operands need capability 9.0 and a build with CUTLASS")


@pytest.mark.usefixtures("_needs_kernels")
@pytest.mark.parametrize("shape", [(16, 16), (272, 208), (128, 1024), (1040, 384)])
@pytest.mark.parametrize("kind", [*SPLITS, "dense"])
def test_products_are_near_emulated_ones(kind: str, shape: tuple[int, int]) -> None:
    n, k = shape
    counts = SPLITS.get(kind, [300])
    splits = None if kind == "dense" else torch.tensor(counts, device="cuda")
    tail = 0 if splits is None else TAIL
    torch.manual_seed(1)
    x = torch.randn(sum(counts) + tail, k, device="cuda").bfloat16()
    w = torch.randn(len(counts), n, k, device="cuda").bfloat16()
    grad = torch.randn(len(x), n, device="cuda").bfloat16()
    x[sum(counts) :] = torch.nan  # never read
    grad[sum(counts) :] = torch.nan
    main_grads = [None if splits is None else torch.ones_like(w.float()) for _ in range(2)]
    _product(x, w, splits, grad, None)  # fills the caches of device facts
    with synchronising_is_an_error():
        found = _product(x, w, splits, grad, main_grads[0])
    with leaving(["grouped_product", "fp8_product"], "cuda"):
        expected = _product(x, w, splits, grad, main_grads[1])
    for left, right in zip(found, expected, strict=True):
        # Emulated operands are rounded to bf16 once more, after they are scaled back.
        assert left.isfinite().all()
        assert (left.float() - right.float()).norm() <= 1e-2 * right.float().norm() + 1e-6
        torch.testing.assert_close(left.float(), right.float(), rtol=3e-2, atol=0.05 * k**0.5)
    assert not found[0][sum(counts) :].any()
    assert not found[1][sum(counts) :].any()


@pytest.mark.usefixtures("_needs_kernels")
def test_no_rows_give_no_gradient() -> None:
    x = torch.randn(0, 32, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(48, 32, device="cuda").bfloat16().requires_grad_()
    fp8_linear(x, w).sum().backward()
    assert w.grad is not None
    assert not w.grad.any()


@pytest.mark.usefixtures("_needs_kernels")
def test_a_graph_replays_with_other_counts() -> None:
    x = torch.randn(512, 256, device="cuda").bfloat16()
    w = torch.randn(4, 128, 256, device="cuda").bfloat16()
    grad = torch.randn(512, 128, device="cuda").bfloat16()
    main_grad = torch.zeros(4, 128, 256, device="cuda")
    splits = torch.tensor([128, 128, 128, 128], device="cuda")
    _product(x, w, splits, grad, main_grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grad_x, _ = _product(x, w, splits, grad, main_grad)
    for counts in ([0, 300, 12, 200], [512, 0, 0, 0]):
        splits.copy_(torch.tensor(counts))
        main_grad.zero_()
        graph.replay()
        other = torch.zeros_like(main_grad)
        expected = _product(x, w, torch.tensor(counts, device="cuda"), grad, other)
        for left, right in zip((y, grad_x, main_grad), expected, strict=True):
            assert torch.equal(left, right)


@pytest.mark.usefixtures("_needs_kernels")
def test_a_number_that_is_not_finite_reaches_its_own_rows_alone() -> None:
    x = torch.randn(300, 256, device="cuda").bfloat16()
    x[7, 130] = torch.inf
    y = fp8_linear(x, torch.randn(64, 256, device="cuda").bfloat16())
    assert y[7].isnan().all()
    assert y[:7].isfinite().all()
    assert y[8:].isfinite().all()
