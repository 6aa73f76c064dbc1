"""Logical tensors and the boxes of them that a rank holds.

A checkpoint knows tensors of full shape, such as ``exp_avg.layers.0.norm``, and no ranks. What a
rank optimizes is a flat range of its tensor-parallel shard, which is no box in general: it is cut
into a few boxes, the units that `torch.distributed.checkpoint` writes, finds and reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megacore.optim import ParamPiece
from megacore.parallel.params import ShardPosition
from megacore.parallel.process_groups import ProcessGroups

# What the optimizer keeps per parameter; generation needs the first only.
MAIN_PARAM = "main_param"
# A reader takes whole chunks into memory, so none is larger; at most 16 MiB in float32.
MAX_CHUNK_NUMEL = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a logical tensor, with its values on this rank.

    Attributes:
        key: Name of the logical tensor, e.g. ``"main_param.layers.0.norm"``.
        full_shape: Its shape.
        offsets: Where the box begins.
        tensor: The values, in the shape of the box: read them to save, fill them in place to load.
    """

    key: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


def tensor_key(kind: str, name: str) -> str:
    """Name of the logical tensor of a parameter.

    Example:
        >>> tensor_key("exp_avg", "layers.0.norm")
        'exp_avg.layers.0.norm'
    """
    return f"{kind}.{name}"


def chunks_of(
    pieces: Iterable[ParamPiece], groups: ProcessGroups, *, max_numel: int = MAX_CHUNK_NUMEL
) -> list[Chunk]:
    """Cut what a rank holds into boxes of the logical tensors.

    Args:
        pieces: What this rank holds.
        groups: Process groups of this rank.
        max_numel: No box has more elements.
    """
    chunks = []
    for piece in pieces:
        where = ShardPosition.of(piece.info, groups)
        corner = where.offsets(piece.info)
        shape = piece.info.local_shape(where.tp_size, ep_size=where.ep_size)
        start = 0
        for offsets, sizes in boxes_of_range(shape, piece.start, piece.end, max_numel=max_numel):
            end = start + math.prod(sizes)
            chunks += [
                Chunk(
                    key=tensor_key(kind, piece.info.name),
                    full_shape=piece.info.full_shape,
                    offsets=tuple(map(sum, zip(corner, offsets, strict=True))),
                    tensor=values[start:end].view(sizes),
                )
                for kind, values in piece.tensors.items()
            ]
            start = end
    return chunks


def boxes_of_range(
    shape: tuple[int, ...], start: int, end: int, *, max_numel: int = MAX_CHUNK_NUMEL
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut elements ``[start, end)`` of a flattened tensor into boxes, in order.

    Without the limit there are at most ``2 * len(shape) - 1``: the rest of a row, whole rows, the
    beginning of a row, and the same in each outer dimension.

    Args:
        shape: Shape of the tensor.
        start: First element.
        end: One past the last element.
        max_numel: Boxes with more elements are cut further.

    Returns:
        Offsets and sizes of each box.

    Example:
        >>> boxes_of_range((4, 8), 3, 26)
        [((0, 3), (1, 5)), ((1, 0), (2, 8)), ((3, 0), (1, 2))]
    """
    if not shape:
        return [((), ())] if start < end else []
    strides = list(accumulate(reversed(shape[1:]), int.__mul__, initial=1))[::-1]
    boxes = []
    while start < end:
        # The outermost dimension of which a whole slice begins here, is wanted, and is not too big.
        dim, stride = next(
            (dim, stride)
            for dim, stride in enumerate(strides)
            if stride == 1
            or (start % stride == 0 and start + stride <= end and stride <= max_numel)
        )
        at = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        count = min(shape[dim] - at[dim], (end - start) // stride, max(1, max_numel // stride))
        boxes.append((at, (1,) * dim + (count,) + shape[dim + 1 :]))
        start += count * stride
    return boxes


def whole(key: str, shape: torch.Size, dtype: torch.dtype) -> Chunk:
    """A logical tensor as a single box, to be filled."""
    tensor = torch.empty(shape, dtype=dtype)
    return Chunk(key=key, full_shape=tuple(shape), offsets=(0,) * len(shape), tensor=tensor)
