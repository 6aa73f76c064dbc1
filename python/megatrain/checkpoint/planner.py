"""Plan of a save: the chunks that each rank writes, and the index of all.

Who writes a chunk is a function of the layout, so no plan travels: a rank decides for itself. Rank
0 gets, once, the boxes that each rank writes, and checks that they tile the tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from megacore.errors import CheckpointError
from megatrain.checkpoint.archives import archive_of
from megatrain.checkpoint.chunks import Chunk, ChunkId, Copies
from megatrain.checkpoint.tensor_checks import check_tiling
from megatrain.checkpoint.tensor_index import Numbers, TensorIndex, padded, smallest, tensor_columns


class HeldChunks:
    """Chunks of a rank with their values.

    Args:
        chunks: Chunks of this rank.
        read: Yields consecutive blocks of the flattened values of a chunk, in place of the chunk's
            own. A block may use the memory of the one before.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        read: Callable[[Chunk], Iterator[Tensor]] | None = None,
    ) -> None:
        self._chunks = {chunk.id: chunk for chunk in chunks}
        self._read = read

    def over(self, values: Mapping[ChunkId, Tensor]) -> HeldChunks:
        """Return the chunks that this rank writes, with other values."""
        return HeldChunks(
            [replace(self._chunks[chunk], tensor=tensor) for chunk, tensor in values.items()]
        )

    def describe(self) -> list[tuple[object, ...]]:
        """Describe all chunks of this rank without their values, to compare."""
        return [
            (*name, chunk.full_shape, chunk.tensor.shape, chunk.tensor.dtype)
            for name, chunk in self._chunks.items()
        ]

    def written(self) -> list[Chunk]:
        """Select the chunks that this rank writes."""
        return written_chunks(list(self._chunks.values()))

    def values(self, chunk: ChunkId) -> Tensor:
        """Look up the values of a chunk."""
        return self._chunks[chunk].tensor

    def blocks(self, chunk: ChunkId) -> Iterator[Tensor]:
        """Yield consecutive blocks of the flattened values of a chunk."""
        held = self._chunks[chunk]
        if self._read is None:
            yield held.tensor
        else:
            yield from self._read(held)


def written_chunks(held: Sequence[Chunk]) -> list[Chunk]:
    """Select the chunks that this rank writes, from all that it holds, in their order.

    Of the chunks that the same ranks hold, each goes, largest first, to the rank with the fewest
    bytes so far. All of these ranks come to the same result.
    """
    together: dict[Copies, list[Chunk]] = {}
    for chunk in held:
        together.setdefault(chunk.copies, []).append(chunk)
    mine = set()
    for copies, chunks in together.items():
        mine |= _share(copies, chunks)
    return [chunk for chunk in held if chunk.id in mine]


def _share(copies: Copies, chunks: Sequence[Chunk]) -> set[ChunkId]:
    num_ranks = copies.data * copies.tensor
    if num_ranks == 1:
        return {chunk.id for chunk in chunks}
    # Of equal loads the lowest position is first, so higher ones than chunks get none.
    loads = [(0, position) for position in range(min(num_ranks, len(chunks)))]
    mine = set()
    for chunk in sorted(chunks, key=lambda each: (-each.tensor.nbytes, each.id)):
        load, position = heapq.heappop(loads)
        heapq.heappush(loads, (load + chunk.tensor.nbytes, position))
        if position == copies.position:
            mine.add(chunk.id)
    return mine


@dataclass(frozen=True, kw_only=True)
class RankBoxes:
    """Boxes that one rank writes into its file, in order, for `merge_boxes`.

    Attributes:
        keys: Names of their tensors.
        dtypes: Number format of each tensor, a name in torch.
        shapes: Full shape of each tensor.
        tensors: Tensor of each box, int32, ``(n,)``.
        offsets: First index, int64, ``(n, D)``; 0 beyond the dimensions of the tensor.
        sizes: Extent, int64, ``(n, D)``; 1 beyond.
        lengths: Bytes of each archive, int64, ``(n,)``; they follow one another.
        heads: Bytes of each archive before the values, int32, ``(n,)``.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tensors: Numbers
    offsets: Numbers
    sizes: Numbers
    lengths: Numbers
    heads: Numbers


def boxes_of(chunks: Sequence[Chunk]) -> RankBoxes:
    """Describe the chunks that a rank writes."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(c.key for c in chunks))}
    of_key = {chunk.key: chunk for chunk in chunks}
    num_dims = max([1, *(len(chunk.offsets) for chunk in chunks)])
    archives = [archive_of(chunk.tensor.dtype, tuple(chunk.tensor.shape)) for chunk in chunks]
    return RankBoxes(
        keys=tuple(numbers),
        dtypes=tuple(str(of_key[key].tensor.dtype).removeprefix("torch.") for key in numbers),
        shapes=tuple(of_key[key].full_shape for key in numbers),
        tensors=np.array([numbers[chunk.key] for chunk in chunks], np.int32),
        offsets=padded([chunk.offsets for chunk in chunks], num_dims, 0),
        sizes=padded([tuple(chunk.tensor.shape) for chunk in chunks], num_dims, 1),
        lengths=np.array([archive.num_bytes for archive in archives], np.int64),
        heads=np.array([len(archive.head) for archive in archives], np.int32),
    )


def merge_boxes(ranks: Sequence[RankBoxes], files: Sequence[str]) -> TensorIndex:
    """Build the index of a checkpoint from the boxes of all ranks, and check it.

    Args:
        ranks: Boxes of each rank.
        files: Name of each rank's file.

    Raises:
        RuntimeError: If the boxes do not tile the tensors.
    """
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    for boxes in ranks:
        for key, dtype, shape in zip(boxes.keys, boxes.dtypes, boxes.shapes, strict=True):
            if known.setdefault(key, (dtype, shape)) != (dtype, shape):
                raise RuntimeError(
                    f"{key} is {dtype} {shape} on one rank and {known[key]} on another"
                )
    keys = sorted(known)
    numbers = {key: number for number, key in enumerate(keys)}
    num_dims = max([1, *(boxes.offsets.shape[1] for boxes in ranks)])
    writers = [rank for rank, boxes in enumerate(ranks) if len(boxes.tensors)]
    of_files = np.repeat(np.arange(len(writers)), [len(ranks[rank].tensors) for rank in writers])
    parts: dict[str, list[Numbers]] = {
        name: [np.zeros((0, num_dims) if name in ("offsets", "sizes") else 0, np.int64)]
        for name in ("tensors", "offsets", "sizes", "places", "lengths", "heads")
    }
    for boxes in (ranks[rank] for rank in writers):
        own = np.array([numbers[key] for key in boxes.keys], np.int64)
        parts["tensors"].append(own[boxes.tensors])
        parts["places"].append(np.cumsum(boxes.lengths) - boxes.lengths)
        parts["lengths"].append(boxes.lengths)
        parts["heads"].append(boxes.heads)
        for name, column, value in (("offsets", boxes.offsets, 0), ("sizes", boxes.sizes, 1)):
            more = np.full((len(column), num_dims - column.shape[1]), value)
            parts[name].append(np.hstack([column, more]))
    columns = {name: smallest(np.concatenate(parts.pop(name))) for name in list(parts)}
    columns["files"] = smallest(of_files)
    order = np.lexsort((*columns["offsets"].T[::-1], columns["tensors"]))
    columns = {name: column[order] for name, column in columns.items()}
    counts = np.bincount(columns.pop("tensors"), minlength=len(keys))
    index = TensorIndex(
        dtypes=(dtypes := sorted({dtype for dtype, _ in known.values()})),
        files=[files[rank] for rank in writers],
        columns={
            **tensor_columns(
                keys,
                [dtypes.index(known[key][0]) for key in keys],
                [known[key][1] for key in keys],
            ),
            "box_ends": np.cumsum(counts),
            **columns,
        },
    )
    try:
        check_tiling(index)
    except CheckpointError as error:
        raise RuntimeError(f"the ranks would not write each element once: {error}") from error
    return index
