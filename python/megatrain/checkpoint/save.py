"""Checkpoint save: plan once; then write, verify and publish, synchronously or in background."""

from __future__ import annotations

import contextlib
import pickle
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from megacore.errors import CheckpointError
from megacore.optim import ParamPiece
from megacore.parallel.process_groups import ProcessGroups
from megatrain.checkpoint.agreement import gather_results, on_rank_0
from megatrain.checkpoint.archives import archive_of, bytes_of
from megatrain.checkpoint.background import Staging, background_groups
from megatrain.checkpoint.checked_files import ChecksumFile, FileSum, checked_file
from megatrain.checkpoint.chunks import Chunk, chunks_of
from megatrain.checkpoint.format import (
    METADATA_NAME,
    PARTIAL_SUFFIX,
    CheckpointIndex,
    TrainState,
    step_folder,
)
from megatrain.checkpoint.planner import HeldChunks, num_bytes, plan_save
from megatrain.checkpoint.publish import prepare, publish, remove_old
from megatrain.daemon import in_daemon

# Time that a process waits at its end for a save in flight, seconds.
_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class _WritePlan:
    """Assignment of chunks to writers, the same for every save of a run.

    Attributes:
        held: All chunks of this rank.
        mine: Chunks that this rank writes.
        metadata: Metadata of the whole checkpoint, without the places of values.
    """

    held: list[WriteItem]
    mine: list[WriteItem]
    metadata: Metadata


@dataclass(frozen=True, kw_only=True)
class _Written:
    """Chunks and files that one rank has written.

    Attributes:
        places: Place of each chunk.
        sums: Length and checksum of each file by name.
    """

    places: dict[MetadataIndex, _StorageInfo]
    sums: dict[str, FileSum]


class CheckpointSaver:
    """Checkpoint writer of one run. Construction and all saves are collective.

    A chunk with several replicas is written by one rank, chosen so that all ranks write about the
    same amount. Copies of shared parameters are not written.

    Args:
        directory: Folder of all checkpoints of the run, on a file system that all ranks share.
        pieces: Returns the pieces of this rank; the same ranges each time.
        groups: Process groups of this rank.
        config: The resolved configuration as plain values (``config.model_dump(mode="json")``).
        keep: Number of checkpoints up to the saved step to keep after success.
        in_background: Copy the state and return from `save`, while a thread writes and publishes.
            The threads of all ranks communicate over a separate gloo group.
        tolerant: Return the error message of a failed save instead of raising the error.
        read: As in `HeldChunks`; for pieces on the meta device.
    """

    def __init__(
        self,
        directory: str | Path,
        pieces: Callable[[], Sequence[ParamPiece]],
        *,
        groups: ProcessGroups,
        config: Mapping[str, Any],
        keep: int = 2,
        in_background: bool = False,
        tolerant: bool = False,
        read: Callable[[Chunk], Iterator[Tensor]] | None = None,
    ) -> None:
        self._read = read
        self._directory = Path(directory)
        self._pieces = pieces
        self._groups = groups
        self._config = config
        self._keep = keep
        self._tolerant = tolerant
        self._plan: _WritePlan | None = None
        self._task: Future[None] | None = None
        self._staging: Staging | None = None
        if in_background:
            self._groups = background_groups(groups)
            self._staging = Staging()

    def save(self, state: TrainState, *, keep_all: bool = False) -> str | None:
        """Write one checkpoint, or start a background save after the previous one has finished.

        Args:
            state: Progress of the run.
            keep_all: Remove no older checkpoint after this save; see `remove_old`.

        Returns:
            Error message of a failed save if failures are tolerated, else ``None``.

        Raises:
            CheckpointError: On every rank, if the disk is too full or a rank cannot write; earlier
                checkpoints are then unchanged. In the background: if the previous save failed.

        Sync:
            Waits for the device. Waits for all ranks unless in the background.
        """
        former = self.finish()
        held = self._held()
        plan = self._planned(held)
        if self._staging is None:
            return self._judge(lambda: self._write(held, plan, state, keep_all=keep_all))
        staged = self._staging.copy(held, plan.mine)
        self._task = in_daemon(
            lambda: self._write(staged, plan, state, keep_all=keep_all), name="megacore-checkpoint"
        )
        return former

    def poll(self) -> str | None:
        """Poll a background save for failure, without blocking while it is in flight.

        Returns:
            As `save`.

        Raises:
            CheckpointError: As `save`.
        """
        return self.finish() if self._task is not None and self._task.done() else None

    def finish(self) -> str | None:
        """Wait for the background save, if there is one.

        Returns:
            As `save`.

        Raises:
            CheckpointError: As `save`.
        """
        task, self._task = self._task, None
        return None if task is None else self._judge(task.result)

    @property
    def is_idle(self) -> bool:
        """True if no background save is in flight on this rank."""
        return self._task is None

    def remove_old(self, step: int) -> None:
        """Remove the checkpoints up to ``step`` that are not kept; rank 0 removes them.

        An error is ignored: the next call tries again.
        """
        if self._groups.rank == 0:
            with contextlib.suppress(OSError):
                remove_old(self._directory, step=step, keep=self._keep)

    def abandon(self) -> None:
        """Abandon a background save at the end of the process; it may still succeed."""
        if self._task is not None:
            wait([self._task], timeout=_GRACE_S)

    def num_bytes(self) -> int:
        """Compute the size of a checkpoint's tensors, bytes. Collective at the first call."""
        return num_bytes(self._planned(self._held()).metadata)

    def _judge(self, action: Callable[[], None]) -> str | None:
        try:
            action()
        except CheckpointError as error:
            if not self._tolerant:
                raise
            return str(error)
        return None

    def _held(self) -> HeldChunks:
        own = [piece for piece in self._pieces() if not piece.info.is_shared_copy]
        return HeldChunks(chunks_of(own, self._groups), read=self._read)

    def _planned(self, chunks: HeldChunks) -> _WritePlan:
        held = chunks.items()
        if self._plan is None:
            shares, metadata = plan_save(gather_results(lambda: held, self._groups))
            mine = shares[self._groups.world.position]
            self._plan = _WritePlan(held=held, mine=mine, metadata=metadata)
        if self._plan.held != held:
            raise RuntimeError("the optimizer holds other ranges than when saving was planned")
        return self._plan

    def _write(
        self, chunks: HeldChunks, plan: _WritePlan, state: TrainState, *, keep_all: bool
    ) -> None:
        groups = self._groups
        partial = self._directory / (step_folder(state.step) + PARTIAL_SUFFIX)

        def finish(written: Sequence[_Written]) -> None:
            files = {METADATA_NAME: _write_metadata(partial, plan.metadata, written)}
            for report in written:
                files |= report.sums
            index = CheckpointIndex(
                state=state,
                config=dict(self._config),
                topology=_describe_topology(groups),
                files=files,
            )
            publish(partial, index, keep=None if keep_all else self._keep)

        try:
            on_rank_0(lambda: prepare(partial, num_bytes=num_bytes(plan.metadata)), groups)
            name = f"__{groups.world.position}_0{DEFAULT_SUFFIX}"
            written = gather_results(lambda: _write_mine(partial / name, chunks, plan.mine), groups)
            on_rank_0(lambda: finish(written), groups)
        except Exception:
            if groups.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def save_checkpoint(
    directory: str | Path,
    pieces: Sequence[ParamPiece],
    *,
    state: TrainState,
    config: Mapping[str, Any],
    groups: ProcessGroups,
    keep: int = 2,
    read: Callable[[Chunk], Iterator[Tensor]] | None = None,
) -> Path:
    """Write a single checkpoint; arguments and errors as `CheckpointSaver`. Collective.

    Returns:
        The folder of the new checkpoint.
    """
    saver = CheckpointSaver(
        directory, lambda: pieces, groups=groups, config=config, keep=keep, read=read
    )
    saver.save(state)
    return Path(directory) / step_folder(state.step)


def _write_mine(path: Path, chunks: HeldChunks, mine: Sequence[WriteItem]) -> _Written:
    """Write this rank's file, if it has chunks to write."""
    if not mine:
        return _Written(places={}, sums={})
    with checked_file(path) as file:
        places = {item.index: _write_chunk(file, path.name, item, chunks) for item in mine}
    return _Written(places=places, sums={path.name: file.sum})


def _write_chunk(
    file: ChecksumFile, name: str, item: WriteItem, chunks: HeldChunks
) -> _StorageInfo:
    """Write one chunk as an archive of `torch.save`."""
    assert item.tensor_data is not None  # we write tensors only
    dtype, sizes = item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes
    archive, offset = archive_of(dtype, tuple(sizes)), file.tell()
    file.write(archive.head)
    for block in chunks.blocks(item):
        file.write(bytes_of(block.cpu().contiguous()))
    file.write(archive.tail)
    assert file.tell() - offset == archive.num_bytes
    return _StorageInfo(relative_path=name, offset=offset, length=archive.num_bytes)


def _write_metadata(partial: Path, metadata: Metadata, written: Sequence[_Written]) -> FileSum:
    """Write ``.metadata``, so that `torch.distributed.checkpoint` can read the folder."""
    complete = replace(
        metadata,
        storage_data={index: at for report in written for index, at in report.places.items()},
        # As text: a pickled path names a module that only Python 3.13 has, or does not have.
        storage_meta=StorageMeta(checkpoint_id=str(partial), save_id=str(uuid.uuid4())),
        version=CURRENT_DCP_VERSION,
    )
    with checked_file(partial / METADATA_NAME) as file:
        pickle.dump(complete, file)
    return file.sum


def _describe_topology(groups: ProcessGroups) -> dict[str, Any]:
    topology = groups.topology
    names = ("world_size", "tp", "cp", "pp", "dp", "ep", "etp", "expert_dp", "order")
    return {name: getattr(topology, name) for name in names}
