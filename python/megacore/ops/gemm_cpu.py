"""Grouped products on the CPU, and their references with torch's products.

Shapes: as in :mod:`megacore.ops.gemm`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megacore import _core
from megacore.ops import gemm_torch


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


# The choice on the CPU follows benchmarks/results/moe_cpu*.txt: float32 uses the native kernels at
# every group size. Products of two bfloat16 use torch where the CPU has instructions for them;
# elsewhere torch takes 5 to 80 times as long as in float32, so the operands are cast to float32. A
# weight gradient in float32 is a float32 product in all cases.
def goes_to_float32(rows: Tensor, w: Tensor) -> bool:
    """Return whether a product of 16-bit factors is faster as one of float32 on the CPU.

    A call of torch for one expert takes about 20 us, the cast of a weight 0.3 ns per element, and
    an operation in float32 0.01 ns more.
    """
    if rows.dtype.itemsize != 2:
        return False
    num_experts, out_features, in_features = w.shape
    size = out_features * in_features * (30 * num_experts + rows.shape[0])
    return size < 2_000_000 * num_experts or not _has_fast_products(rows.dtype)


@functools.cache
def _has_fast_products(dtype: torch.dtype) -> bool:
    """Return whether the CPU has instructions for products of a 16-bit dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def forward_cpu(
    x: Tensor,
    w: Tensor,
    m_splits: Tensor,
    main_grad: Tensor | None,
    accumulate: bool,
    accumulate_mask: Tensor | None = None,
    clear_padding: bool = True,
    expected_rows: int = 0,
) -> Tensor:
    """Compute ``grouped_gemm`` on the CPU."""
    if goes_to_float32(x, w):
        wide = x.float(), w.float(), m_splits, None, accumulate, None, clear_padding
        return forward_cpu(*wide).to(x.dtype)
    del main_grad, accumulate, accumulate_mask, expected_rows
    if x.dtype != torch.float32:
        return _rows_product_cpu(x, w.transpose(1, 2), m_splits, clear_padding)
    y = x.new_empty(x.shape[0], w.shape[1])
    forward_cpu_(y, x, w, m_splits, clear_padding)
    return y


def forward_cpu_(
    y: Tensor,
    x: Tensor,
    w: Tensor,
    m_splits: Tensor,
    clear_padding: bool = True,
    expected_rows: int = 0,
) -> None:
    """Compute ``grouped_gemm`` of float32 tensors on the CPU into contiguous ``y``."""
    del expected_rows
    x, w, m_splits = x.contiguous(), w.contiguous(), m_splits.contiguous()
    _core.grouped_gemm(
        x=x.data_ptr(),
        w=w.data_ptr(),
        m_splits=m_splits.data_ptr(),
        y=y.data_ptr(),
        clear_padding=clear_padding,
        **_sizes(x.shape[0], w),
    )


def input_grad_cpu(
    grad: Tensor,
    w: Tensor,
    m_splits: Tensor,
    clear_padding: bool = True,
    expected_rows: int = 0,
) -> Tensor:
    """Compute the gradient of ``x`` of ``grouped_gemm`` on the CPU."""
    del expected_rows
    if goes_to_float32(grad, w):
        wide = input_grad_cpu(grad.float(), w.float(), m_splits, clear_padding)
        return wide.to(grad.dtype)
    if grad.dtype != torch.float32:
        return _rows_product_cpu(grad, w, m_splits, clear_padding)
    grad_x = grad.new_empty(grad.shape[0], w.shape[2])
    input_grad_cpu_(grad_x, grad, w, m_splits, clear_padding)
    return grad_x


def input_grad_cpu_(
    grad_x: Tensor,
    grad: Tensor,
    w: Tensor,
    m_splits: Tensor,
    clear_padding: bool = True,
    expected_rows: int = 0,
) -> None:
    """Compute the gradient of ``x`` of float32 tensors on the CPU into contiguous ``grad_x``."""
    del expected_rows
    grad, w, m_splits = grad.contiguous(), w.contiguous(), m_splits.contiguous()
    _core.grouped_gemm_input_grad(
        grad_y=grad.data_ptr(),
        w=w.data_ptr(),
        m_splits=m_splits.data_ptr(),
        grad_x=grad_x.data_ptr(),
        clear_padding=clear_padding,
        **_sizes(grad.shape[0], w),
    )


def weight_grad_cpu_(
    grad: Tensor,
    x: Tensor,
    m_splits: Tensor,
    out: Tensor,
    accumulate: bool,
    accumulate_mask: Tensor | None = None,
    expected_rows: int = 0,
) -> None:
    """Compute the gradient of ``w`` of ``grouped_gemm`` on the CPU into ``out``."""
    del expected_rows
    if out.dtype != torch.float32 or not out.is_contiguous():
        weight_grad_reference_(grad, x, m_splits, out, accumulate, accumulate_mask)
        return
    if accumulate and accumulate_mask is not None:
        out.masked_fill_(~accumulate_mask[:, None, None], 0.0)
    grad, x = grad.float().contiguous(), x.float().contiguous()
    m_splits = m_splits.contiguous()
    _core.grouped_gemm_weight_grad(
        grad_y=grad.data_ptr(),
        x=x.data_ptr(),
        m_splits=m_splits.data_ptr(),
        grad_w=out.data_ptr(),
        accumulate=accumulate,
        **_sizes(x.shape[0], out),
    )


def torch_has_loop(rows: Tensor, w: Tensor) -> bool:
    """Return whether torch computes the products of all experts on the CPU in one call."""
    return not goes_to_float32(rows, w) and gemm_torch.has_grouped_mm(rows, *w.shape)


def _rows_product_cpu(
    rows: Tensor, weights: Tensor, m_splits: Tensor, clear_padding: bool
) -> Tensor:
    """Multiply each expert's rows by its matrix ``(E, K, N)`` with ``torch.mm`` for each.

    torch has the loop over experts in C++, which saves time where experts are small; the products
    are those of a loop in Python, to the bit.
    """
    groups = groups_of(m_splits, rows.shape[0])
    if torch_has_loop(rows, weights):
        ends = m_splits.cumsum(0, dtype=torch.int32)
        product = torch._grouped_mm(rows.contiguous(), weights, offs=ends)
    else:
        product = rows.new_empty(rows.shape[0], weights.shape[2])
        for expert, start, end in groups:
            torch.mm(rows[start:end], weights[expert], out=product[start:end])
    if clear_padding:
        product[groups[-1][-1] if groups else 0 :] = 0
    return product


def _sizes(num_rows: int, w: Tensor) -> dict[str, int]:
    num_experts, out_features, in_features = w.shape
    return {
        "num_rows": num_rows,
        "num_experts": num_experts,
        "out_features": out_features,
        "in_features": in_features,
        "num_threads": torch.get_num_threads(),
    }
