"""Writing a checkpoint: plan, write, publish."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from megacore.errors import CheckpointError
from megacore.optim import ParamPiece
from megacore.parallel.process_groups import ProcessGroups
from megacore.train.checkpoint.agreement import gather_results, on_rank_0
from megacore.train.checkpoint.format import (
    INDEX_NAME,
    LATEST_NAME,
    PARTIAL_SUFFIX,
    CheckpointIndex,
    StoredParam,
    StoredPiece,
    TrainState,
    check_files,
    step_folder,
    step_folders,
    tensor_checksum,
)
from megacore.train.checkpoint.shards import shards_of


def save_checkpoint(
    directory: str | Path,
    pieces: Sequence[ParamPiece],
    *,
    state: TrainState,
    config: Mapping[str, Any],
    groups: ProcessGroups,
    keep: int = 2,
) -> Path:
    """Write one checkpoint. Collective: every rank calls it with its own pieces.

    Ranges held by several ranks (replicas) are written by one of them; which one is chosen so that
    all ranks write about the same amount. Copies of shared parameters are not written.

    Args:
        directory: Folder of all checkpoints of the run, on a file system that all ranks share.
        pieces: What this rank holds.
        state: Where the run stands.
        config: The resolved configuration as plain values (``config.model_dump(mode="json")``).
        groups: Process groups of this rank.
        keep: After success, of the checkpoints up to this step only the newest ``keep`` stay.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: On every rank, if the disk is too full or a rank cannot write; the previous
            checkpoints are untouched then.

    Sync:
        Waits for the device, and for all ranks.
    """
    directory = Path(directory)
    partial = directory / (step_folder(state.step) + PARTIAL_SUFFIX)
    try:
        plan = plan_writes(pieces, groups)
        on_rank_0(lambda: _prepare(partial, num_bytes=plan.num_bytes), groups)
        written = gather_results(lambda: _write_pieces(partial, plan.mine, groups.rank), groups)
        on_rank_0(
            lambda: _publish(
                partial,
                _make_index(plan, written, state=state, config=config, groups=groups),
                keep=keep,
            ),
            groups,
        )
    except Exception:
        if groups.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial.with_suffix("")


@dataclass(frozen=True, kw_only=True, order=True)
class _Range:
    """Identity of a piece: ranks that hold the same range hold the same values."""

    name: str
    full_shape: tuple[int, ...]
    tp_dim: int | None
    tp_size: int
    tp_position: int
    start: int
    end: int

    @property
    def key(self) -> str:
        return f"{self.name}@{self.tp_position}.{self.start}"


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """Who writes what.

    Attributes:
        owners: The rank that writes each range.
        mine: What this rank writes.
        kinds: Tensors per parameter.
        num_bytes: Of all tensors of the checkpoint.
    """

    owners: dict[_Range, int]
    mine: dict[_Range, ParamPiece]
    kinds: tuple[str, ...]
    num_bytes: int


def plan_writes(pieces: Sequence[ParamPiece], groups: ProcessGroups) -> WritePlan:
    """Share the writing of a checkpoint among the ranks. Collective."""
    held = {
        _range_of(piece, groups): piece
        for piece in pieces
        if not piece.info.is_shared_copy and piece.end > piece.start
    }
    kinds = sorted({tuple(piece.tensors) for piece in held.values()})
    everyone = gather_results(lambda: (list(held), kinds), groups)
    all_kinds = sorted({kind for _, kinds in everyone for kind in kinds})
    if len(all_kinds) != 1:
        raise RuntimeError(f"pieces hold different kinds of tensors: {all_kinds}")
    owners = _choose_owners([ranges for ranges, _ in everyone])
    return WritePlan(
        owners=owners,
        mine={key: piece for key, piece in held.items() if owners[key] == groups.rank},
        kinds=all_kinds[0],
        num_bytes=sum(key.end - key.start for key in owners) * 4 * len(all_kinds[0]),
    )


def _range_of(piece: ParamPiece, groups: ProcessGroups) -> _Range:
    info = piece.info
    size, position = shards_of(info, groups)
    return _Range(
        name=info.name,
        full_shape=info.full_shape,
        tp_dim=info.tp_dim,
        tp_size=size,
        tp_position=position,
        start=piece.start,
        end=piece.end,
    )


def _choose_owners(ranges_of_rank: Sequence[Sequence[_Range]]) -> dict[_Range, int]:
    """Give each range to the holder with the least to write; equal input gives equal output."""
    holders: dict[_Range, list[int]] = {}
    for rank, ranges in enumerate(ranges_of_rank):
        for key in ranges:
            holders.setdefault(key, []).append(rank)
    load = [0] * len(ranges_of_rank)
    owners = {}
    order = sorted(holders, key=lambda key: (key.start - key.end, key.name, key.tp_position))
    for key in order:
        owner = min(holders[key], key=lambda rank: (load[rank], rank))
        load[owner] += key.end - key.start
        owners[key] = owner
    return owners


def _prepare(partial: Path, *, num_bytes: int) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():  # left behind by a run that was interrupted
        shutil.rmtree(partial)
    check_room(partial.parent, num_bytes=num_bytes)
    partial.mkdir()


def check_room(directory: Path, *, num_bytes: int) -> None:
    """Check that a checkpoint with ``num_bytes`` of tensors fits on the disk of ``directory``.

    Raises:
        CheckpointError: If it does not.
    """
    free = shutil.disk_usage(directory).free
    # Headers and the index come on top of the tensors.
    needed = num_bytes + num_bytes // 50 + (1 << 20)
    if free < needed:
        raise CheckpointError(
            f"no room for a checkpoint: it takes {needed / 1e6:,.1f} MB, but {directory} has "
            f"{free / 1e6:,.1f} MB left; free some space, lower checkpoint.keep, or set "
            f"checkpoint.dir to another disk"
        )


@dataclass(frozen=True, kw_only=True)
class _Written:
    file: str
    num_bytes: int
    crc32: dict[_Range, dict[str, int]]


def _write_pieces(partial: Path, pieces: Mapping[_Range, ParamPiece], rank: int) -> _Written | None:
    if not pieces:
        return None
    path = partial / f"rank_{rank:05d}.safetensors"
    arrays: dict[str, NDArray[np.float32]] = {}
    checksums: dict[_Range, dict[str, int]] = {}
    for key, piece in sorted(pieces.items()):
        for kind, values in piece.tensors.items():
            values = values.detach().to("cpu", torch.float32).contiguous()
            arrays[f"{kind}/{key.key}"] = values.numpy()
            checksums.setdefault(key, {})[kind] = tensor_checksum(values)
    try:
        save_file(arrays, path, metadata={"format": "megacore"})
        _flush(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot write checkpoint file {path}: {error}") from error
    return _Written(file=path.name, num_bytes=path.stat().st_size, crc32=checksums)


def _make_index(
    plan: WritePlan,
    written: Sequence[_Written | None],
    *,
    state: TrainState,
    config: Mapping[str, Any],
    groups: ProcessGroups,
) -> CheckpointIndex:
    pieces: dict[str, list[tuple[_Range, StoredPiece]]] = {}
    for key, owner in sorted(plan.owners.items()):
        report = written[owner]
        assert report is not None  # an owner has something to write
        piece = StoredPiece(
            file=report.file,
            key=key.key,
            tp_position=key.tp_position,
            start=key.start,
            end=key.end,
            crc32=report.crc32[key],
        )
        pieces.setdefault(key.name, []).append((key, piece))
    params = {}
    for name, found in pieces.items():
        first = found[0][0]
        params[name] = StoredParam(
            name=name,
            full_shape=first.full_shape,
            tp_dim=first.tp_dim,
            tp_size=first.tp_size,
            pieces=tuple(piece for _, piece in found),
        )
        try:
            params[name].check_complete()
        except ValueError as error:
            raise RuntimeError(f"the pieces of {name} do not tile it: {error}") from error
    return CheckpointIndex(
        state=state,
        config=dict(config),
        topology=_describe_topology(groups),
        kinds=plan.kinds,
        params=params,
        files={report.file: report.num_bytes for report in written if report is not None},
    )


def _describe_topology(groups: ProcessGroups) -> dict[str, Any]:
    topology = groups.topology
    names = ("world_size", "tp", "cp", "pp", "dp", "ep", "etp", "expert_dp", "order")
    return {name: getattr(topology, name) for name in names}


def _publish(partial: Path, index: CheckpointIndex, *, keep: int) -> None:
    """Make the written folder the newest checkpoint. Before the rename it does not exist at all."""
    directory = partial.parent
    final = partial.with_suffix("")
    try:
        check_files(partial, index)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; checkpoint.dir must be on a file system that all ranks share"
        ) from None
    (partial / INDEX_NAME).write_text(index.to_json(), encoding="utf-8")
    _flush(partial / INDEX_NAME)
    _flush(partial)
    if final.exists():  # the same step once more, after resuming from an earlier one
        _remove(final)
    partial.rename(final)
    _flush(directory)
    latest = directory / (LATEST_NAME + PARTIAL_SUFFIX)
    latest.write_text(final.name + "\n", encoding="utf-8")
    _flush(latest)
    latest.replace(directory / LATEST_NAME)
    _flush(directory)
    # Later steps belong to a continuation that was abandoned; they are the user's to delete.
    so_far = [path for step, path in step_folders(directory) if step <= index.state.step]
    for old in so_far[: -max(1, keep)]:
        _remove(old)


def _remove(folder: Path) -> None:
    """Delete a checkpoint so that no moment shows half of it under its name."""
    doomed = folder.with_name(f"{folder.name}.old{PARTIAL_SUFFIX}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
