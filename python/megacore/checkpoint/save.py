"""Checkpoint save: plan once; then write, verify and publish, synchronously or in background."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megacore.checkpoint.agreement import gather_results, on_rank_0
from megacore.checkpoint.background import BackgroundTask, Staging, background_groups
from megacore.checkpoint.checked_files import ChecksumWriter, FileSum, check_written, write_error
from megacore.checkpoint.chunks import Chunk, chunks_of
from megacore.checkpoint.format import (
    METADATA_NAME,
    PARTIAL_SUFFIX,
    CheckpointIndex,
    TrainState,
    step_folder,
)
from megacore.checkpoint.planner import ChunkSavePlanner, num_bytes
from megacore.checkpoint.publish import prepare, publish, remove_old
from megacore.errors import CheckpointError
from megacore.optim import ParamPiece
from megacore.parallel.process_groups import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class _WritePlan:
    """Assignment of chunks to writers, the same for every save of a run.

    Attributes:
        held: All chunks of this rank.
        mine: Chunks that this rank writes.
        metadata: Metadata of the whole checkpoint.
    """

    held: list[WriteItem]
    mine: SavePlan
    metadata: Metadata


@dataclass(frozen=True, kw_only=True)
class _Written:
    """Write results of one rank."""

    results: list[WriteResult]
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
        read: As in `ChunkSavePlanner`; for pieces on the meta device.
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
        self._task: BackgroundTask | None = None
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
        planner = self._planner()
        plan = self._planned(planner)
        if self._staging is None:
            return self._judge(lambda: self._write(planner, plan, state, keep_all=keep_all))
        staged = self._staging.copy(planner, plan.mine)
        self._task = BackgroundTask(lambda: self._write(staged, plan, state, keep_all=keep_all))
        return former

    def poll(self) -> str | None:
        """Poll a background save for failure, without blocking while it is in flight.

        Returns:
            As `save`.

        Raises:
            CheckpointError: As `save`.
        """
        return self.finish() if self._task is not None and self._task.is_done else None

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
            self._task.abandon()

    def num_bytes(self) -> int:
        """Compute the size of a checkpoint's tensors, bytes. Collective at the first call."""
        return num_bytes(self._planned(self._planner()).metadata)

    def _judge(self, action: Callable[[], None]) -> str | None:
        try:
            action()
        except CheckpointError as error:
            if not self._tolerant:
                raise
            return str(error)
        return None

    def _planner(self) -> ChunkSavePlanner:
        own = [piece for piece in self._pieces() if not piece.info.is_shared_copy]
        return ChunkSavePlanner(chunks_of(own, self._groups), read=self._read)

    def _planned(self, planner: ChunkSavePlanner) -> _WritePlan:
        held = planner.create_local_plan().items
        if self._plan is None:
            plans = gather_results(lambda: SavePlan(held), self._groups)
            plans, metadata = planner.create_global_plan(plans)
            plans = ChecksumWriter(Path()).prepare_global_plan(plans)
            mine = planner.finish_plan(plans[self._groups.world.position])
            self._plan = _WritePlan(held=held, mine=mine, metadata=metadata)
        if self._plan.held != held:
            raise RuntimeError("the optimizer holds other ranges than when saving was planned")
        return self._plan

    def _write(
        self, planner: ChunkSavePlanner, plan: _WritePlan, state: TrainState, *, keep_all: bool
    ) -> None:
        groups = self._groups
        partial = self._directory / (step_folder(state.step) + PARTIAL_SUFFIX)

        def finish(written: Sequence[_Written]) -> None:
            sums = _finish_dcp(partial, plan.metadata, written)
            index = CheckpointIndex(
                state=state,
                config=dict(self._config),
                topology=_describe_topology(groups),
                files=sums,
            )
            publish(partial, index, keep=None if keep_all else self._keep)

        try:
            on_rank_0(lambda: prepare(partial, num_bytes=num_bytes(plan.metadata)), groups)
            written = gather_results(lambda: _write_mine(partial, planner, plan.mine), groups)
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


def _write_mine(partial: Path, planner: ChunkSavePlanner, plan: SavePlan) -> _Written:
    """Write this rank's file, flush it to disk, and read it back."""
    writer = ChecksumWriter(partial)
    if not plan.items:
        return _Written(results=[], sums={})
    try:
        results = writer.write_data(plan, planner).wait()
    except OSError as error:
        raise write_error(Path(error.filename or partial), error) from error
    for name, expected in writer.sums.items():
        check_written(partial / name, expected)
    return _Written(results=results, sums=writer.sums)


def _finish_dcp(
    partial: Path, metadata: Metadata, written: Sequence[_Written]
) -> dict[str, FileSum]:
    """Write ``.metadata``, so that DCP can read the folder, and return the sums of all files."""
    writer = ChecksumWriter(partial)
    try:
        # A copy, because finish() adds the storage locations to the metadata.
        writer.finish(replace(metadata), [report.results for report in written])
    except OSError as error:
        raise write_error(Path(error.filename or partial / METADATA_NAME), error) from error
    for name, expected in writer.sums.items():
        check_written(partial / name, expected)
    sums = dict(writer.sums)
    for report in written:
        sums |= report.sums
    return sums


def _describe_topology(groups: ProcessGroups) -> dict[str, Any]:
    topology = groups.topology
    names = ("world_size", "tp", "cp", "pp", "dp", "ep", "etp", "expert_dp", "order")
    return {name: getattr(topology, name) for name in names}
