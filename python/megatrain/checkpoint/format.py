"""Checkpoint folders and the index of a checkpoint; no communication.

A checkpoint is a folder ``step_00000100`` in the format of `torch.distributed.checkpoint`, with an
additional ``index.json`` next to ``.metadata``. See ``docs/checkpoints.md`` for the fields.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megacore.errors import CheckpointError
from megatrain.checkpoint.checked_files import ADVICE, FileSum, check_size

FORMAT = "megacore-checkpoint"
FORMAT_VERSION = 3
# Version 2 has no state of control and data.
_READABLE_VERSIONS = (2, FORMAT_VERSION)
INDEX_NAME = "index.json"
METADATA_NAME = ".metadata"
# Checkpoints before it have ``.metadata`` only.
TENSORS_NAME = "tensors.idx"
LATEST_NAME = "latest"
PARTIAL_SUFFIX = ".partial"
# A checkpoint being replaced by one of the same step; valid until the replacement is complete.
REPLACED_SUFFIX = ".replaced"

_STEP_FOLDER = re.compile(rf"step_(\d{{8,}})({re.escape(REPLACED_SUFFIX)})?")


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Progress counters of a run, independent of the layout.

    The order of data, the learning rate and dropout are functions of these numbers.

    Attributes:
        step: Finished steps, including skipped updates; the number of the next step, from 0.
        samples: Samples consumed.
        tokens: Tokens of these samples; ``None`` in checkpoints that do not count them.
        optimizer: Scalars of the optimizer, see `DistributedOptimizer.scalars`.
        control: History of losses and skipped updates that decisions depend on, as JSON values.
        data: Sizes of the order of samples, and content of the sources, as JSON values.
        callbacks: States of callbacks by name in ``train.callbacks``, as JSON values.
        kernels: Operations that torch computed in place of our kernels, see
            `megacore.qualification.KernelChoice.state`.
        base: Weights that adapters belong to, see `BaseWeights`, as JSON values; empty in
            checkpoints with all weights.
    """

    step: int
    samples: int
    tokens: int | None = None
    optimizer: Mapping[str, float | int]
    control: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """The content of ``index.json``.

    Attributes:
        state: Progress of the run.
        config: The resolved configuration of the run, as plain values.
        topology: Sizes of the layout that wrote the checkpoint; informative, ignored by loading.
        files: Length and checksum of each other file of the checkpoint.
    """

    state: TrainState
    config: dict[str, Any]
    topology: dict[str, Any]
    files: dict[str, FileSum]

    @property
    def tokens(self) -> int:
        """Tokens consumed: sequences of the checkpoint's length, if it does not count tokens."""
        if self.state.tokens is not None:
            return self.state.tokens
        return self.state.samples * int(self.config["model"]["seq_length"])

    def to_json(self) -> str:
        """Format the text of ``index.json``."""
        data = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return _to_text({**data, "crc32": _checksum(data)})


def step_folder(step: int) -> str:
    """Build the folder name of a checkpoint.

    Example:
        >>> step_folder(100)
        'step_00000100'
    """
    return f"step_{step:08d}"


def is_step_folder(name: str) -> bool:
    """Check if a folder of this name is a finished checkpoint.

    Example:
        >>> is_step_folder("step_00000100"), is_step_folder("../step_00000100")
        (True, False)
    """
    return _STEP_FOLDER.fullmatch(name) is not None


def step_folders(directory: Path) -> list[tuple[int, Path]]:
    """List the finished checkpoints of a directory as (step, folder), oldest step first."""
    if not directory.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir(), reverse=True):  # .replaced before its replacement
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return sorted(found.items())


def read_index(folder: Path) -> CheckpointIndex:
    """Read and check ``index.json`` of one checkpoint folder.

    Raises:
        CheckpointError: If the index is missing, damaged, or of another format version.
    """
    path = folder / INDEX_NAME
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {INDEX_NAME}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither JSON nor UTF-8
        raise CheckpointError(f"cannot read {path}: {error}; {ADVICE}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{path} does not describe a checkpoint of megacore")
    version = data.get("format_version")
    if version not in _READABLE_VERSIONS:
        raise CheckpointError(
            f"{path} has format version {version}, this megacore reads versions "
            f"{' and '.join(map(str, _READABLE_VERSIONS))}; load it with the megacore that wrote it"
        )
    if not _is_intact(text, data):
        raise CheckpointError(
            f"{path} is damaged: its content does not match its checksum; {ADVICE}"
        )
    try:
        files = {name: FileSum(**file) for name, file in data["files"].items()}
        if any(Path(name).name != name for name in files):
            raise KeyError("files outside of the folder")
        return CheckpointIndex(
            state=TrainState(**data["state"]),
            config=data["config"],
            topology=data["topology"],
            files=files,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); {ADVICE}") from error


def check_files(folder: Path, index: CheckpointIndex) -> None:
    """Check that every file of a checkpoint exists with its full length.

    Raises:
        CheckpointError: With the name of the first file that is missing or has another length.
    """
    for name, expected in index.files.items():
        check_size(folder / name, expected)


def _is_intact(text: str, data: Mapping[str, Any]) -> bool:
    """Check if a text is identical to the output of `CheckpointIndex.to_json`.

    The text itself is summed: to format a text again takes much longer than to read it.
    """
    end = _end_of_text(data.get("crc32"))
    return text.endswith(end) and data.get("crc32") == zlib.crc32(
        (text.removesuffix(end) + _end_of_text(None)).encode()
    )


def _end_of_text(crc32: object) -> str:
    return "\n}\n" if crc32 is None else f',\n "crc32": {crc32}\n}}\n'


def _checksum(data: Mapping[str, Any]) -> int:
    return zlib.crc32(_to_text(data).encode())


def _to_text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, allow_nan=False) + "\n"
