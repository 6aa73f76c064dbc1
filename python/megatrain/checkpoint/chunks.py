"""Logical tensors and the boxes (chunks) of these tensors that a rank holds.

A checkpoint contains tensors of full shape, such as ``exp_avg.layers.0.norm``, independent of
ranks. A rank optimizes a flat range of its tensor-parallel shard. In general such a range is not a
box, so it is divided into a few boxes, the units of `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from megacore.optim import ParamPiece
from megacore.parallel.params import ShardPosition
from megacore.parallel.process_groups import ProcessGroups

# Kind of the main parameters, the only optimizer state that generation needs.
MAIN_PARAM = "main_param"
# A reader loads whole chunks into memory, so their size is limited: 16 MiB in float32.
MAX_CHUNK_NUMEL = 1 << 22


ChunkId = tuple[str, tuple[int, ...]]


class Copies(NamedTuple):
    """Ranks with the same box: a product of data-parallel and tensor-parallel ranks.

    Ranks with a box in common have all boxes of equal ``expert``, ``data`` and ``tensor`` in
    common, so each of them knows which of these another one writes.

    Attributes:
        expert: Whether the ranks are those of the expert view.
        data: Number of data-parallel ranks.
        tensor: Number of tensor-parallel ranks.
        position: Position of this rank among them.
    """

    expert: bool = False
    data: int = 1
    tensor: int = 1
    position: int = 0

    @classmethod
    def of(cls, piece: ParamPiece, groups: ProcessGroups) -> Copies:
        """Return the ranks with a piece.

        Example:
            >>> from megacore.parallel import ParamInfo
            >>> info = ParamInfo(name="norm", full_shape=(4,), tp_dim=None)
            >>> piece = ParamPiece(info=info, start=0, end=4, tensors={})
            >>> Copies.of(piece, ProcessGroups.single())
            Copies(expert=False, data=1, tensor=1, position=0)
        """
        info = piece.info
        data = piece.holders or (groups.expert_holders if info.expert else groups.holders)
        tensor = groups.etp if info.expert else groups.tp
        if info.tp_dim is not None:
            return cls(info.expert, data.size, 1, data.position)
        position = data.position * tensor.size + tensor.position
        return cls(info.expert, data.size, tensor.size, position)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Box of a logical tensor, with its values on this rank.

    Attributes:
        key: Name of the logical tensor, e.g. ``"main_param.layers.0.norm"``.
        full_shape: Shape of the logical tensor.
        offsets: First index of the box in each dimension.
        tensor: The values, in the shape of the box: read to save, filled in place to load.
        copies: Ranks with this box.
    """

    key: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    copies: Copies

    @property
    def id(self) -> ChunkId:
        """Name of the tensor and first index of the box."""
        return self.key, self.offsets


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
    return [
        chunk
        for piece in pieces
        for kind, values in piece.tensors.items()
        for chunk in _chunks_of_tensor(piece, kind, values, groups, max_numel=max_numel)
    ]


def _chunks_of_tensor(
    piece: ParamPiece, kind: str, values: Tensor, groups: ProcessGroups, *, max_numel: int
) -> Iterator[Chunk]:
    """Divide one tensor of a piece, which has a value for each element or block of the columns."""
    copies = Copies.of(piece, groups)
    info, elements = piece.info, (piece.end - piece.start) // max(1, values.numel()) or 1
    where = ShardPosition.of(info, groups)
    corner = _in_blocks(where.offsets(info), elements)
    shape = _in_blocks(info.local_shape(where.tp_size, ep_size=where.ep_size), elements)
    first, start = piece.start // elements, 0
    boxes = boxes_of_range(shape, first, first + values.numel(), max_numel=max_numel)
    for offsets, sizes in boxes:
        end = start + math.prod(sizes)
        yield Chunk(
            key=tensor_key(kind, info.name),
            full_shape=_in_blocks(info.full_shape, elements),
            offsets=tuple(map(sum, zip(corner, offsets, strict=True))),
            tensor=values[start:end].view(sizes),
            copies=copies,
        )
        start = end


def _in_blocks(sizes: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """Divide the last of some sizes by the elements of a block."""
    return sizes if elements == 1 else (*sizes[:-1], sizes[-1] // elements)


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
