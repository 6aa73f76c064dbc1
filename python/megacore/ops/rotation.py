"""Rotation of heads as one operation.

Native for float32 and bfloat16 on CPUs and for these and float16 on GPUs; elsewhere the torch
operations of the references. Inputs narrower than float32 are computed in float32 and rounded once
at the end.

Shapes: S sequence, B batch, G heads of keys and values, Q heads of queries per key head, D head
dimension, R rotated elements of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.ops.dense import wide
from megacore.ops.register import define_compiled, define_gradient


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
    result: tuple[Tensor, Tensor, Tensor] = _split_and_rotate(qkv_SBGX, cos, sin, head_dim)
    return result


def rotate(x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads ``(S, B, N, D)`` by their positions, as `split_and_rotate` does."""
    result: Tensor = _Rotate.apply(x_SBND, cos, sin)  # type: ignore[no-untyped-call]
    return result


def split_and_rotate_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `split_and_rotate` with torch operations, on any device."""
    heads_SBGND = qkv.reshape(*qkv.shape[:-1], qkv.shape[-1] // head_dim, head_dim)
    sequence, batch, groups, slots, _ = heads_SBGND.shape
    q = qkv.new_empty(sequence, batch, groups, slots - 2, head_dim)
    k = qkv.new_empty(sequence, batch, groups, 1, head_dim)
    rotate_into(q, heads_SBGND[..., :-2, :], cos, sin)
    rotate_into(k, heads_SBGND[..., -2:-1, :], cos, sin)
    v = heads_SBGND[..., -1, :].clone(memory_format=torch.contiguous_format)
    return q.flatten(2, 3), k.squeeze(3), v


def _backward_reference(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    sequence, batch, groups, head_dim = grad_k.shape
    q_per_kv = grad_q.shape[2] // groups
    grad = grad_q.new_empty(sequence, batch, groups, q_per_kv + 2, head_dim)
    grad_q = grad_q.reshape(sequence, batch, groups, q_per_kv, head_dim)
    # The adjoint of a rotation, times a factor, is the inverse rotation, times the factor.
    rotate_into(grad[..., :-2, :], grad_q, cos, -sin)
    rotate_into(grad[..., -2:-1, :], grad_k.unsqueeze(3), cos, -sin)
    grad[..., -1, :] = grad_v
    return grad.flatten(3)


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write the rotated ``x`` to ``out``, both ``(S, B, G, N, D)``."""
    num_rotated = 2 * cos.shape[-1]
    if num_rotated < x.shape[-1]:
        out[..., num_rotated:] = x[..., num_rotated:]
        out, x = out[..., :num_rotated], x[..., :num_rotated]
    if cos.dim() == 2:
        cos, sin = cos[:, None], sin[:, None]
    length = x.shape[0]
    cos, sin = cos[:length, :, None, None], sin[:length, :, None, None]
    target = out if out.dtype.itemsize >= 4 else torch.empty_like(out, dtype=torch.float32)
    x_1, x_2 = wide(x).chunk(2, dim=-1)
    out_1, out_2 = target.chunk(2, dim=-1)
    torch.mul(x_1, cos, out=out_1).addcmul_(x_2, sin, value=-1)
    torch.mul(x_2, cos, out=out_2).addcmul_(x_1, sin)
    if target is not out:
        out.copy_(target)


def fits(cos: Tensor, sin: Tensor, x: Tensor) -> bool:
    """Return whether the tables are as the native rotation of ``(S, B, ...)`` reads them."""
    sequence, batch = x.shape[:2]
    return (
        cos.dtype == sin.dtype == torch.float32
        and cos.shape == sin.shape
        and cos.shape[0] >= sequence
        and (cos.dim() == 2 or cos.shape[1] == batch)
    )


def _fits(qkv: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> bool:
    del head_dim
    return fits(cos, sin, qkv)


def _backward_fits(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor
) -> bool:
    return grad_q.dtype == grad_k.dtype == grad_v.dtype and fits(cos, sin, grad_q)


def _split_and_rotate_fake(
    qkv: Tensor, cos: Tensor, sin: Tensor, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    del cos, sin
    sequence, batch, groups, width = qkv.shape
    q = qkv.new_empty(sequence, batch, groups * (width // head_dim - 2), head_dim)
    k, v = (qkv.new_empty(sequence, batch, groups, head_dim) for _ in range(2))
    return q, k, v


def _backward_fake(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    del grad_v, cos, sin
    sequence, batch, groups, head_dim = grad_k.shape
    width = (grad_q.shape[2] // groups + 2) * head_dim
    return grad_q.new_empty(sequence, batch, groups, width)


_split_and_rotate = define_compiled(
    "split_and_rotate(Tensor qkv, Tensor cos, Tensor sin, SymInt head_dim) "
    "-> (Tensor, Tensor, Tensor)",
    reference=split_and_rotate_reference,
    fits=_fits,
    cuda_fits=lambda *args: args[3] % 2 == 0,
    fake=_split_and_rotate_fake,
    has_gradient=True,
)
_split_and_rotate_backward = define_compiled(
    "split_and_rotate_backward(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor cos, "
    "Tensor sin) -> Tensor",
    reference=_backward_reference,
    fits=_backward_fits,
    cuda_fits=lambda grad_q, *_: grad_q.shape[-1] % 2 == 0,
    fake=_backward_fake,
)


def _rotation_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    ctx.save_for_backward(inputs[1], inputs[2])


def _rotation_grads(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
    return _split_and_rotate_backward(*grads, *ctx.saved_tensors), None, None, None


define_gradient(_split_and_rotate, _rotation_grads, _rotation_setup)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = x.new_empty(x.shape)
        rotate_into(out[:, :, None], x[:, :, None], cos, sin)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        out = grad.new_empty(grad.shape)
        rotate_into(out[:, :, None], grad[:, :, None], cos, -sin)
        return out, None, None
