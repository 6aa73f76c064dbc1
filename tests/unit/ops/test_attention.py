"""Attention by our kernel, and by torch in float32: errors are at most those of torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn.functional import scaled_dot_product_attention

from megacore.ops import gemm_cpu
from megacore.ops.attention import (
    Attended,
    attention,
    flash_on_cpu,
    flash_on_cpu_backward,
    takes_any_width,
)
from megacore.ops.kernel_choice import MEASURED, leaving

BATCH, SEQ, WIDTH = 2, 70, 24
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NARROW = DTYPES[1:]


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
        assert error < 4 * torch.finfo(dtype).eps
        # In float32 both are sums in another order.
        slack = 1.05 if dtype in NARROW else 2.0
        assert error <= slack * float((two.double() - right).norm() / right.norm())


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("width", [WIDTH, 16])
def test_masks_and_narrower_values_are_widened_too(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_cpu, "has_fast_products", lambda _: False)
    tensors = [x.to(dtype).double() for x in draw(2, 2, width)]
    mask = torch.ones(SEQ, SEQ).tril().log()
    exact = passes(tensors, torch.float64, (), mask=mask.double())
    for given in (mask.to(dtype), mask.isfinite()):
        for one, right in zip(passes(tensors, dtype, (), mask=given), exact, strict=True):
            assert (one.double() - right).norm() < 4 * torch.finfo(dtype).eps * right.norm()


def with_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """The same tensor with its axes in another order in memory."""
    back = sorted(range(x.dim()), key=lambda axis: order[axis])
    return x.permute(*order).contiguous().permute(*back)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3), (3, 1, 2, 0)])
def test_any_strides_have_the_same_bits_and_results_their_order(
    dtype: torch.dtype, order: tuple[int, ...]
) -> None:
    q, k, v, grad = (x.to(dtype) for x in draw(4, 2))
    expected = passes((q, k, v, grad), dtype, (), is_causal=True, grouped=True)
    ordered = [with_order(x, order) for x in (q, k, v, grad)]
    found = passes(ordered, dtype, (), is_causal=True, grouped=True)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    if order[-1] == 3:
        for one, like in zip(found, [q, *ordered[:3]], strict=True):
            assert one.permute(*order).is_contiguous() or one.shape != like.shape
        assert found[0].permute(*order).is_contiguous()


def test_keys_shared_by_heads_without_memory_of_their_own() -> None:
    q, k, v, grad = draw(4, 1)
    shared = [x.expand(-1, 4, -1, -1) for x in (k, v)]
    expected = passes((q, *(x.contiguous() for x in shared), grad), torch.float32, ())
    for one, other in zip(passes((q, *shared, grad), torch.float32, ()), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.ones(2, 3, 5, 8)}, r"k \(2, 3, 5, 8\) and v .* do not fit q \(2, 4, 5, 8\)"),
        ({"v": torch.ones(2, 2, 5, 300)}, "dimensions of heads must be at most 256, got 8 and 300"),
        ({"q": torch.ones(2, 4, 0, 8)}, r"q, k and v must have elements, got \(2, 4, 0, 8\)"),
        ({"q": torch.ones(4, 5, 8)}, r"must have 4 axes, got \(4, 5, 8\)"),
        ({"q": torch.ones(2, 4, 5, 8).double()}, "q must be float32, bfloat16 or float16"),
        ({"k": torch.ones(2, 2, 5, 8).half()}, "all operands must have the dtype of q"),
        ({"scale": -1.0}, "scale must be at least 0, got -1"),
    ],
)
def test_the_kernel_refuses_what_it_cannot_compute(changes: dict[str, Any], message: str) -> None:
    given = {"q": torch.ones(2, 4, 5, 8), "k": torch.ones(2, 2, 5, 8), "v": torch.ones(2, 2, 5, 8)}
    arguments = {**given, "is_causal": True, "scale": 1.0, **changes}
    with pytest.raises(ValueError, match=message):
        torch.ops.megacore._attention(*arguments.values())


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 4, 0, 8), (2, 2, 0, 8), (2, 2, 0, 8)],
        [(1, 2, 5, 300), (1, 2, 5, 300), (1, 2, 5, 300)],
        [(2, 4, 1, 8), (2, 2, 9, 8), (2, 2, 9, 8)],
    ],
)
def test_torch_computes_what_has_no_kernel(shapes: list[tuple[int, ...]]) -> None:
    q, k, v = (torch.ones(shape) for shape in shapes)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with leaving((), "cpu"):
        assert torch.equal(attention(q, k, v, is_causal=True, grouped=True), expected)


def test_values_of_another_width_are_padded_where_the_kernel_is_not_called() -> None:
    q, k, v, _ = draw(2, 2, 9)
    with leaving((), "cpu"):
        assert takes_any_width(q, k, v)
        with torch.autocast("cpu"):
            assert not takes_any_width(q, k, v)
            assert takes_any_width(q, k, q)


def test_torch_knows_the_operations() -> None:
    q, k, v, grad = (with_order(x, (2, 0, 1, 3)) for x in draw(4, 2, 16))
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.megacore
    opcheck(ops._attention.default, (q, k, v, True, 0.3), test_utils=checks)
    done = (grad, q, k, v, *ops._attention(q, k, v, True, 0.3))
    opcheck(ops._attention_backward.default, (*done, True, 0.3), test_utils=checks)


def test_masks_are_torchs_in_16_bits_where_these_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_cpu, "has_fast_products", lambda _: True)
    q, k, v, _ = (x.bfloat16() for x in draw(2, 2))
    mask = torch.ones(SEQ, SEQ).tril().log().bfloat16()
    with leaving((), "cpu"):
        found = attention(q, k, v, mask=mask)
    assert torch.equal(found, scaled_dot_product_attention(q, k, v, attn_mask=mask))


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
