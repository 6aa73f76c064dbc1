"""Save and load planners of `torch.distributed.checkpoint` for chunks.

Both planners implement the public interfaces directly. The default planners support only tensors
and DTensors, whose part on a rank is one box.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megacore.checkpoint.chunks import Chunk
from megacore.errors import CheckpointError


class ChunkSavePlanner(SavePlanner):
    """Save planner for chunks; a chunk with several replicas is written by one rank.

    Args:
        chunks: Chunks of this rank.
        read: Yields consecutive parts of the flattened values of a chunk, in place of the chunk's
            own. A part may use the memory of the one before.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        read: Callable[[Chunk], Iterator[Tensor]] | None = None,
    ) -> None:
        self._chunks = {MetadataIndex(chunk.key, chunk.offsets): chunk for chunk in chunks}
        self._read = read

    def over(self, values: Mapping[MetadataIndex, Tensor]) -> ChunkSavePlanner:
        """Create a planner with other values for the chunks that this rank writes."""
        return ChunkSavePlanner(
            [replace(self._chunks[index], tensor=tensor) for index, tensor in values.items()]
        )

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Do nothing: the chunks are the state."""

    def create_local_plan(self) -> SavePlan:
        """List all chunks of this rank."""
        return SavePlan([_write_item(index, chunk) for index, chunk in self._chunks.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign each chunk to one rank and build the metadata; deterministic.

        Raises:
            RuntimeError: If the chunks do not tile the tensors.
        """
        plans, metadata = create_default_global_save_plan(_share_out(all_plans))
        for key, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)  # we write nothing else
            _check_tiling(key, stored)
        # For generic readers, which rebuild {"main_param": {"layers.0.norm": ...}, ...}.
        names = {key: tuple(key.split(".", 1)) for key in metadata.state_dict_metadata}
        return plans, replace(metadata, planner_data=names)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Look up the values of a chunk."""
        return self._chunks[write_item.index].tensor

    def parts(self, write_item: WriteItem) -> Iterator[Tensor]:
        """Yield consecutive parts of the flattened values of a chunk."""
        chunk = self._chunks[write_item.index]
        if self._read is None:
            yield chunk.tensor
        else:
            yield from self._read(chunk)


class ChunkLoadPlanner(LoadPlanner):
    """Load planner that fills chunks from the boxes of a checkpoint.

    Args:
        chunks: Chunks to fill; every key is in the checkpoint, with the same shape.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._metadata = Metadata({})

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # noqa: ARG002
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: ARG002
    ) -> None:
        """Store the metadata of the checkpoint; the chunks are the state."""
        self._metadata = metadata or self._metadata

    def create_local_plan(self) -> LoadPlan:
        """Find the stored boxes that each chunk overlaps."""
        return LoadPlan(
            [
                # A tied parameter may occur twice, so a chunk is identified by its number.
                replace(item, dest_index=MetadataIndex(chunk.key, chunk.offsets, number))
                for number, chunk in enumerate(self._chunks)
                for item in self._read_items(chunk)
            ]
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise an error, because checkpoints contain tensors only.

        Raises:
            CheckpointError: Always.
        """
        raise CheckpointError(
            f"{read_item.storage_index.fqn} is {len(value.getbuffer())} bytes, but checkpoints "
            "hold tensors only"
        )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Select the part of a chunk that one read fills."""
        assert read_item.dest_index.index is not None  # set above
        part = self._chunks[read_item.dest_index.index].tensor
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the tensor was filled in place."""

    def _read_items(self, chunk: Chunk) -> list[ReadItem]:
        stored = self._metadata.state_dict_metadata[chunk.key]
        assert isinstance(stored, TensorStorageMetadata)  # the caller has looked
        return create_read_items_for_chunk_list(chunk.key, stored, [_box(chunk)])


def num_bytes(metadata: Metadata) -> int:
    """Compute the size of all tensors of a checkpoint, bytes."""
    total = 0
    for stored in metadata.state_dict_metadata.values():
        assert isinstance(stored, TensorStorageMetadata)  # we write nothing else
        total += math.prod(stored.size) * stored.properties.dtype.itemsize
    return total


def _box(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.tensor.shape)
    )


def _write_item(index: MetadataIndex, chunk: Chunk) -> WriteItem:
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_box(chunk),
            properties=TensorProperties(dtype=chunk.tensor.dtype),
            size=torch.Size(chunk.full_shape),
        ),
    )


def _share_out(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Assign each chunk to the holder with the smallest load so far."""
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = _item_bytes(item)
    load = [0] * len(plans)
    owners: dict[MetadataIndex, int] = {}
    order = sorted(holders, key=lambda index: (-sizes[index], index.fqn, index.offset))
    for index in order:
        owners[index] = min(holders[index], key=lambda rank: (load[rank], rank))
        load[owners[index]] += sizes[index]
    return [
        replace(plan, items=[item for item in plan.items if owners[item.index] == rank])
        for rank, plan in enumerate(plans)
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
