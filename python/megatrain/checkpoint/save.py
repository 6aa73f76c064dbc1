"""Checkpoint save: plan once; then write, verify and publish, synchronously or in background."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import StorageMeta

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
    TENSORS_NAME,
    CheckpointIndex,
    TrainState,
    step_folder,
)
from megatrain.checkpoint.planner import HeldChunks, boxes_of, merge_boxes
from megatrain.checkpoint.publish import prepare, publish, remove_old
from megatrain.checkpoint.tensor_file import write_tensor_index
from megatrain.checkpoint.tensor_index import TensorIndex
from megatrain.checkpoint.torch_metadata import write_torch_metadata
from megatrain.daemon import in_daemon

# Time that a process waits at its end for a save in flight, seconds.
_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class _WritePlan:
    """Chunks that this rank writes, the same for every save of a run.

    Attributes:
        held: Description of all chunks of this rank.
        mine: Chunks that this rank writes, without values.
        num_bytes: Size of the tensors of the whole checkpoint.
        index: Index of the whole checkpoint; on rank 0 only.
    """

    held: list[tuple[object, ...]]
    mine: list[Chunk]
    num_bytes: int
    index: TensorIndex | None


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
    def in_background(self) -> bool:
        """True if `save` returns before the checkpoint is written."""
        return self._staging is not None

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
        return self._planned(self._held()).num_bytes

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
        held = chunks.describe()
        if self._plan is None:
            mine = chunks.written()
            ranks = gather_results(lambda: boxes_of(mine), self._groups)
            index: list[TensorIndex] = []

            def merge() -> int:
                index.append(merge_boxes(ranks, [_file_name(rank) for rank in range(len(ranks))]))
                return index[0].num_bytes()

            num_bytes = on_rank_0(merge, self._groups)
            self._plan = _WritePlan(
                held=held,
                mine=[replace(chunk, tensor=chunk.tensor.to("meta")) for chunk in mine],
                num_bytes=num_bytes,
                index=index[0] if index else None,
            )
        if self._plan.held != held:
            raise RuntimeError("the optimizer holds other ranges than when saving was planned")
        return self._plan

    def _write(
        self, chunks: HeldChunks, plan: _WritePlan, state: TrainState, *, keep_all: bool
    ) -> None:
        groups = self._groups
        partial = self._directory / (step_folder(state.step) + PARTIAL_SUFFIX)

        def finish(written: Sequence[Mapping[str, FileSum]]) -> None:
            assert plan.index is not None
            index = CheckpointIndex(
                state=state,
                config=dict(self._config),
                topology=_describe_topology(groups),
                files=_write_indexes(partial, plan.index) | _joined(written),
            )
            publish(partial, index, keep=None if keep_all else self._keep)

        try:
            on_rank_0(lambda: prepare(partial, num_bytes=plan.num_bytes), groups)
            path = partial / _file_name(groups.world.position)
            written = gather_results(lambda: _write_mine(path, chunks, plan.mine), groups)
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


def _file_name(position: int) -> str:
    """Return the name of the file of a rank, as `torch.distributed.checkpoint` names it."""
    return f"__{position}_0{DEFAULT_SUFFIX}"


def _write_mine(path: Path, chunks: HeldChunks, mine: Sequence[Chunk]) -> dict[str, FileSum]:
    """Write this rank's file, if it has chunks to write; return its length and checksum."""
    if not mine:
        return {}
    with checked_file(path) as file:
        for chunk in mine:
            _write_chunk(file, chunk, chunks)
    return {path.name: file.sum}


def _write_chunk(file: ChecksumFile, chunk: Chunk, chunks: HeldChunks) -> None:
    """Write one chunk as an archive of `torch.save`."""
    archive = archive_of(chunk.tensor.dtype, tuple(chunk.tensor.shape))
    start = file.tell()
    file.write(archive.head)
    for block in chunks.blocks(chunk.id):
        file.write(bytes_of(block.cpu().contiguous()))
    file.write(archive.tail)
    assert file.tell() - start == archive.num_bytes  # as planned


def _joined(written: Sequence[Mapping[str, FileSum]]) -> dict[str, FileSum]:
    return {name: file for of_rank in written for name, file in of_rank.items()}


def _write_indexes(partial: Path, index: TensorIndex) -> dict[str, FileSum]:
    """Write the index of the tensors, and the same for tools of torch."""
    # As text: a pickled path names a module that only Python 3.13 has, or does not have.
    meta = StorageMeta(checkpoint_id=str(partial), save_id=str(uuid.uuid4()))
    return {
        TENSORS_NAME: write_tensor_index(partial / TENSORS_NAME, index),
        METADATA_NAME: write_torch_metadata(partial / METADATA_NAME, index, meta),
    }


def _describe_topology(groups: ProcessGroups) -> dict[str, Any]:
    topology = groups.topology
    names = ("world_size", "tp", "cp", "pp", "dp", "ep", "etp", "expert_dp", "order")
    return {name: getattr(topology, name) for name in names}
