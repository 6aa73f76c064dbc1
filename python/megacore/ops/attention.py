"""Fused attention: on CPUs by the faster of torch's and ours.

Our kernel computes blocks of queries and keys by the tiles of our matrix products, where torch
calls a library for each block. It takes several queries without a mask, of heads of up to 256
elements, in float32 or 16 bits. With a mask, 16-bit numbers are widened to float32 for torch on
processors without instructions for them, where its backward pass takes seven times as long in
bfloat16 as in float32. Queries, keys, values and the result are kept in 16 bits; each pass widens
them, so its error is the rounding of its results. `megacore.qualification` measures our kernel and
torch's.

Shapes: B batch, N query heads, G heads of keys and values, S queries, T keys, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from megacore.ops import gemm_cpu
from megacore.ops.kernel_choice import ATTENTION_DTYPES, is_left
from megacore.ops.linear import is_observed
from megacore.ops.register import compiled

_NAMES = {getattr(torch, dtype): f"attention.{dtype}" for dtype in ATTENTION_DTYPES}
# As kMaxHeadDim of cpp/include/megacore/layers/attention.h.
_MAX_HEAD_DIM = 256


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    grouped: bool = False,
) -> Tensor:
    """Compute ``softmax(q k^T * scale + mask) v``, ``(B, N, S, D)``.

    Args:
        q: ``(B, N, S, D)``, on any device.
        k: ``(B, G, T, D)``.
        v: ``(B, G, T, D)``, or with another last dimension.
        mask: As ``attn_mask`` of `torch.nn.functional.scaled_dot_product_attention`.
        is_causal: Query i attends to keys up to i.
        scale: Default: ``D ** -0.5``.
        grouped: Whether G may be less than N.

    Sync:
        None.
    """
    observed = is_observed()
    if not observed and _has_kernel(q, k, v, mask, scale):
        result: Tensor = _Ours.apply(q, k, v, is_causal, _scale(q, scale))  # type: ignore[no-untyped-call]
        return result
    if observed or not _is_widened(q):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    if mask is not None and mask.dtype == q.dtype:
        mask = mask.float()
    return scaled_dot_product_attention(
        q.float(), k.float(), v.float(),
        attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped,
    ).to(q.dtype)  # fmt: skip


class Attended(NamedTuple):
    """Operands and results of attention, from which its backward pass computes the gradients.

    Attributes:
        q: ``(B, N, S, D)``.
        k: ``(B, G, T, D)``.
        v: ``(B, G, T, D)``.
        mixed: Weighted means of values, ``(B, N, S, D)``.
        lse: Logarithm of each query's sum, ``(B, N, S)``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor
    lse: Tensor


def takes_any_width(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether `attention` has a kernel for these widths of keys and values, unmasked.

    Args:
        q: As in `attention`, like the others.
        k: ``(B, G, T, D)``.
        v: ``(B, G, T, E)``.
    """
    return k.shape[-1] == v.shape[-1] or (not is_observed() and _has_kernel(q, k, v, None, None))


def flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention, and the logarithm of each query's sum ``(B, N, S)``; not differentiable.

    Arguments as of `attention`, with one head dimension and a float mask.
    """
    if _has_kernel(q, k, v, mask, scale):
        mixed, lse = _attention(q, k, v, is_causal, _scale(q, scale))
        return mixed, lse
    if _is_widened(q):
        wide_q, wide_k, wide_v = _wide(q, k, v)
        mixed, lse = _flash(wide_q, wide_k, wide_v, mask, is_causal, scale)
        return mixed.to(q.dtype), lse
    return _flash(q, k, v, mask, is_causal, scale)


def flash_on_cpu_backward(
    grad: Tensor,
    done: Attended,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from the results of `flash_on_cpu`."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    *given, lse = grad, *done
    if _has_kernel(done.q, done.k, done.v, mask, scale):
        rest = lse.float(), is_causal, _scale(done.q, scale)
        dq, dk, dv = _attention_backward(*given, *rest)
        return dq, dk, dv
    if not _is_widened(done.q):
        dq, dk, dv = backward(*given, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
        return dq, dk, dv
    mask = mask if mask is None else mask.float()
    found = backward(*_wide(*given), lse, 0.0, is_causal, attn_mask=mask, scale=scale)
    dq, dk, dv = (each.to(done.q.dtype) for each in found)
    return dq, dk, dv


class _Ours(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        mixed: Tensor
        mixed, lse = _attention(q, k, v, is_causal, scale)
        ctx.save_for_backward(q, k, v, mixed, lse)
        ctx.rest = is_causal, scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_attention_backward(grad, *ctx.saved_tensors, *ctx.rest), None, None


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    mask = mask if mask is None else mask.to(q.dtype)
    mixed, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return mixed, lse


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.float() for x in tensors)


def _is_ours(q: Tensor) -> bool:
    """Return whether our kernel is the faster one for the dtype of these queries."""
    return q.is_cpu and (name := _NAMES.get(q.dtype)) is not None and not is_left(name, "cpu")


def _is_widened(q: Tensor) -> bool:
    """Return whether torch computes faster in float32 than in the 16 bits of these queries."""
    return q.dtype.itemsize == 2 and _is_ours(q) and not gemm_cpu.has_fast_products(q.dtype)


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> bool:
    return (
        mask is None
        and _is_ours(q)
        and max(q.shape[-1], v.shape[-1]) <= _MAX_HEAD_DIM
        and q.dtype == k.dtype == v.dtype
        and min(*q.shape, *k.shape, *v.shape) > 0
        and (scale is None or scale >= 0)
        and _pays(q, k)
    )


def _pays(q: Tensor, k: Tensor) -> bool:
    """Return whether there are several queries, and work for all threads.

    Packing the keys for one query takes as long as reading them, and one thread computes all heads
    that share a head of keys.
    """
    return q.shape[2] > 1 and (
        q.shape[1] == k.shape[1] or k.shape[0] * k.shape[1] >= torch.get_num_threads()
    )


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    del k, options
    sizes = *q.shape[:3], v.shape[-1]
    return _in_order_of(q, sizes), q.new_empty(sizes[:3], dtype=torch.float32)


def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, rest
    return _in_order_of(q, q.shape), _in_order_of(k, k.shape), _in_order_of(v, v.shape)


def _in_order_of(x: Tensor, sizes: Any) -> Tensor:
    """Return new memory with the axes in the order of those of ``x``, but for the last one."""
    axes = [*sorted(range(x.dim() - 1), key=lambda axis: -x.stride()[axis]), x.dim() - 1]
    return x.new_empty([sizes[axis] for axis in axes]).permute(
        sorted(range(x.dim()), key=lambda axis: axes[axis])
    )


_attention = compiled(
    "attention(Tensor q, Tensor k, Tensor v, bool is_causal, float scale) -> (Tensor, Tensor)",
    _attention_fake,
)
_attention_backward = compiled(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor mixed, Tensor lse,"
    " bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
    _backward_fake,
)
