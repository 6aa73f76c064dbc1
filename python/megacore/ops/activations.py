"""Activations of MLPs and experts; of experts times the routing weight of each row.

Shapes: M rows, F inner width of an MLP or expert.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megacore.ops.dense import wide, wide_dtype
from megacore.ops.register import define_compiled, define_gradient, describe


def swiglu(x: Tensor, probs: Tensor | None = None, *, num_rows: Tensor | None = None) -> Tensor:
    """``probs * silu(gate) * up`` of ``x = [gate, up]``: ``(..., 2F)`` to ``(..., F)``.

    Args:
        x: ``(..., 2F)``; computed in float32 if narrower, and rounded once.
        probs: Weight of each row of ``(M, 2F)``, ``(M,)``, float32. Default: all one.
        num_rows: Number of rows in use, int64 scalar on the device of ``x``; the others need
            not be computed, and may have any value in the result and in gradients. Default:
            all.

    Returns:
        ``(..., F)``, dtype of ``x``.

    Raises:
        ValueError: If shapes do not fit.

    Source:
        Shazeer, arXiv:2002.05202.

    Example:
        >>> swiglu(torch.tensor([[0.0, 100.0, 5.0, 5.0]]), torch.tensor([2.0])).tolist()
        [[0.0, 1000.0]]
    """
    if x.dim() > 2 and probs is None:
        return swiglu(x.flatten(0, -2)).view(*x.shape[:-1], x.shape[-1] // 2)
    _check(x, probs, factor=2)
    result: Tensor = _swiglu(x, probs, num_rows)
    return result


def geglu(x: Tensor) -> Tensor:
    """Compute ``gelu(gate) * up`` for ``x = [gate, up]``: ``(..., 2F)`` to ``(..., F)``.

    The tanh form of GELU, with torch operations on any device.

    Source:
        Shazeer, arXiv:2002.05202.
    """
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def squared_relu(x: Tensor) -> Tensor:
    """Compute ``max(x, 0) ** 2`` with torch operations on any device; the shape is unchanged.

    Source:
        So et al., arXiv:2109.08668.

    Example:
        >>> squared_relu(torch.tensor([-1.0, 3.0])).tolist()
        [0.0, 9.0]
    """
    return torch.nn.functional.relu(x).square()


def softcap(x: Tensor, limit: float | None) -> Tensor:
    """Limit values to ``(-limit, limit)`` by ``limit * tanh(x / limit)``; ``None`` for no limit.

    Example:
        >>> softcap(torch.tensor([0.0, 1e9]), 30.0).tolist()
        [0.0, 30.0]
    """
    return x if limit is None else limit * torch.tanh(x / limit)


def gelu(x: Tensor, probs: Tensor | None = None, *, num_rows: Tensor | None = None) -> Tensor:
    """Return the tanh form of GELU times the weight of each row: ``(M, F)`` to ``(M, F)``.

    Args:
        x: ``(M, F)``; computed in float32 if narrower, and rounded once.
        probs: Weight of each row, ``(M,)``, float32. Default: all one.
        num_rows: Number of rows in use, int64 scalar on the device of ``x``; the others need
            not be computed, and may have any value in the result and in gradients. Default:
            all.

    Returns:
        ``(M, F)``, dtype of ``x``.

    Raises:
        ValueError: If shapes do not fit.

    Source:
        Hendrycks and Gimpel, arXiv:1606.08415.

    Example:
        >>> gelu(torch.tensor([[0.0, 100.0]]), torch.tensor([0.5])).tolist()
        [[0.0, 50.0]]
    """
    _check(x, probs, factor=1)
    result: Tensor = _gelu(x, probs, num_rows)
    return result


def clamped_swiglu(
    x: Tensor, probs: Tensor | None = None, *, num_rows: Tensor | None = None
) -> Tensor:
    """``probs * (up + 1) * gate * sigmoid(1.702 * gate)``: ``(M, 2F)`` to ``(M, F)``.

    ``gate`` is at most 7 and ``up`` from -7 to 7. With torch operations on any device.

    Args:
        x: ``[gate, up]``, ``(M, 2F)``; computed in float32 if narrower, and rounded once.
        probs: Weight of each row, ``(M,)``, float32. Default: all one.
        num_rows: As in :func:`swiglu`; all rows are computed.

    Returns:
        ``(M, F)``, dtype of ``x``.

    Raises:
        ValueError: If shapes do not fit.

    Source:
        gpt-oss, arXiv:2508.10925.

    Example:
        >>> clamped_swiglu(torch.tensor([[100.0, 0.0, 100.0, 5.0]])).round(decimals=2).tolist()
        [[56.0, 0.0]]
    """
    _check(x, probs, factor=2)
    del num_rows
    gate, up = wide(x).chunk(2, dim=-1)
    gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
    return _weighted((up + 1) * gate * torch.sigmoid(_SLOPE * gate), probs).to(x.dtype)


def swiglu_reference(
    x: Tensor, probs: Tensor | None = None, num_rows: Tensor | None = None
) -> Tensor:
    """Compute :func:`swiglu` with torch operations and their autograd, on any device."""
    del num_rows
    gate, up = wide(x).chunk(2, dim=-1)
    return _weighted(torch.nn.functional.silu(gate) * up, probs).to(x.dtype)


def gelu_reference(
    x: Tensor, probs: Tensor | None = None, num_rows: Tensor | None = None
) -> Tensor:
    """Compute :func:`gelu` with torch operations and their autograd, on any device."""
    del num_rows
    y = torch.nn.functional.gelu(wide(x), approximate="tanh")
    return _weighted(y, probs).to(x.dtype)


def _weighted(y: Tensor, probs: Tensor | None) -> Tensor:
    return y if probs is None else y * probs[:, None]


def _swiglu_backward_reference(
    grad: Tensor, x: Tensor, probs: Tensor | None, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    del num_rows
    gate, up = wide(x).chunk(2, dim=-1)
    grad = grad.to(gate.dtype)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    grad_probs = _grad_probs(grad, silu * up, probs)
    grad = _weighted(grad, probs)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([grad * up * slope, grad * silu], dim=-1).to(x.dtype), grad_probs


def _gelu_backward_reference(
    grad: Tensor, x: Tensor, probs: Tensor | None, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    del num_rows
    x_wide = wide(x)
    grad = grad.to(x_wide.dtype)
    # 0.5 * (1 + tanh(u)) is sigmoid(2 u).
    scale = 2.0 * math.sqrt(2.0 / math.pi)
    sigmoid = (scale * (x_wide + 0.044715 * x_wide**3)).sigmoid()
    grad_probs = _grad_probs(grad, x_wide * sigmoid, probs)
    inner = scale * (1 + 3 * 0.044715 * x_wide * x_wide)
    slope = sigmoid * (1 + x_wide * (1 - sigmoid) * inner)
    return (_weighted(grad, probs) * slope).to(x.dtype), grad_probs


def _grad_probs(grad: Tensor, y: Tensor, probs: Tensor | None) -> Tensor:
    return grad.new_zeros(0) if probs is None else (grad * y).sum(-1).to(probs.dtype)


def _check(x: Tensor, probs: Tensor | None, *, factor: int) -> None:
    if x.dim() != 2 or x.shape[1] % factor != 0:
        raise ValueError(f"x {describe(x)} must be (M, {factor if factor > 1 else ''}F)")
    if probs is not None and probs.shape != x.shape[:1]:
        raise ValueError(f"probs {describe(probs)} must be ({x.shape[0]},), one per row of x")


_CLAMP, _SLOPE = 7.0, 1.702


def _one_dtype(grad: Tensor, x: Tensor, *rest: Any) -> bool:
    del rest
    return grad.dtype == x.dtype


def _backward_fake(
    grad: Tensor, x: Tensor, probs: Tensor | None, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    del num_rows
    if probs is None:
        grad_probs = grad.new_empty(0, dtype=wide_dtype(x))
    else:
        grad_probs = torch.empty_like(probs)
    return torch.empty_like(x, memory_format=torch.contiguous_format), grad_probs


def _swiglu_fake(x: Tensor, probs: Tensor | None, num_rows: Tensor | None = None) -> Tensor:
    del probs, num_rows
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _gelu_fake(x: Tensor, probs: Tensor | None, num_rows: Tensor | None = None) -> Tensor:
    del probs, num_rows
    return x.new_empty(x.shape)


_swiglu = define_compiled(
    "swiglu(Tensor x, Tensor? probs, Tensor? num_rows=None) -> Tensor",
    reference=swiglu_reference,
    fake=_swiglu_fake,
    has_gradient=True,
)
_swiglu_backward = define_compiled(
    "swiglu_backward(Tensor grad, Tensor x, Tensor? probs, Tensor? num_rows=None)"
    " -> (Tensor, Tensor)",
    reference=_swiglu_backward_reference,
    fits=_one_dtype,
    fake=_backward_fake,
)
_gelu = define_compiled(
    "gelu(Tensor x, Tensor? probs, Tensor? num_rows=None) -> Tensor",
    reference=gelu_reference,
    fake=_gelu_fake,
    has_gradient=True,
)
_gelu_backward = define_compiled(
    "gelu_backward(Tensor grad, Tensor x, Tensor? probs, Tensor? num_rows=None)"
    " -> (Tensor, Tensor)",
    reference=_gelu_backward_reference,
    fits=_one_dtype,
    fake=_backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _swiglu_grads(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, probs, num_rows = ctx.saved_tensors
    grad_x, grad_probs = _swiglu_backward(grad, x, probs, num_rows)
    return grad_x, None if probs is None else grad_probs, None


def _gelu_grads(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, probs, num_rows = ctx.saved_tensors
    grad_x, grad_probs = _gelu_backward(grad, x, probs, num_rows)
    return grad_x, None if probs is None else grad_probs, None


define_gradient(_swiglu, _swiglu_grads, _setup)
define_gradient(_gelu, _gelu_grads, _setup)
