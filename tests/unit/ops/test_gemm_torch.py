"""Grouped products by torch._grouped_mm: the reference's results, also for ragged counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacore.ops import gemm_cpu, gemm_cuda, gemm_torch, grouped_product
from megacore.ops.kernel_choice import leaving

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "_grouped_mm"), reason="this torch has no _grouped_mm"
)
N, K = 16, 24
FORWARD, INPUT_GRAD, WEIGHT_GRAD = gemm_cuda.PRODUCTS.values()
COUNTS = ([3, 0, 5, 2], [0, 0, 0, 0], [0, 0, 0, 12], [4, 4, 4, 0])


def factors(num_rows: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((num_rows, K), (4, N, K), (num_rows, N))
    x, w, grad = (torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)
    return x, w, grad


@pytest.mark.parametrize("counts", COUNTS)
def test_products_are_those_of_the_reference(counts: list[int]) -> None:
    x, w, grad = factors()
    splits = torch.tensor(counts)
    assert gemm_torch.has_grouped_mm(x, *w.shape)
    for found, expected in (
        (gemm_torch.forward(x, w, splits), gemm_cpu.forward_reference(x, w, splits)),
        (gemm_torch.input_grad(grad, w, splits), gemm_cpu.input_grad_reference(grad, w, splits)),
    ):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert not found[sum(counts) :].any()  # padding
    mask = torch.tensor([True, False, True, False])
    for accumulate, accumulate_mask in ((False, None), (True, None), (True, mask)):
        found, expected = torch.full((2, 4, N, K), 0.5)
        arguments = accumulate, accumulate_mask
        gemm_torch.weight_grad_(grad, x, splits, found, *arguments)
        gemm_cpu.weight_grad_reference_(grad, x, splits, expected, *arguments)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-2)


def test_counts_that_do_not_fit_are_truncated_and_no_rows_are_fine() -> None:
    x, w, _ = factors()
    expected = gemm_cpu.forward_reference(x, w, torch.tensor([7, 0, 5, 0]))
    found = gemm_torch.forward(x, w, torch.tensor([7, -3, 90, 4]))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    x, w, grad = factors(0)
    none = torch.zeros(4, dtype=torch.int64)
    assert gemm_torch.forward(x, w, none).shape == (0, N)
    out = torch.ones(4, N, K)
    gemm_torch.weight_grad_(grad, x, none, out, False)
    assert not out.any()


@pytest.mark.parametrize(
    ("obstacle", "is_left", "expected"),
    [(None, False, "native"), ("no kernel", False, "torch"), (None, True, "torch")],
)
def test_ours_then_torchs_is_chosen(
    monkeypatch: pytest.MonkeyPatch, obstacle: str | None, is_left: bool, expected: str
) -> None:
    monkeypatch.setattr(gemm_cuda, "_grouped_obstacle", lambda *_: obstacle)
    x = torch.empty(8, K, dtype=torch.bfloat16)
    with leaving(["grouped_product"] if is_left else [], "cuda"):
        assert gemm_cuda.choose_backend(x, 4, N, K) == expected
    assert gemm_cuda.choose_backend(x.float(), 4, N, K) == "reference"
    reason = "our grouped products are left out" if is_left else obstacle
    if reason is not None:
        with (
            leaving(["grouped_product"] if is_left else [], "cuda"),
            pytest.warns(UserWarning, match=f"waits for the GPU: {reason}"),
        ):
            assert gemm_cuda.choose_backend(x.half(), 4, N, K) == "reference"


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_ops_use_the_chosen_backend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """The implementations for CUDA, run on CPU tensors: none of them reaches our kernels."""
    monkeypatch.setattr(grouped_product, "choose_backend", lambda *_: backend)
    x, w, grad = factors()
    splits = torch.tensor(COUNTS[0])
    product = grouped_product.product_on_cuda
    y = product(x, w, splits, FORWARD)
    torch.testing.assert_close(y, gemm_cpu.forward_reference(x, w, splits), rtol=2e-2, atol=2e-2)
    grad_x = product(grad, w, splits, INPUT_GRAD)
    expected = gemm_cpu.input_grad_reference(grad, w, splits)
    torch.testing.assert_close(grad_x, expected, rtol=2e-2, atol=2e-2)
    found, expected = torch.zeros(2, 4, N, K)
    product(grad, x, splits, WEIGHT_GRAD, found, accumulate=True)
    gemm_cpu.weight_grad_reference_(grad, x, splits, expected, True)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-2)
