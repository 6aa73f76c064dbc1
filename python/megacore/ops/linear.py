"""Matrix products of linear layers: on CPUs by the faster of torch's and ours.

torch multiplies with MKL, which uses half of the vector width on processors that are not Intel's.
With AVX-512, products of float32 by ours take half of its time on Zen 5 and about the same on
Zen 4, whose units are half as wide (``benchmarks/results/moe_cpu.txt``). On processors without
instructions for 16-bit numbers, torch's products of these take 4 to 80 times as long as those of
float32; ours take as long as those. `megacore.qualification` measures both, for all ranks of a run,
by size and dtype; before that, torch's are taken.

Shapes: M rows, N output features, K input features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from megacore.ops import gemm
from megacore.ops.grouped_product import grouped_product
from megacore.ops.kernel_choice import LINEAR_MACS, NARROW_DTYPES, is_left, linear_names

# Least multiply-adds and names, the largest first.
_SIZES = {
    getattr(torch, dtype): sorted(
        ((LINEAR_MACS[name], name) for name in linear_names(dtype)), reverse=True
    )
    for dtype in ("float32", *NARROW_DTYPES)
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``: ``(..., K)`` to ``(..., N)``.

    Args:
        x: ``(..., K)``.
        weight: ``(..., K)``, whose first dimensions are flattened to N; dtype and device of ``x``.
        bias: ``(N,)``.

    Sync:
        None.

    Ours has no second derivative.
    """
    if weight.dim() > 2:
        weight = weight.flatten(0, -2)
    if is_observed() or not _is_ours(x, weight):
        return nn.functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    y = gemm.grouped_gemm(rows, weight[None], _one_group(rows))
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def multiply_(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Set ``out`` to ``x @ weight.T``, ``(M, N)``, all of one dtype; not differentiable."""
    if _is_ours(x, weight):
        grouped_product("forward", x, weight[None], _one_group(x), out=out)
    else:
        torch.mm(x, weight.t(), out=out)


def multiply_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """Return ``grad @ weight``, ``(M, K)``; not differentiable."""
    if _is_ours(grad, weight):
        return grouped_product("input_grad", grad, weight[None], _one_group(grad))
    return grad @ weight


def multiply_weight_grad_(out: Tensor, grad: Tensor, x: Tensor) -> None:
    """Set ``out`` to ``grad.T @ x``, ``(N, K)``; not differentiable."""
    if _is_ours(grad, out):
        grouped_product("weight_grad", grad, x, _one_group(x), out=out[None])
    else:
        torch.mm(grad.t(), x, out=out)


def _is_ours(rows: Tensor, weight: Tensor) -> bool:
    sizes = _SIZES.get(rows.dtype)
    if not (sizes and rows.dtype == weight.dtype and rows.is_cpu and weight.is_contiguous()):
        return False
    num_macs = rows.shape[:-1].numel() * weight.numel()
    for least, name in sizes:
        if num_macs >= least:
            return not is_left(name, "cpu")
    return False


def is_observed() -> bool:
    """Return whether torch's own operation is needed: to compile, transform or cast it."""
    return (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


def _one_group(rows: Tensor) -> Tensor:
    return torch.full((1,), rows.shape[0], dtype=torch.int64)
