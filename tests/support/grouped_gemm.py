"""Grouped products with one ``torch.mm`` per expert, on any device: a reference for kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.ops import gemm, gemm_cpu
from megacore.ops.dense import wide_dtype


def grouped_gemm_reference(
    x: Tensor,
    w: Tensor,
    m_splits: Tensor,
    *,
    main_grad: Tensor | None = None,
    accumulate: bool | Tensor = True,
) -> Tensor:
    """Compute ``grouped_gemm`` with one ``torch.mm`` per expert, on any device."""
    gemm._check(x, w, m_splits, main_grad)
    arguments = x, w, m_splits, main_grad, *gemm._split(accumulate, w)
    result: Tensor = _Reference.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        m_splits: Tensor,
        main_grad: Tensor | None,
        accumulate: bool,
        accumulate_mask: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, w, m_splits)
        ctx.main_grad, ctx.accumulate, ctx.mask = main_grad, accumulate, accumulate_mask
        return gemm_cpu.forward_reference(x, w, m_splits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, m_splits = ctx.saved_tensors
        grad_x = (
            gemm_cpu.input_grad_reference(grad, w, m_splits) if ctx.needs_input_grad[0] else None
        )
        grad_w = None
        if ctx.needs_input_grad[1]:
            if ctx.main_grad is None:
                grad_w = torch.zeros_like(w, dtype=wide_dtype(w))
                gemm_cpu.weight_grad_reference_(grad, x, m_splits, grad_w, True)
                grad_w = grad_w.to(w.dtype)
            else:
                gemm_cpu.weight_grad_reference_(
                    grad, x, m_splits, ctx.main_grad, ctx.accumulate, ctx.mask
                )
        return grad_x, grad_w, None, None, None, None
