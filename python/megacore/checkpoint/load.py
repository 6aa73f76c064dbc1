"""Checkpoint load into any layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megacore.checkpoint.agreement import gather_results, on_every_rank
from megacore.checkpoint.checked_files import ADVICE
from megacore.checkpoint.chunks import MAIN_PARAM, Chunk, chunks_of, tensor_key
from megacore.checkpoint.find import resolve_checkpoint, verify_files
from megacore.checkpoint.format import CheckpointIndex, TrainState, read_index
from megacore.checkpoint.metadata import read_metadata
from megacore.checkpoint.planner import ChunkLoadPlanner
from megacore.errors import CheckpointError
from megacore.optim import ParamPiece
from megacore.parallel.process_groups import ProcessGroups


def load_checkpoint(
    path: str | Path,
    pieces: Sequence[ParamPiece],
    *,
    groups: ProcessGroups,
    config: Mapping[str, Any] | None = None,
    verified: bool = False,
) -> TrainState:
    """Fill the tensors of ``pieces`` from a checkpoint of any layout. Collective.

    The state is restored bit for bit on any layout, because values are only redistributed, not
    recomputed.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, or a run's folder.
        pieces: Pieces of this rank; their tensors are overwritten.
        groups: Process groups of this rank.
        config: The current configuration as plain values; used to explain a mismatch.
        verified: Whether `find_checkpoint` has already verified the checksums.

    Returns:
        Progress of the run.

    Raises:
        CheckpointError: On every rank, if the checkpoint is missing, damaged, of another format, or
            of another model. The pieces may then be partly filled.

    Sync:
        Waits for all ranks.
    """
    folder = on_every_rank(lambda: resolve_checkpoint(path), groups)
    if verified:
        index = on_every_rank(lambda: read_index(folder), groups)
    else:
        index = verify_files(folder, groups)
    metadata = on_every_rank(lambda: read_metadata(folder, index), groups)
    fit = _Fit(folder, index, metadata, config or {})
    names = gather_results(lambda: fit.check(pieces), groups)
    fit.check_left_over(set().union(*names))
    # No limit on box sizes here: memory is bounded by the stored chunks.
    chunks = chunks_of(pieces, groups, max_numel=1 << 62)
    on_every_rank(lambda: _fill(folder, metadata, chunks), groups)
    return index.state


class StoredWeights:
    """Weights of a checkpoint, read as whole tensors on demand, in one process.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, or a run's folder.

    Attributes:
        folder: The checkpoint folder.
        config: The run's configuration as plain values.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged or of another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = resolve_checkpoint(path)
        index = verify_files(self.folder, ProcessGroups.single())
        self.config = index.config
        self._metadata = read_metadata(self.folder, index)
        self._stored = _stored_tensors(self._metadata, MAIN_PARAM)

    def names(self) -> list[str]:
        """Return the names of all parameters and checkpointed buffers."""
        return sorted(self._stored)

    def num_bytes(self, name: str) -> int:
        """Return the size of a parameter.

        Raises:
            CheckpointError: If the checkpoint lacks it.
        """
        stored = self._find(name)
        return math.prod(stored.size) * stored.properties.dtype.itemsize

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read parameters by name: full shape, float32.

        Raises:
            CheckpointError: As `read_into`.
        """
        return {
            name: self.read_into(torch.empty(self.num_bytes(name), dtype=torch.uint8), name)
            for name in names
        }

    def read_into(self, memory: Tensor, name: str) -> Tensor:
        """Read a parameter, full shape, float32, to the beginning of ``memory``, bytes.

        Raises:
            CheckpointError: If the checkpoint lacks the parameter or cannot be read.
        """
        stored = self._find(name)
        values = memory[: self.num_bytes(name)].view(stored.properties.dtype).view(stored.size)
        chunk = Chunk(
            key=tensor_key(MAIN_PARAM, name),
            full_shape=tuple(stored.size),
            offsets=(0,) * len(stored.size),
            tensor=values,
        )
        _fill(self.folder, self._metadata, [chunk])
        return values

    def _find(self, name: str) -> TensorStorageMetadata:
        if name not in self._stored:
            raise CheckpointError(
                f"checkpoint {self.folder} has no parameter {name}, which its own "
                "configuration asks for; it was written by another version of the model"
            )
        return self._stored[name]


def load_full_weights(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read all weights of a checkpoint as whole tensors, in one process; see `StoredWeights`.

    Returns:
        The run's configuration as plain values; each parameter by name, full shape, float32.
    """
    stored = StoredWeights(path)
    return stored.config, stored.read(stored.names())


class _Fit:
    """Check that a model can be loaded from a checkpoint."""

    def __init__(
        self,
        folder: Path,
        index: CheckpointIndex,
        metadata: Metadata,
        config: Mapping[str, Any],
    ) -> None:
        self._folder = folder
        self._metadata = metadata
        self._params = _stored_tensors(metadata, MAIN_PARAM)
        self._differences = _differences(index.config, config)

    def check(self, pieces: Sequence[ParamPiece]) -> set[str]:
        """Check that every piece can be filled, and return the names of the parameters."""
        for piece in pieces:
            info = piece.info
            stored = self._params.get(info.name)
            if stored is None:
                raise CheckpointError(
                    f"checkpoint {self._folder} has no parameter {info.name}{self._differences}"
                )
            if tuple(stored.size) != info.full_shape:
                raise CheckpointError(
                    f"parameter {info.name} has shape {list(stored.size)} in checkpoint "
                    f"{self._folder}, but {list(info.full_shape)} in this model{self._differences}"
                )
            for kind in piece.tensors:
                if tensor_key(kind, info.name) not in self._metadata.state_dict_metadata:
                    raise CheckpointError(
                        f"checkpoint {self._folder} has no {kind} of parameter {info.name}, which "
                        "is needed to continue training; to start anew from its weights, set "
                        "checkpoint.load_weights instead of checkpoint.resume"
                    )
        return {piece.info.name for piece in pieces}

    def check_left_over(self, used: set[str]) -> None:
        """Check that every parameter of the checkpoint is used."""
        left_over = sorted(set(self._params) - used)
        if left_over:
            raise CheckpointError(
                f"checkpoint {self._folder} has parameters this model does not use, such as "
                f"{left_over[0]} ({len(left_over)} in all){self._differences}"
            )


def _stored_tensors(metadata: Metadata, kind: str) -> dict[str, TensorStorageMetadata]:
    """Select the logical tensors of one kind, by parameter name."""
    prefix = tensor_key(kind, "")
    return {
        key.removeprefix(prefix): stored
        for key, stored in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
    }


@torch.no_grad()
def _fill(folder: Path, metadata: Metadata, chunks: Sequence[Chunk]) -> None:
    """Fill the chunks from the stored files, without communication."""
    reader = FileSystemReader(folder)
    planner = ChunkLoadPlanner(chunks)
    planner.set_up_planner({}, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except Exception as error:  # checksums match, so the content itself is unreadable
        raise CheckpointError(
            f"cannot read checkpoint {folder}: {type(error).__name__}: {error}; {ADVICE}"
        ) from error


def _differences(stored: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Format the model settings that differ, as the end of a sentence."""
    found = []
    for section in ("model", "moe"):
        theirs, ours = stored.get(section, {}), present.get(section, {})
        found += [
            f"{section}.{key} is {theirs[key]} there and {ours[key]} here"
            for key in sorted(set(theirs) & set(ours))
            if theirs[key] != ours[key]
        ]
    if found:
        return "; " + ", ".join(found)
    return "; it belongs to another model: compare the [model] settings with those of that run"
