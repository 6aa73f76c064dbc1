"""Matrix products of linear layers: on CPUs by the faster of torch's and ours.

torch multiplies with MKL, which uses half of the vector width on processors that are not Intel's.
With AVX-512, products of float32 by ours take half of its time on Zen 5 and about the same on
Zen 4, whose units are half as wide (``benchmarks/results/moe_cpu.txt``). On processors without
instructions for 16-bit numbers, torch's products of these take 4 to 80 times as long as those of
float32; ours take as long as those. `megacore.qualification` measures both, for all ranks of a run,
by size, dtype and pass; before that, torch's are taken.

Products of 16-bit weights add their gradient to ``main_grad`` of the parameter in float32, see
`added_grad_of`: autograd would round it to 16 bits in each microbatch and move it once more.

Shapes: M rows, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from megacore.ops import gemm
from megacore.ops.grouped_product import grouped_product
from megacore.ops.kernel_choice import (
    FEW_ROWS,
    LINEAR_MACS,
    NARROW_DTYPES,
    PRODUCT_NAMES,
    SIZES,
    Product,
    Size,
    is_left,
    linear_name,
)
from megacore.ops.register import define_op


def _names_of(sizes: Iterable[Size]) -> Mapping[tuple[torch.dtype, Product], list[tuple[int, str]]]:
    """Return least multiply-adds and names of sizes, by dtype and product."""
    return {
        (getattr(torch, dtype), product): [
            (LINEAR_MACS[name], name)
            for name in (linear_name(dtype, size, product) for size in sizes)
        ]
        for dtype in ("float32", *NARROW_DTYPES)
        for product in PRODUCT_NAMES
    }


_FEW_ROWS = _names_of(["few_rows"])
_SIZES = _names_of([size for size in reversed(SIZES) if size != "few_rows"])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``: ``(..., K)`` to ``(..., N)``.

    Args:
        x: ``(..., K)``.
        weight: ``(..., K)``, whose first dimensions are flattened to N; dtype and device of ``x``.
        bias: ``(N,)``.

    Sync:
        None.

    A layer with a pass of ours has no second derivative, nor has one that adds to ``main_grad``.
    """
    main_grad = added_grad_of(weight)
    if weight.dim() > 2:
        weight = weight.flatten(0, -2)
    if is_observed():
        return nn.functional.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _forward(x, weight, bias)
    if main_grad is None and not any(_is_ours(each, x, weight) for each in PRODUCT_NAMES):
        return nn.functional.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias, main_grad)  # type: ignore[no-untyped-call]
    return y


def added_grad_of(weight: Tensor) -> Tensor | None:
    """Return the float32 buffer ``(N, K)`` to which products of a weight add its gradient.

    Autograd then gets none, as with `megacore.ops.grouped_gemm`. ``None`` for parameters that are
    vectors, not of 16 bits or in no gradient buffer, and where ``add_weight_grad_`` is left to
    torch: autograd gets the gradient, which the buffer adds.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
        >>> added_grad_of(weight) is None
        True
        >>> weight.main_grad = torch.zeros(2, 3)
        >>> linear(torch.ones(1, 3, dtype=torch.bfloat16), weight).sum().backward()
        >>> weight.main_grad.tolist(), weight.grad
        ([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], None)
    """
    main_grad = gemm.main_grad_of(weight)
    if main_grad is None or weight.dtype.itemsize != 2 or weight.dim() < 2:
        return None
    if not weight.requires_grad or is_left("add_weight_grad_", _kind_of(weight)):
        return None
    return main_grad.flatten(0, -2)


def _kind_of(weight: Tensor) -> str:
    return "cuda" if weight.is_cuda else "cpu"


def add_weight_grad_(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add ``grad.T @ x`` to ``main_grad``, in float32; not differentiable.

    Args:
        main_grad: ``(N, K)``, float32, contiguous.
        grad: ``(M, N)``, bfloat16 or float16.
        x: ``(M, K)``, dtype of ``grad``.

    Sync:
        None.
    """
    _add_weight_grad_(main_grad, grad, x)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _is_ours("forward", x, weight):
        return nn.functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    y = grouped_product("forward", rows, weight[None], _one_group(rows))
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    """A linear layer with a choice for each pass, which may add the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None
    ) -> Tensor:
        # Only the gradient of the weight needs the input.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        # Not saved by autograd: other backward passes write to it in the meantime.
        ctx.main_grad = main_grad
        return _forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, grad_x, grad_weight, grad_bias = grad.reshape(-1, grad.shape[-1]), None, None, None
        # A split backward pass requests one of the two at a time.
        if ctx.needs_input_grad[0]:
            grad_x = multiply_input_grad(rows, weight).view(*grad.shape[:-1], weight.shape[-1])
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            if ctx.main_grad is None:
                grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
                multiply_weight_grad_(grad_weight, rows, inputs)
            else:
                add_weight_grad_(ctx.main_grad, rows, inputs)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None


def multiply_(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Set ``out`` to ``x @ weight.T``, ``(M, N)``, all of one dtype; not differentiable."""
    if _is_ours("forward", x, weight):
        grouped_product("forward", x, weight[None], _one_group(x), out=out)
    else:
        torch.mm(x, weight.t(), out=out)


def multiply_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """Return ``grad @ weight``, ``(M, K)``; not differentiable."""
    if _is_ours("input_grad", grad, weight):
        return grouped_product("input_grad", grad, weight[None], _one_group(grad))
    return grad @ weight


def multiply_weight_grad_(out: Tensor, grad: Tensor, x: Tensor) -> None:
    """Set ``out`` to ``grad.T @ x``, ``(N, K)``; not differentiable."""
    # Weight gradients were measured in float32; one of 16 bits is like any product.
    if _is_ours("weight_grad" if out.dtype == torch.float32 else "forward", grad, out):
        grouped_product("weight_grad", grad, x, _one_group(x), out=out[None])
    else:
        torch.mm(grad.t(), x, out=out)


def _is_ours(product: Product, rows: Tensor, weight: Tensor) -> bool:
    fits = rows.dtype == weight.dtype and weight.is_contiguous()
    return fits and _is_faster(product, rows, weight.numel())


def _is_faster(product: Product, rows: Tensor, num_weights: int) -> bool:
    """Return whether our products of rows with a weight of a size are used on this processor."""
    num_rows = rows.shape[:-1].numel()
    if rows.is_cpu:
        sizes = _FEW_ROWS if 1 < num_rows <= FEW_ROWS else _SIZES
        for least, name in sizes.get((rows.dtype, product), ()):
            if num_rows * num_weights >= least:
                return not is_left(name, "cpu")
    return False


def is_observed() -> bool:
    """Return whether torch's own operation is needed: to compile, transform or cast it."""
    return (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


def _one_group(rows: Tensor) -> Tensor:
    return torch.full((1,), rows.shape[0], dtype=torch.int64)


def _add_reference_(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add the product rounded to its dtype, as the hook of a gradient buffer does."""
    main_grad.add_(grad.t() @ x)


def _add_on_cpu_(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    if is_left("add_weight_grad_", "cpu"):
        _add_reference_(main_grad, grad, x)
        return
    is_ours = main_grad.is_contiguous() and _is_faster("weight_grad", grad, main_grad.numel())
    if not is_ours:
        # torch multiplies 16-bit floats more slowly than float32 on most CPUs, and rounds results.
        grad, x = grad.float(), x.float()
        is_ours = main_grad.is_contiguous() and _is_faster("weight_grad", grad, main_grad.numel())
    if is_ours:
        out, one = main_grad[None], _one_group(x)
        grouped_product("weight_grad", grad, x, one, out=out, accumulate=True)
    else:
        main_grad.addmm_(grad.t(), x)


def _add_on_cuda_(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    # torch takes a matrix of one row or column for a bias, and tunes no products of two dtypes.
    fits = min(main_grad.shape) > 1 and not torch.cuda.tunable.is_enabled()
    if not fits or grad.dtype.itemsize != 2 or is_left("add_weight_grad_", "cuda"):
        _add_reference_(main_grad, grad, x)
        return
    torch.addmm(main_grad, grad.t(), x, out_dtype=main_grad.dtype, out=main_grad)


def _add_fake_(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    del main_grad, grad, x


_add_weight_grad_ = define_op(
    "add_weight_grad_(Tensor(a!) main_grad, Tensor grad, Tensor x) -> ()",
    cpu=_add_on_cpu_,
    cuda=_add_on_cuda_,
    fake=_add_fake_,
)
_add_weight_grad_.pass_autograd()
