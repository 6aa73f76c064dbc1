"""Logical tensors and the boxes (chunks) of these tensors that a rank holds.

A checkpoint contains tensors of full shape, such as ``exp_avg.layers.0.norm``, independent of
ranks. A rank optimizes a flat range of its tensor-parallel shard. In general such a range is not a
box, so it is divided into a few boxes, the units of `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from megacore.optim import ParamPiece
from megacore.parallel.params import ShardPosition
from megacore.parallel.process_groups import ProcessGroups

# Kind of the main parameters, the only optimizer state that generation needs.
MAIN_PARAM = "main_param"
# A reader loads whole chunks into memory, so their size is limited: 16 MiB in float32.
MAX_CHUNK_NUMEL = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Box of a logical tensor, with its values on this rank.

    Attributes:
        key: Name of the logical tensor, e.g. ``"main_param.layers.0.norm"``.
        full_shape: Shape of the logical tensor.
        offsets: First index of the box in each dimension.
        tensor: The values, in the shape of the box: read to save, filled in place to load.
    """

    key: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


def tensor_key(kind: str, name: str) -> str:
    """Build the name of the logical tensor of a parameter.

    Example:
        >>> tensor_key("exp_avg", "layers.0.norm")
        'exp_avg.layers.0.norm'
    """
    return f"{kind}.{name}"


def chunks_of(
    pieces: Iterable[ParamPiece], groups: ProcessGroups, *, max_numel: int = MAX_CHUNK_NUMEL
) -> list[Chunk]:
    """Divide the pieces of a rank into boxes of the logical tensors.

    Args:
        pieces: Pieces of this rank.
        groups: Process groups of this rank.
        max_numel: Largest number of elements of a box.
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
    """Divide elements ``[start, end)`` of a flattened tensor into boxes, in order.

    Without the limit there are at most ``2 * len(shape) - 1`` boxes: the rest of a row, whole rows,
    the beginning of a row, and the same in each outer dimension.

    Args:
        shape: Shape of the tensor.
        start: First element.
        end: One past the last element.
        max_numel: Largest number of elements of a box.

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
        # The outermost dimension with a whole slice that starts here and is within both limits.
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
