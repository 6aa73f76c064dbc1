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

from megacore import _core
from megacore.ops import layer_kernels
from megacore.ops.cuda_module import has_cuda_kernels
from megacore.ops.library import define_gradient, define_op
from megacore.ops.rotation import NATIVE, fits

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


def _is_native(
    qkv: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, head_dim: int
) -> bool:
    same = all(w.dtype == qkv.dtype and w.shape == (head_dim,) for w in weights)
    if not same or not fits(cos, sin, qkv):
        return False
    if not qkv.is_cuda:
        return qkv.dtype in NATIVE
    return has_cuda_kernels() and layer_kernels.takes_normed_rotation(qkv, cos, head_dim)


def _in_turn(
    qkv: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, head_dim: int, eps: float
) -> Normed:
    heads = qkv.reshape(*qkv.shape[:3], -1, head_dim)
    norm = torch.ops.megacore.rms_norm
    q, q_scale = norm(heads[..., :-2, :], weights[0], eps)
    k, k_scale = norm(heads[..., -2:-1, :], weights[1], eps)
    normed = torch.cat((q, k, heads[..., -1:, :]), dim=-2).flatten(-2)
    scale = torch.cat((q_scale, k_scale), dim=-2).squeeze(-1)
    return *torch.ops.megacore.split_and_rotate(normed, cos, sin, head_dim), scale


def _backward_in_turn(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    weights: tuple[Tensor, Tensor],
    scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    grad = torch.ops.megacore.split_and_rotate_backward(*grads, cos, sin)
    grad, heads = (x.reshape(*x.shape[:3], -1, len(weights[0])) for x in (grad, qkv))
    found = [
        torch.ops.megacore.rms_norm_backward(
            grad[..., part, :], heads[..., part, :], weight, scale[..., place, None], *needs
        )
        for weight, part, place in (
            (weights[0], slice(None, -2), slice(None, -1)),
            (weights[1], slice(-2, -1), slice(-1, None)),
        )
    ]
    grad_qkv = qkv.new_empty(0)
    if needs[0]:
        parts = (found[0][0], found[1][0], grad[..., -1:, :])
        grad_qkv = torch.cat(parts, dim=-2).flatten(-2)
    return grad_qkv, found[0][1], found[1][1]


def _forward(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    eps: float,
) -> Normed:
    weights = q_weight, k_weight
    if not _is_native(qkv, weights, cos, sin, head_dim):
        return _in_turn(qkv, weights, cos, sin, head_dim, eps)
    results = _forward_fake(qkv, q_weight, k_weight, cos, sin, head_dim, eps)
    _run(qkv, weights, cos, sin, results, eps=eps)
    return results


def _backward(
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
    grads, weights, needs = (grad_q, grad_k, grad_v), (q_weight, k_weight), (of_qkv, of_weights)
    if not _is_native(qkv, weights, cos, sin, len(q_weight)):
        return _backward_in_turn(grads, qkv, weights, scale, cos, sin, needs)
    contiguous = torch.contiguous_format  # the kernel ignores the strides of a transposed input
    grad_qkv = torch.empty_like(qkv, memory_format=contiguous) if of_qkv else None
    # On CPUs the sums over heads are float32.
    sums = scale if qkv.is_cpu else q_weight
    of_each = [sums.new_empty(len(q_weight)) if of_weights else None for _ in weights]
    _run(qkv, weights, cos, sin, (*grads, scale), grads=(grad_qkv, *of_each), backward=True)
    found = [grad_qkv, *of_each]
    empty = q_weight.new_empty(0)
    return tuple(empty if each is None else each.to(qkv.dtype) for each in found)  # type: ignore[return-value]


def _run(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    heads: Normed,
    *,
    grads: tuple[Tensor | None, ...] = (None, None, None),
    **others: Any,
) -> None:
    names = "qkv", "q_weight", "k_weight", "q", "k", "v", "scale", "cos", "sin"
    tensors = [layer_kernels.aligned(x) for x in (qkv, *weights, *heads, cos, sin)]
    arguments: dict[str, Any] = {"eps": 0.0, "backward": False, **others}
    arguments |= layer_kernels.head_sizes(heads[0], heads[1], cos)
    arguments |= {name: x.data_ptr() for name, x in zip(names, tensors, strict=True)}
    for name, grad in zip(("grad_qkv", "grad_q_weight", "grad_k_weight"), grads, strict=True):
        arguments[name] = 0 if grad is None else grad.data_ptr()
    if qkv.is_cuda:
        layer_kernels.norm_and_rotate(qkv, arguments)
        return
    arguments |= {
        "is_bfloat16": qkv.dtype == torch.bfloat16,
        "num_threads": torch.get_num_threads(),
    }
    _core.norm_and_rotate(**arguments)


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
_normed = define_op(
    f"norm_and_rotate({_HEADS}, Tensor cos, Tensor sin, SymInt head_dim, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_forward,
    cuda=_forward,
    fake=_forward_fake,
)
_normed_backward = define_op(
    f"norm_and_rotate_backward(Tensor grad_q, Tensor grad_k, Tensor grad_v, {_HEADS}, "
    "Tensor scale, Tensor cos, Tensor sin, bool of_qkv, bool of_weights) "
    "-> (Tensor, Tensor, Tensor)",
    cpu=_backward,
    cuda=_backward,
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
