"""torch's fused attention, with 16-bit numbers on CPUs widened to float32 where that is faster.

`megacore.qualification` measures it. On processors without instructions for 16-bit numbers, the
backward pass takes seven times as long in bfloat16 as in float32. Queries, keys, values and the
result are kept in 16 bits; each pass widens them, so its error is the rounding of its results.

Shapes: B batch, N query heads, G heads of keys and values, S queries, T keys, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from megacore.ops.kernel_choice import NARROW_DTYPES, is_left
from megacore.ops.linear import is_observed

_NAMES = {getattr(torch, dtype): f"attention.{dtype}" for dtype in NARROW_DTYPES}


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
    if not _goes_to_float32(q) or is_observed():
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    if mask is None and q.shape[-1] == v.shape[-1]:
        result: Tensor = _Widened.apply(q, k, v, is_causal, scale)  # type: ignore[no-untyped-call]
        return result
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


def flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention, and the logarithm of each query's sum ``(B, N, S)``; not differentiable.

    Arguments as of `attention`, with one head dimension and a float mask.
    """
    if _goes_to_float32(q):
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
    if not _goes_to_float32(done.q):
        dq, dk, dv = backward(*given, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
        return dq, dk, dv
    mask = mask if mask is None else mask.float()
    found = backward(*_wide(*given), lse, 0.0, is_causal, attn_mask=mask, scale=scale)
    dq, dk, dv = (each.to(done.q.dtype) for each in found)
    return dq, dk, dv


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
    ) -> Tensor:
        mixed, lse = flash_on_cpu(q, k, v, mask=None, is_causal=is_causal, scale=scale)
        ctx.save_for_backward(q, k, v, mixed, lse)
        ctx.rest = {"mask": None, "is_causal": is_causal, "scale": scale}
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        done = Attended(*ctx.saved_tensors)
        return *flash_on_cpu_backward(grad, done, **ctx.rest), None, None


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


def _goes_to_float32(q: Tensor) -> bool:
    return q.is_cpu and (name := _NAMES.get(q.dtype)) is not None and not is_left(name, "cpu")
