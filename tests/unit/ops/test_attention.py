"""Attention of 16-bit numbers in float32: its error is at most that of torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megacore.ops.attention import Attended, attention, flash_on_cpu, flash_on_cpu_backward
from megacore.ops.kernel_choice import MEASURED, leaving

BATCH, SEQ, WIDTH = 2, 70, 24
DTYPES = [torch.bfloat16, torch.float16]


def draw(heads: int, groups: int, width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, WIDTH), (groups, WIDTH), (groups, width), (heads, width))
    return [torch.randn(BATCH, n, SEQ, size, generator=generator) for n, size in shapes]


def passes(
    tensors: Sequence[Tensor], dtype: torch.dtype, left: Sequence[str], **options: object
) -> list[Tensor]:
    *inputs, grad = (x.to(dtype) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in inputs]
    with leaving(left, "cpu"):
        mixed = attention(*leaves, **options)  # type: ignore[arg-type]
        results = [mixed.detach(), *torch.autograd.grad(mixed, leaves, grad)]
    assert all(x.dtype == dtype for x in results)
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.3}])
@pytest.mark.parametrize("groups", [4, 2])
def test_errors_are_at_most_those_of_torch(
    dtype: torch.dtype, options: dict[str, object], groups: int
) -> None:
    tensors = [x.to(dtype).double() for x in draw(4, groups)]
    options = {**options, "grouped": groups < 4}
    exact = passes(tensors, torch.float64, (), **options)
    ours = passes(tensors, dtype, (), **options)
    other = passes(tensors, dtype, MEASURED, **options)
    for one, two, right in zip(ours, other, exact, strict=True):
        error = float((one.double() - right).norm() / right.norm())
        assert error <= 1.05 * float((two.double() - right).norm() / right.norm())
        assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [WIDTH, 16])
def test_masks_and_narrower_values_are_widened_too(dtype: torch.dtype, width: int) -> None:
    tensors = [x.to(dtype).double() for x in draw(2, 2, width)]
    mask = torch.ones(SEQ, SEQ).tril().log()
    exact = passes(tensors, torch.float64, (), mask=mask.double())
    for given in (mask.to(dtype), mask.isfinite()):
        for one, right in zip(passes(tensors, dtype, (), mask=given), exact, strict=True):
            assert (one.double() - right).norm() < 4 * torch.finfo(dtype).eps * right.norm()


def test_torch_computes_what_is_not_measured() -> None:
    q, k, v, _ = (x.bfloat16() for x in draw(2, 2))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(attention(q, k, v, is_causal=True), expected)


def test_passes_of_tiles_are_those_of_the_whole() -> None:
    q, k, v, grad = (x.bfloat16() for x in draw(2, 2))
    options = {"mask": None, "is_causal": True, "scale": None}
    with leaving((), "cpu"):
        mixed, lse = flash_on_cpu(q, k, v, **options)  # type: ignore[arg-type]
        found = flash_on_cpu_backward(grad, Attended(q, k, v, mixed, lse), **options)  # type: ignore[arg-type]
    assert lse.dtype == torch.float32
    expected = passes((q, k, v, grad), torch.bfloat16, (), is_causal=True)
    for one, other in zip((mixed, *found), expected, strict=True):
        assert torch.equal(one, other)
