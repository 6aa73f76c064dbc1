"""Grouped GEMM by ``torch._grouped_mm``: the second back end, for builds without our kernels.

It reads running sums of the counts on the device, so there is no host sync. Results have the dtype
of the factors: a float32 weight gradient takes a second kernel and a bf16 rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megacore.ops.cuda_module import device_facts

MAX_EXPERTS = 1023  # of a launch


def has_grouped_mm(x: Tensor, num_experts: int, out_features: int, in_features: int) -> bool:
    """Return whether torch computes such products without a host sync.

    Elsewhere (fp16, other GPUs) ``torch._grouped_mm`` is a loop that copies counts to the host.
    """
    return has_grouped_mm_on(x.device, x.dtype, num_experts, out_features, in_features)


def has_grouped_mm_on(
    device: torch.device, dtype: torch.dtype, num_experts: int, out_features: int, in_features: int
) -> bool:
    """Answer as `has_grouped_mm`, for tensors of a device and dtype."""
    return (
        hasattr(torch, "_grouped_mm")
        and dtype == torch.bfloat16
        and (device.type != "cuda" or device_facts(device).capability[0] in (9, 10))
        and 0 < num_experts <= MAX_EXPERTS
        and all(size > 0 and size % 8 == 0 for size in (out_features, in_features))
    )


def forward(x: Tensor, w: Tensor, m_splits: Tensor, clear_padding: bool = True) -> Tensor:
    """Compute ``y[rows of e] = x[rows of e] @ w[e].T``."""
    return _rows_product(x, w.transpose(1, 2), m_splits, clear_padding)


def input_grad(grad: Tensor, w: Tensor, m_splits: Tensor, clear_padding: bool = True) -> Tensor:
    """Compute ``grad_x[rows of e] = grad[rows of e] @ w[e]``."""
    return _rows_product(grad, w, m_splits, clear_padding)


def weight_grad_(
    grad: Tensor,
    x: Tensor,
    m_splits: Tensor,
    out: Tensor,
    accumulate: bool,
    accumulate_mask: Tensor | None = None,
) -> None:
    """Compute ``out[e] (+)= grad[rows of e].T @ x[rows of e]``; see `launch_grouped`."""
    ends = _ends(m_splits, x.shape[0])
    if x.shape[0] == 0:
        product = out.new_zeros(out.shape)
    else:
        product = torch._grouped_mm(grad.contiguous().t(), x.contiguous(), offs=ends)
        # Not every kernel of torch writes the weights of an expert without rows.
        product = product.masked_fill((m_splits <= 0)[:, None, None], 0.0)
    if not accumulate:
        out.copy_(product)
        return
    if accumulate_mask is not None:
        out.masked_fill_(~accumulate_mask[:, None, None], 0.0)
    out.add_(product)


def _rows_product(rows: Tensor, weights: Tensor, m_splits: Tensor, clear_padding: bool) -> Tensor:
    num_rows = rows.shape[0]
    if num_rows == 0:
        return rows.new_empty(0, weights.shape[2])
    ends = _ends(m_splits, num_rows)
    product = torch._grouped_mm(rows.contiguous(), weights, offs=ends)
    if not clear_padding:
        return product
    is_padding = torch.arange(num_rows, device=rows.device) >= ends[-1]
    return product.masked_fill(is_padding[:, None], 0.0)


def _ends(m_splits: Tensor, num_rows: int) -> Tensor:
    """End of each expert's rows, int32; counts that do not fit are truncated."""
    return m_splits.clamp(min=0).cumsum(0).clamp(max=num_rows).to(torch.int32)


WAYS: Mapping[str, Callable[..., Any]] = {
    "forward": forward,
    "input_grad": input_grad,
    "weight_grad": weight_grad_,
}
