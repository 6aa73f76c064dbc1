"""Layout of parameters in one contiguous buffer, and its shards."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megacore import _core
from megacore._core import Bucket, BufferPlan, ShardPiece

__all__ = ["Bucket", "BufferPlan", "ShardPiece", "plan_buckets"]


def plan_buckets(
    numels: Sequence[int],
    *,
    dp_size: int,
    bucket_numel: int | None = None,
    shared: Sequence[bool] = (),
    param_alignment: int = 64,
    bucket_alignment: int | None = None,
    pad_for_ring: bool = False,
    unit: int = 1,
) -> BufferPlan:
    """Lay out parameters in one buffer and split it into buckets.

    Parameters are placed in reverse order, since the backward pass finishes the last one first.
    A bucket, the unit of one collective, closes once it spans ``bucket_numel`` elements and is
    padded so that every data-parallel rank owns an equal slice of it. The plan depends on the
    arguments only, so every rank computes the same one.

    Args:
        numels: Elements of each parameter, in forward (registration) order.
        dp_size: Number of ranks that share the buffer's optimizer state; 1 for no sharding.
        bucket_numel: Elements that close a bucket. Default: the larger of 40 million and one
            million per rank.
        shared: One flag per parameter (or an empty sequence): flagged parameters, such as tied
            embeddings, get a separate bucket.
        param_alignment: Parameters start at multiples of this many elements.
        bucket_alignment: Buckets end at multiples of this many elements; a multiple of ``dp_size``.
            Default: the least common multiple of ``dp_size`` and 128.
        pad_for_ring: Also pad buckets to multiples of 2^16 elements, so that the messages of a ring
            are multiples of a large power of two, which is faster on some networks.
        unit: Elements of parameters that ranks do not divide; a power of two. It raises both
            alignments.

    Returns:
        A plan with ``numel``, ``buckets``, ``param_range(i)``, ``shard(dp_rank)`` and more; all
        ranges count elements and are half open.

    Raises:
        ValueError: If a size is not positive, the number of flags is not the number of parameters,
            or ``dp_size`` does not divide ``bucket_alignment``.

    Example:
        >>> plan = plan_buckets([8, 5, 3], dp_size=4, param_alignment=1, bucket_alignment=4)
        >>> plan.param_range(2), plan.param_range(1), plan.param_range(0)
        ((0, 3), (3, 8), (8, 16))
        >>> [(piece.param_index, piece.param_start, piece.param_end) for piece in plan.shard(1)]
        [(1, 1, 5)]
    """
    if unit > 1:
        param_alignment = math.lcm(param_alignment, unit)
        bucket_alignment = math.lcm(bucket_alignment or 128, dp_size * unit)
    return _core.plan_buckets(
        numels,
        dp_size=dp_size,
        bucket_numel=bucket_numel,
        shared=shared,
        param_alignment=param_alignment,
        bucket_alignment=bucket_alignment,
        pad_for_ring=pad_for_ring,
    )
