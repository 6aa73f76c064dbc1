"""Dropout with a counter-based mask as one operation, which draws the mask again backwards.

Native for float32 and bfloat16 on CPUs and for these and float16 on GPUs; elsewhere the torch
operations of :mod:`megacore.ops.counter_random`. All give equal bits.

Shapes: S sequence (or this rank's slice of it), B batch, H features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.ops.counter_random import token_numbers
from megacore.ops.register import define_compiled, define_gradient, describe


def counter_dropout(
    x_SBH: Tensor, sample_ids_B: Tensor, positions_S: Tensor, *, key: int | Tensor, p: float
) -> Tensor:
    """Zero elements with probability ``p`` and scale the others by ``1 / (1 - p)``.

    An element is kept if its number, a signed 64-bit integer, is at least ``p * 2**64 - 2**63``.

    Args:
        x_SBH: Any float dtype.
        sample_ids_B: Global sample ids, int64.
        positions_S: Positions in the whole sequence, int64.
        key: Key of the use, see `megacore.ops.counter_random.token_numbers`; a tensor is read on
            its device, also in the backward pass.
        p: In ``[0, 1)``.

    Raises:
        ValueError: For a key, ids or positions of another shape, dtype or device.

    Example:
        >>> x, ids, positions = torch.ones(100, 1, 100), torch.tensor([7]), torch.arange(100)
        >>> y = counter_dropout(x, ids, positions, key=5, p=0.5)
        >>> sorted(y.unique().tolist()), abs(y.mean().item() - 1.0) < 0.05
        ([0.0, 2.0], True)
    """
    shapes = x_SBH.shape[1:2], x_SBH.shape[:1]
    for name, of, shape in zip(
        ("sample_ids_B", "positions_S"), (sample_ids_B, positions_S), shapes, strict=True
    ):
        if of.dtype != torch.int64 or of.shape != shape or of.device != x_SBH.device:
            raise ValueError(
                f"{name} must be {tuple(shape)} int64 on {x_SBH.device}, got {describe(of)}"
            )
    keys = (key.to(torch.int64), 0) if isinstance(key, Tensor) else (None, key)
    if isinstance(key, Tensor) and (
        key.is_floating_point() or key.numel() != 1 or key.device != x_SBH.device
    ):
        raise ValueError(f"key must be one whole number on {x_SBH.device}, got {describe(key)}")
    result: Tensor = _dropout(x_SBH, sample_ids_B, positions_S, *keys, p)
    return result


def keep_mask(
    key: int | Tensor,
    *,
    p: float,
    sample_ids_B: Tensor,
    positions_S: Tensor,
    num_features: int,
    first_feature: int = 0,
) -> Tensor:
    """Compute the mask of `counter_dropout`, ``(S, B, H)`` bool, with torch operations."""
    numbers = token_numbers(
        key,
        sample_ids_B=sample_ids_B,
        positions_S=positions_S,
        num_features=num_features,
        first_feature=first_feature,
    )
    return numbers >= _threshold(p)


def _threshold(p: float) -> int:
    return round(p * 2**64) - 2**63


def _reference(
    x: Tensor, sample_ids: Tensor, positions: Tensor, key: Tensor | None, value: int, p: float
) -> Tensor:
    keep = keep_mask(
        value if key is None else key,
        p=p,
        sample_ids_B=sample_ids,
        positions_S=positions,
        num_features=x.shape[2],
    )
    return x * (keep * (1.0 / (1.0 - p))).to(x.dtype)


def _fake(x: Tensor, *others: Any) -> Tensor:
    del others
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_dropout = define_compiled(
    "counter_dropout(Tensor x, Tensor sample_ids, Tensor positions, Tensor? key, int value, "
    "float p) -> Tensor",
    reference=_reference,
    fake=_fake,
    has_gradient=True,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[1:4])
    ctx.numbers = inputs[4:]


def _grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # The derivative is the operation itself, with the same mask.
    return _dropout(grad, *ctx.saved_tensors, *ctx.numbers), *(None,) * 5


define_gradient(_dropout, _grads, _setup)
