"""RMSNorm as one operation, alone or with a sum before it.

Native for float32 and bfloat16 on CPUs and for these and float16 on GPUs; elsewhere the torch
operations of the references. Inputs narrower than float32 are computed in float32 and rounded once
at the end.

Shapes: M rows, H width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.ops.cuda_module import cuda_kernels
from megacore.ops.register import ALIGNMENT, define_compiled, define_gradient


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Normalize each token by its root mean square and multiply by a weight.

    Args:
        x: ``(..., H)``, any float dtype.
        weight_H: ``(H,)``.
        eps: Constant added to the mean square.

    Returns:
        Same shape and dtype as ``x``.

    Source:
        Zhang and Sennrich, arXiv:1910.07467.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0).square().sum().item()
        2.0
    """
    result: Tensor = _rms_norm(x, weight_H, eps)[0]
    return result


def add_rms_norm(x: Tensor, added: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add two tensors and normalize the sum, rounded to its dtype; see `rms_norm`.

    Args:
        x: ``(..., H)``, any float dtype.
        added: Shape and dtype of ``x``.
        weight_H: ``(H,)``.
        eps: Constant added to the mean square.

    Returns:
        The sum and the normalized sum, both with shape and dtype of ``x``.

    Example:
        >>> total, y = add_rms_norm(torch.ones(2), torch.tensor([2.0, 3.0]), torch.ones(2), 0.0)
        >>> total.tolist(), y.square().sum().item()
        ([3.0, 4.0], 2.0)
    """
    total, y, _ = _add_rms_norm(x, added, weight_H, eps)
    return total, y


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over a tensor: its own, or float32 if that is narrower."""
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


def wide(x: Tensor) -> Tensor:
    """Return the tensor itself, or a float32 copy if its dtype is narrower."""
    return x.to(wide_dtype(x))


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized tensor, and the factor of each token, with torch operations."""
    unscaled = wide(x)
    scale = unscaled.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (unscaled * scale).mul_(weight).to(x.dtype), scale


def _add_rms_norm_reference(
    x: Tensor, added: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x + added
    return total, *rms_norm_reference(total, weight, eps)


def _rms_norm_backward_reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    of_x: bool,
    of_weight: bool,
    grad_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    unit, grad = wide(x) * scale, wide(grad)
    grad_x, grad_weight = x.new_empty(0), weight.new_empty(0)
    if of_weight:
        grad_weight = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
    if of_x:
        grad_unit = grad * weight
        radial = (grad_unit * unit).mean(-1, keepdim=True)
        grad_x = grad_unit.addcmul_(unit, radial, value=-1).mul_(scale).to(x.dtype)
        grad_x = grad_x if grad_sum is None else grad_x + grad_sum
    return grad_x, grad_weight


def _fits(x: Tensor, weight: Tensor, *args: Any) -> bool:
    del args
    return weight.dtype == x.dtype and weight.shape == x.shape[-1:]


def _sum_fits(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> bool:
    del eps
    same = added.dtype == x.dtype and added.shape == x.shape
    return same and weight.dtype == x.dtype and weight.shape == x.shape[-1:]


def _backward_fits(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    of_x: bool,
    of_weight: bool,
    grad_sum: Tensor | None = None,
) -> bool:
    del scale, of_x, of_weight
    same = grad.dtype == x.dtype and (grad_sum is None or grad_sum.dtype == x.dtype)
    return same and _fits(x, weight)


def _cuda_fits(x: Tensor, *args: Any) -> bool:
    """Return whether the GPU's kernel supports the width; that of a gradient is that of ``x``."""
    del args
    limit: int = cuda_kernels().MAX_NORM_BYTES
    num_bytes = x.shape[-1] * x.element_size()
    return 0 < num_bytes <= limit and num_bytes % ALIGNMENT == 0


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    del weight, eps
    scale = x.new_empty(*x.shape[:-1], 1, dtype=wide_dtype(x))
    return torch.empty_like(x, memory_format=torch.contiguous_format), scale


def _add_rms_norm_fake(
    x: Tensor, added: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    del added
    y, scale = _rms_norm_fake(x, weight, eps)
    return torch.empty_like(y), y, scale


def _rms_norm_backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    of_x: bool,
    of_weight: bool,
    grad_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    del grad, scale, grad_sum
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x if of_x else x.new_empty(0), weight.new_empty(weight.shape if of_weight else (0,))


_rms_norm = define_compiled(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    reference=rms_norm_reference,
    fake=_rms_norm_fake,
    fits=_fits,
    cuda_fits=_cuda_fits,
    has_gradient=True,
)
_add_rms_norm = define_compiled(
    "add_rms_norm(Tensor x, Tensor added, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    reference=_add_rms_norm_reference,
    fake=_add_rms_norm_fake,
    fits=_sum_fits,
    cuda_fits=_cuda_fits,
    has_gradient=True,
)
_rms_norm_backward = define_compiled(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale, bool of_x, "
    "bool of_weight, Tensor? grad_sum=None) -> (Tensor, Tensor)",
    reference=_rms_norm_backward_reference,
    fake=_rms_norm_backward_fake,
    fits=_backward_fits,
    cuda_fits=_cuda_fits,
)


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def _rms_norm_grads(
    ctx: Any, grad: Tensor | None, _: Any
) -> tuple[Tensor | None, Tensor | None, None]:
    # A split backward pass requests one of the two at a time.
    of_x, of_weight = ctx.needs_input_grad[:2]
    if grad is None:
        return None, None, None
    grad_x, grad_weight = _rms_norm_backward(grad, *ctx.saved_tensors, of_x, of_weight)
    return grad_x if of_x else None, grad_weight if of_weight else None, None


define_gradient(_rms_norm, _rms_norm_grads, _rms_norm_setup)


def _add_rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    total, _, scale = output
    ctx.mark_non_differentiable(scale)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, inputs[2], scale)


def _add_rms_norm_grads(
    ctx: Any, grad_sum: Tensor | None, grad: Tensor | None, _: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    of_x, of_added, of_weight = ctx.needs_input_grad[:3]
    if grad is None:
        return grad_sum, grad_sum, None, None
    needs = of_x or of_added, of_weight
    grad_x, grad_weight = _rms_norm_backward(grad, *ctx.saved_tensors, *needs, grad_sum)
    return (
        grad_x if of_x else None,
        grad_x if of_added else None,
        grad_weight if of_weight else None,
        None,
    )


define_gradient(_add_rms_norm, _add_rms_norm_grads, _add_rms_norm_setup)
