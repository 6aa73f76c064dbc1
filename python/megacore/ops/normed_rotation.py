"""RMSNorm of each query and key head, then rotation, as one operation.

Native for float32 and bfloat16 on CPUs, and on GPUs for heads of up to 1 KB whose length and
rotated part are multiples of 32 bytes; elsewhere `rms_norm` and `split_and_rotate` in turn, which
give the same bits on CPUs.

Shapes: as in :mod:`megacore.ops.rotation`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.ops.cuda_module import cuda_kernels
from megacore.ops.register import (
    ALIGNMENT,
    define_compiled,
    define_gradient,
)
from megacore.ops.rotation import fits

Normed = tuple[Tensor, Tensor, Tensor, Tensor]


def norm_and_rotate(
    qkv_SBGX: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    head_dim: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize each query and key head, round, then split and rotate; see `split_and_rotate`.

    Args:
        qkv_SBGX: ``(S, B, G, (Q + 2) * D)``.
        q_weight_D: Weight of the norm of queries, ``(D,)``.
        k_weight_D: Weight of the norm of keys.
        cos: As in `split_and_rotate`.
        sin: As in `split_and_rotate`.
        head_dim: D.
        eps: Constant added to the mean squares.

    Returns:
        As `split_and_rotate`.
    """
    q, k, v, _ = _normed(qkv_SBGX, q_weight_D, k_weight_D, cos, sin, head_dim, eps)
    return q, k, v


def _fits(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    eps: float,
) -> bool:
    del eps
    same = all(w.dtype == qkv.dtype and w.shape == (head_dim,) for w in (q_weight, k_weight))
    return same and fits(cos, sin, qkv)


def _backward_fits(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    *needs: bool,
) -> bool:
    del scale, needs
    same = all(grad.dtype == qkv.dtype for grad in (grad_q, grad_k, grad_v))
    return same and _fits(qkv, q_weight, k_weight, cos, sin, len(q_weight), 0.0)


def _cuda_fits(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, *rest: Any) -> bool:
    """Return whether the GPU's kernel supports the sizes of the heads."""
    del k_weight, rest
    size, unit = qkv.element_size(), 2 * ALIGNMENT
    num_bytes, num_rotated_bytes = len(q_weight) * size, 2 * cos.shape[-1] * size
    limit: int = cuda_kernels().MAX_NORMED_HEAD_BYTES
    return num_bytes <= limit and num_bytes % unit == 0 and num_rotated_bytes % unit == 0


def _backward_cuda_fits(*args: Any) -> bool:
    qkv, q_weight, k_weight, _, cos = args[3:8]
    return _cuda_fits(qkv, q_weight, k_weight, cos)


def _in_turn(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    eps: float,
) -> Normed:
    heads = qkv.reshape(*qkv.shape[:3], qkv.shape[-1] // head_dim, head_dim)
    norm = torch.ops.megacore.rms_norm
    q, q_scale = norm(heads[..., :-2, :], q_weight, eps)
    k, k_scale = norm(heads[..., -2:-1, :], k_weight, eps)
    normed = torch.cat((q, k, heads[..., -1:, :]), dim=-2).flatten(-2)
    scale = torch.cat((q_scale, k_scale), dim=-2).squeeze(-1)
    return *torch.ops.megacore.split_and_rotate(normed, cos, sin, head_dim), scale


def _backward_in_turn(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = torch.ops.megacore.split_and_rotate_backward(grad_q, grad_k, grad_v, cos, sin)
    shape = *qkv.shape[:3], qkv.shape[-1] // len(q_weight), len(q_weight)
    grad, heads = grad.reshape(shape), qkv.reshape(shape)
    found = [
        torch.ops.megacore.rms_norm_backward(
            grad[..., part, :], heads[..., part, :], weight, scale[..., place, None], *needs
        )
        for weight, part, place in (
            (q_weight, slice(None, -2), slice(None, -1)),
            (k_weight, slice(-2, -1), slice(-1, None)),
        )
    ]
    grad_qkv = qkv.new_empty(0)
    if needs[0]:
        parts = (found[0][0], found[1][0], grad[..., -1:, :])
        grad_qkv = torch.cat(parts, dim=-2).flatten(-2)
    return grad_qkv, found[0][1], found[1][1]


def _forward_fake(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    eps: float,
) -> Normed:
    del q_weight, k_weight, cos, sin, eps
    sequence, batch, groups, width = qkv.shape
    q_per_kv = width // head_dim - 2
    q = qkv.new_empty(sequence, batch, groups * q_per_kv, head_dim)
    k, v = (qkv.new_empty(sequence, batch, groups, head_dim) for _ in range(2))
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    return q, k, v, qkv.new_empty(sequence, batch, groups, q_per_kv + 1, dtype=dtype)


def _backward_fake(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    of_qkv: bool,
    of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    del grad_q, grad_k, grad_v, scale, cos, sin
    grad_qkv = qkv.new_empty(qkv.shape if of_qkv else (0,))
    weights = [w.new_empty(w.shape if of_weights else (0,)) for w in (q_weight, k_weight)]
    return grad_qkv, weights[0], weights[1]


_HEADS = "Tensor qkv, Tensor q_weight, Tensor k_weight"
_normed = define_compiled(
    f"norm_and_rotate({_HEADS}, Tensor cos, Tensor sin, SymInt head_dim, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=_in_turn,
    fits=_fits,
    cuda_fits=_cuda_fits,
    fake=_forward_fake,
    has_gradient=True,
)
_normed_backward = define_compiled(
    f"norm_and_rotate_backward(Tensor grad_q, Tensor grad_k, Tensor grad_v, {_HEADS}, "
    "Tensor scale, Tensor cos, Tensor sin, bool of_qkv, bool of_weights) "
    "-> (Tensor, Tensor, Tensor)",
    reference=_backward_in_turn,
    fits=_backward_fits,
    cuda_fits=_backward_cuda_fits,
    fake=_backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Normed) -> None:
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], output[3], *inputs[3:5])
    ctx.shapes = [x.shape for x in output[:3]]


def _grads(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    qkv = ctx.saved_tensors[0]
    filled = [
        qkv.new_zeros(shape) if grad is None else grad
        for grad, shape in zip(grads[:3], ctx.shapes, strict=True)
    ]
    # A split backward pass requests the gradient of the heads or those of the weights.
    of_qkv, *of_weights = ctx.needs_input_grad[:3]
    found = _normed_backward(*filled, *ctx.saved_tensors, of_qkv, any(of_weights))
    wanted = zip(found, (of_qkv, *of_weights), strict=True)
    return *(grad if needed else None for grad, needed in wanted), *(None,) * 4


define_gradient(_normed, _grads, _setup)
