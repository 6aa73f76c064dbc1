"""Plan of a save: the chunks that each rank writes, and the metadata of the checkpoint.

The default planners of `torch.distributed.checkpoint` support only tensors and DTensors, whose part
on a rank is one box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatrain.checkpoint.chunks import Chunk


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
        self._chunks = {MetadataIndex(chunk.key, chunk.offsets): chunk for chunk in chunks}
        self._read = read

    def over(self, values: Mapping[MetadataIndex, Tensor]) -> HeldChunks:
        """Return the chunks that this rank writes, with other values."""
        return HeldChunks(
            [replace(self._chunks[index], tensor=tensor) for index, tensor in values.items()]
        )

    def items(self) -> list[WriteItem]:
        """List all chunks of this rank."""
        return [_write_item(index, chunk) for index, chunk in self._chunks.items()]

    def values(self, item: WriteItem) -> Tensor:
        """Look up the values of a chunk."""
        return self._chunks[item.index].tensor

    def blocks(self, item: WriteItem) -> Iterator[Tensor]:
        """Yield consecutive blocks of the flattened values of a chunk."""
        chunk = self._chunks[item.index]
        if self._read is None:
            yield chunk.tensor
        else:
            yield from self._read(chunk)


def plan_save(held: Sequence[list[WriteItem]]) -> tuple[list[list[WriteItem]], Metadata]:
    """Assign each chunk to one of its holders and build the metadata; deterministic.

    Args:
        held: Chunks of each rank.

    Returns:
        Chunks that each rank writes, and the metadata without the places of their values.

    Raises:
        RuntimeError: If the chunks do not tile the tensors.
    """
    plans, metadata = create_default_global_save_plan(_share_out(held))
    for key, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)  # we write nothing else
        _check_tiling(key, stored)
    # For generic readers, which rebuild {"main_param": {"layers.0.norm": ...}, ...}.
    names = {key: tuple(key.split(".", 1)) for key in metadata.state_dict_metadata}
    return [plan.items for plan in plans], replace(metadata, planner_data=names)


def num_bytes(metadata: Metadata) -> int:
    """Compute the size of all tensors of a checkpoint, bytes."""
    total = 0
    for stored in metadata.state_dict_metadata.values():
        assert isinstance(stored, TensorStorageMetadata)  # we write nothing else
        total += math.prod(stored.size) * stored.properties.dtype.itemsize
    return total


def box_of(chunk: Chunk) -> ChunkStorageMetadata:
    """Describe the box of a chunk as `torch.distributed.checkpoint` does."""
    return ChunkStorageMetadata(
        offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.tensor.shape)
    )


def _write_item(index: MetadataIndex, chunk: Chunk) -> WriteItem:
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=box_of(chunk),
            properties=TensorProperties(dtype=chunk.tensor.dtype),
            size=torch.Size(chunk.full_shape),
        ),
    )


def _share_out(held: Sequence[list[WriteItem]]) -> list[SavePlan]:
    """Assign each chunk to the holder with the smallest load so far."""
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, items in enumerate(held):
        for item in items:
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = _item_bytes(item)
    load = [0] * len(held)
    owners: dict[MetadataIndex, int] = {}
    order = sorted(holders, key=lambda index: (-sizes[index], index.fqn, index.offset))
    for index in order:
        owners[index] = min(holders[index], key=lambda rank: (load[rank], rank))
        load[owners[index]] += sizes[index]
    return [
        SavePlan([item for item in items if owners[item.index] == rank])
        for rank, items in enumerate(held)
    ]


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None  # we write tensors only
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _check_tiling(key: str, stored: TensorStorageMetadata) -> None:
    """Check that the boxes tile the tensor: no overlaps, and the right total volume."""
    volume = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    pairs = len(create_read_items_for_chunk_list(key, stored, stored.chunks))
    if pairs != len(stored.chunks) or volume != math.prod(stored.size):
        raise RuntimeError(
            f"the pieces of {key} do not tile it: they have {volume} elements of "
            f"{math.prod(stored.size)}, and {pairs - len(stored.chunks)} overlaps"
        )
