"""RMSNorm, rotary embedding and SwiGLU as single autograd functions.

The backward passes are written manually: they take a third of the time of autograd on the same
formulas and save fewer tensors. Inputs narrower than float32 are computed in float32 and rounded
once at the end.

Shapes: S sequence, B batch, H hidden, F inner width of the MLP, G heads of keys and values, Q heads
of queries per key head, D head dimension, R rotated elements of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu, silu

from megacore.ops import activations, dense


def rms_norm(x_SBH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Normalize each token by its root mean square and multiply by a weight.

    Args:
        x_SBH: ``(..., H)``, any float dtype.
        weight_H: ``(H,)``.
        eps: Constant added to the mean square.

    Returns:
        Same shape and dtype as ``x_SBH``.

    Source:
        Zhang and Sennrich, arXiv:1910.07467.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0).square().sum().item()
        2.0
    """
    return dense.rms_norm(x_SBH, weight_H, eps)


def swiglu(x_SBF: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` for ``x = [gate, up]``: ``(..., 2F)`` to ``(..., F)``.

    Source:
        Shazeer, arXiv:2002.05202.
    """
    if x_SBF.is_cpu and x_SBF.dtype in (torch.float32, torch.bfloat16):
        y: Tensor = activations.swiglu(x_SBF.flatten(0, -2))
        return y.view(*x_SBF.shape[:-1], x_SBF.shape[-1] // 2)
    if not torch.is_grad_enabled():
        return _gated(x_SBF)
    result: Tensor = _SwiGLU.apply(x_SBF)  # type: ignore[no-untyped-call]
    return result


def geglu(x_SBF: Tensor) -> Tensor:
    """Compute ``gelu(gate) * up`` for ``x = [gate, up]``: ``(..., 2F)`` to ``(..., F)``.

    The tanh form of GELU.

    Source:
        Shazeer, arXiv:2002.05202.
    """
    gate, up = x_SBF.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh") * up


def softcap(x: Tensor, limit: float | None) -> Tensor:
    """Limit values to ``(-limit, limit)`` by ``limit * tanh(x / limit)``; ``None`` for no limit.

    Example:
        >>> softcap(torch.tensor([0.0, 1e9]), 30.0).tolist()
        [0.0, 30.0]
    """
    return x if limit is None else limit * torch.tanh(x / limit)


def split_and_rotate(
    qkv_SBGX: Tensor, cos: Tensor, sin: Tensor, *, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split queries, keys and values, and rotate queries and keys by their positions.

    Half-split form: element i of the first half of the R rotated elements, the first of a head, is
    rotated with element i of their second half.

    Args:
        qkv_SBGX: ``(S, B, G, (Q + 2) * D)``: for each key head its query heads, the key, the value.
        cos: ``(S, R/2)``, from `RotaryTables`; ``(S, B, R/2)`` if positions differ by sample.
        sin: As ``cos``.
        head_dim: D.

    Returns:
        Queries ``(S, B, G * Q, D)``, keys and values ``(S, B, G, D)``; contiguous.

    Source:
        Su et al., arXiv:2104.09864.
    """
    return dense.split_and_rotate(qkv_SBGX, cos, sin, head_dim)


def rotate(x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads ``(S, B, N, D)`` by their positions, as `split_and_rotate` does."""
    result: Tensor = _Rotate.apply(x_SBND, cos, sin)  # type: ignore[no-untyped-call]
    return result


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over a tensor: its own, or float32 if that is narrower."""
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gated(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.mul(grad, silu(gate), out=grad_up)
        return grad_x


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = x.new_empty(x.shape)
        dense.rotate_into(out[:, :, None], x[:, :, None], cos, sin)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        out = grad.new_empty(grad.shape)
        dense.rotate_into(out[:, :, None], grad[:, :, None], cos, -sin)
        return out, None, None
