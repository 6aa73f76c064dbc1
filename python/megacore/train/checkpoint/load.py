"""Reading a checkpoint into any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megacore.errors import CheckpointError
from megacore.optim import ParamPiece
from megacore.parallel.params import shard
from megacore.parallel.process_groups import ProcessGroups
from megacore.train.checkpoint.agreement import gather_results, on_every_rank
from megacore.train.checkpoint.find import resolve_checkpoint
from megacore.train.checkpoint.format import (
    MAIN_PARAM,
    CheckpointIndex,
    CheckpointReader,
    StoredParam,
    TrainState,
    read_index,
)
from megacore.train.checkpoint.shards import shards_of


def load_checkpoint(
    path: str | Path,
    pieces: Sequence[ParamPiece],
    *,
    groups: ProcessGroups,
    config: Mapping[str, Any] | None = None,
) -> TrainState:
    """Fill the tensors of ``pieces`` from a checkpoint of any layout. Collective.

    On the layout that wrote the checkpoint this restores every bit; on another one too, since
    nothing is computed, only cut differently.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, or a run's folder.
        pieces: What this rank holds; their tensors are overwritten.
        groups: Process groups of this rank.
        config: The present configuration as plain values; used to explain a misfit.

    Returns:
        Where the run stood.

    Raises:
        CheckpointError: On every rank, if the checkpoint is missing, damaged, of a newer format, or
            of another model. The pieces may be partly filled then.

    Sync:
        Waits for all ranks.
    """
    folder = on_every_rank(lambda: resolve_checkpoint(path), groups)
    index = on_every_rank(lambda: read_index(folder), groups)
    names = gather_results(lambda: _check_fit(folder, index, pieces, config=config or {}), groups)
    left_over = sorted(set(index.params) - set().union(*names))
    if left_over:
        raise CheckpointError(
            f"checkpoint {folder} has parameters this model does not use, such as {left_over[0]} "
            f"({len(left_over)} in all){_differences(index.config, config or {})}"
        )
    on_every_rank(lambda: _fill(folder, index, pieces, groups), groups)
    return index.state


def load_full_weights(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the weights of a checkpoint as whole tensors, in one process.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, or a run's folder.

    Returns:
        The run's configuration as plain values; each parameter by name, full shape, float32.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged or of a newer format.
    """
    folder = resolve_checkpoint(path)
    index = read_index(folder)
    with CheckpointReader(folder, index) as reader:
        weights = {
            name: reader.full(param, MAIN_PARAM) for name, param in sorted(index.params.items())
        }
    return index.config, weights


def _check_fit(
    folder: Path,
    index: CheckpointIndex,
    pieces: Sequence[ParamPiece],
    *,
    config: Mapping[str, Any],
) -> set[str]:
    """Check that every piece can be filled; return the names of the parameters."""
    for piece in pieces:
        info = piece.info
        stored = index.params.get(info.name)
        if stored is None:
            raise CheckpointError(
                f"checkpoint {folder} has no parameter {info.name}"
                f"{_differences(index.config, config)}"
            )
        if stored.full_shape != info.full_shape:
            raise CheckpointError(
                f"parameter {info.name} has shape {list(stored.full_shape)} in checkpoint "
                f"{folder}, but {list(info.full_shape)} in this model"
                f"{_differences(index.config, config)}"
            )
        missing = sorted(set(piece.tensors) - set(index.kinds))
        if missing:
            raise CheckpointError(
                f"checkpoint {folder} holds {', '.join(index.kinds)} of each parameter, but no "
                f"{missing[0]}, which parameter {info.name} needs to continue training"
            )
    return {piece.info.name for piece in pieces}


def _fill(
    folder: Path, index: CheckpointIndex, pieces: Sequence[ParamPiece], groups: ProcessGroups
) -> None:
    by_name: dict[str, list[ParamPiece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.info.name, []).append(piece)
    with CheckpointReader(folder, index) as reader:
        for name, mine in by_name.items():
            _fill_parameter(reader, index.params[name], mine, groups)


def _fill_parameter(
    reader: CheckpointReader,
    stored: StoredParam,
    pieces: Sequence[ParamPiece],
    groups: ProcessGroups,
) -> None:
    info = pieces[0].info
    tp_size, tp_position = shards_of(info, groups)
    same_shards = (stored.tp_size, stored.tp_dim) == (tp_size, info.tp_dim)
    for kind in pieces[0].tensors:
        if same_shards:
            for piece in pieces:
                values = reader.local(
                    stored, kind, tp_position=tp_position, start=piece.start, end=piece.end
                )
                piece.tensors[kind].copy_(values)
            continue
        full = reader.full(stored, kind)
        local = shard(full, info, tp_position=tp_position, tp_size=tp_size).flatten()
        for piece in pieces:
            piece.tensors[kind].copy_(local[piece.start : piece.end])


def _differences(stored: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Settings of the model that differ, as the end of a sentence."""
    theirs, ours = stored.get("model", {}), present.get("model", {})
    found = [
        f"model.{key} is {theirs[key]} there and {ours[key]} here"
        for key in sorted(set(theirs) & set(ours))
        if theirs[key] != ours[key]
    ]
    if found:
        return "; " + ", ".join(found)
    return "; it belongs to another model: compare the [model] settings with those of that run"
