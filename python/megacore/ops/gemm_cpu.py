"""Grouped products on the CPU, and their references with torch's products.

Shapes: as in :mod:`megacore.ops.gemm`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megacore.ops import gemm_torch
from megacore.ops.kernel_choice import Product, is_left, linear_name


def groups_of(m_splits: Tensor, num_rows: int) -> list[tuple[int, int, int]]:
    """Return ``(expert, first row, end)`` of every expert that has rows."""
    counts = m_splits.tolist()
    if any(count < 0 for count in counts) or sum(counts) > num_rows:
        raise ValueError(
            f"m_splits {counts} do not fit {num_rows} rows; every entry must be >= 0 and their sum "
            f"at most {num_rows}"
        )
    groups, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            groups.append((expert, start, start + count))
        start += count
    return groups


def forward_reference(x: Tensor, w: Tensor, m_splits: Tensor, clear_padding: bool = True) -> Tensor:
    """Compute ``grouped_gemm`` with a product of torch for each expert, on any device."""
    y = x.new_empty(x.shape[0], w.shape[1])
    used = 0
    for expert, start, used in groups_of(m_splits, x.shape[0]):
        torch.mm(x[start:used], w[expert].t(), out=y[start:used])
    if clear_padding:
        y[used:] = 0
    return y


def input_grad_reference(
    grad: Tensor, w: Tensor, m_splits: Tensor, clear_padding: bool = True
) -> Tensor:
    """Compute the gradient of ``x`` with a product of torch for each expert, on any device."""
    grad_x = grad.new_empty(grad.shape[0], w.shape[2])
    used = 0
    for expert, start, used in groups_of(m_splits, grad.shape[0]):
        torch.mm(grad[start:used], w[expert], out=grad_x[start:used])
    if clear_padding:
        grad_x[used:] = 0
    return grad_x


def weight_grad_reference_(
    grad: Tensor,
    x: Tensor,
    m_splits: Tensor,
    out: Tensor,
    accumulate: bool,
    accumulate_mask: Tensor | None = None,
) -> None:
    """Compute the gradient of ``w`` with a product of torch for each expert, on any device."""
    groups = groups_of(m_splits, x.shape[0])
    if not accumulate:
        for expert in set(range(out.shape[0])) - {expert for expert, _, _ in groups}:
            out[expert].zero_()
    elif accumulate_mask is not None:
        out.masked_fill_(~accumulate_mask[:, None, None], 0.0)
    for expert, start, end in groups:
        left, right = grad[start:end].to(out.dtype).t(), x[start:end].to(out.dtype)
        if accumulate:
            out[expert].addmm_(left, right)
        else:
            torch.mm(left, right, out=out[expert])


REFERENCES: Mapping[str, Callable[..., Any]] = {
    "forward": forward_reference,
    "input_grad": input_grad_reference,
    "weight_grad": weight_grad_reference_,
}


# The choice on the CPU follows benchmarks/results/moe_cpu*.txt: float32 uses the native kernels at
# every group size. Products of two bfloat16 use torch where the CPU has instructions for them,
# unless ours were measured to be faster; elsewhere torch takes 5 to 80 times as long as in float32.
# A weight gradient in float32 is a float32 product in all cases.
def goes_to_float32(product: Product, rows: Tensor, w: Tensor) -> bool:
    """Return whether a product of 16-bit factors is faster with our kernel, in float32, on the CPU.

    ``w`` is the weight, or for a weight gradient the result. A call of torch for one expert takes
    about 20 us, widening a weight 0.3 ns per element, and an operation in float32 0.01 ns more.
    """
    if rows.dtype.itemsize != 2:
        return False
    num_experts, out_features, in_features = w.shape
    size = out_features * in_features * (30 * num_experts + rows.shape[0])
    if size < 2_000_000 * num_experts or not has_fast_products(rows.dtype):
        return True
    dtype = str(rows.dtype).removeprefix("torch.")
    return not is_left(linear_name(dtype, "medium", product), "cpu")


@functools.cache
def has_fast_products(dtype: torch.dtype) -> bool:
    """Return whether the CPU has instructions for products of a 16-bit dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def rows_product(rows: Tensor, weights: Tensor, m_splits: Tensor, clear_padding: bool) -> Tensor:
    """Multiply each expert's rows by its matrix ``(E, K, N)`` with ``torch.mm`` for each.

    torch has the loop over experts in C++, which saves time where experts are small; the products
    are those of a loop in Python, to the bit.
    """
    groups = groups_of(m_splits, rows.shape[0])
    if gemm_torch.has_grouped_mm(rows, *weights.shape):
        ends = m_splits.cumsum(0, dtype=torch.int32)
        product = torch._grouped_mm(rows.contiguous(), weights, offs=ends)
    else:
        product = rows.new_empty(rows.shape[0], weights.shape[2])
        for expert, start, end in groups:
            torch.mm(rows[start:end], weights[expert], out=product[start:end])
    if clear_padding:
        product[groups[-1][-1] if groups else 0 :] = 0
    return product
