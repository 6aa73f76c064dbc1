"""The weights that a checkpoint of adapters belongs to: their place and a checksum.

A checkpoint of adapters has no other weights. It names those that it was trained on, and their
checksum, because adapters of other weights of the same shape would load without an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacore.errors import CheckpointError, MegacoreError
from megatrain.checkpoint.find import resolve_checkpoint
from megatrain.checkpoint.format import METADATA_NAME, read_index
from megatrain.hf_folder import TensorFiles, is_model_folder

# Of each file of Hugging Face, which may be large: the bytes of blocks at equal distances.
_NUM_BLOCKS, _BLOCK_BYTES = 64, 4096


@dataclass(frozen=True, kw_only=True)
class BaseWeights:
    """Weights that adapters were trained on.

    Attributes:
        path: Checkpoint folder or Hugging Face folder, absolute.
        checksum: CRC-32 of the checksums of all files of a checkpoint, or of a sample of those of
            Hugging Face: their lengths, and 64 blocks of 4 KiB of each.
    """

    path: str
    checksum: int

    @classmethod
    def of(cls, path: str | Path) -> BaseWeights:
        """Find weights, and compute their checksum.

        Args:
            path: Hugging Face folder, checkpoint folder, folder of checkpoints, or a run's folder.

        Raises:
            MegacoreError: If there are no weights, or they are adapters.
        """
        path = Path(path).absolute()
        if is_model_folder(path):
            return cls(path=str(path), checksum=_sampled_checksum(path))
        path = resolve_checkpoint(path)
        index = read_index(path)
        if index.state.base:
            raise CheckpointError(
                f"checkpoint {path} has adapters only, which cannot be the base of others; use "
                f"{index.state.base['path']}, their base, or merge them first (megacore export-hf "
                "--merge)"
            )
        checksum = 0
        for name, each in sorted(index.files.items()):
            if name != METADATA_NAME:
                checksum = zlib.crc32(f"{name} {each.num_bytes} {each.crc32}\n".encode(), checksum)
        return cls(path=str(path), checksum=checksum)

    @classmethod
    def of_adapters(cls, checkpoint: Path) -> BaseWeights | None:
        """Return the weights that a checkpoint's adapters belong to; ``None`` if it has none."""
        state: Mapping[str, Any] = read_index(checkpoint).state.base
        return cls(**state) if state else None

    def as_state(self) -> dict[str, Any]:
        """Return the JSON values of `TrainState.base`."""
        return asdict(self)

    def check(self, checkpoint: Path, *, setting: str = "checkpoint.load_weights") -> None:
        """Check that a checkpoint's adapters, if it has any, were trained on these weights.

        Args:
            checkpoint: The checkpoint.
            setting: The name of what chose these weights, for the message.

        Raises:
            CheckpointError: If they were trained on others.
        """
        theirs = BaseWeights.of_adapters(checkpoint)
        if theirs is not None and theirs.checksum != self.checksum:
            raise CheckpointError(
                f"{setting} must be the weights that the adapters of checkpoint {checkpoint} were "
                f"trained on, those of {theirs.path} with checksum {theirs.checksum:08x}, got "
                f"{self.path} with checksum {self.checksum:08x}"
            )


def find_base(given: str | Path | None, adapters: Path | None) -> BaseWeights:
    """Find the weights to train adapters on, and check that they are those of given adapters.

    Args:
        given: ``checkpoint.load_weights``: weights, or adapters, whose weights are meant.
        adapters: Checkpoint of adapters to continue, if there is one.

    Raises:
        MegacoreError: If there are no weights, or the adapters belong to others.
    """
    path = given
    if given is not None and not is_model_folder(Path(given)):
        found = resolve_checkpoint(given)
        recorded = BaseWeights.of_adapters(found)
        path, adapters = (found, adapters) if recorded is None else (None, adapters or found)
    recorded = None if adapters is None else BaseWeights.of_adapters(adapters)
    if path is None:
        if recorded is None:
            raise MegacoreError(
                "adapters need the weights of a model: set checkpoint.load_weights to a Hugging "
                "Face folder, or to the folder that megacore import-hf wrote"
            )
        path = recorded.path
        if not Path(path).exists():
            raise CheckpointError(
                f"checkpoint {adapters} has adapters of the weights {path}, which do not exist; "
                "name their present place in checkpoint.load_weights of a run, or in --base of "
                "eval, generate and export-hf"
            )
    base = BaseWeights.of(path)
    if adapters is not None:
        base.check(adapters)
    return base


def adapters_in(path: Path) -> Path | None:
    """Return the checkpoint of adapters that a path means; ``None`` if it has all weights."""
    if is_model_folder(path):
        return None
    folder = resolve_checkpoint(path)
    return None if BaseWeights.of_adapters(folder) is None else folder


def check_base_option(path: Path, base: str | Path | None) -> None:
    """Check that ``--base`` is given for adapters only.

    Raises:
        CheckpointError: If the weights in ``path`` are those of a whole model.
    """
    if base is not None and adapters_in(path) is None:
        raise CheckpointError(
            f"--base must be left out for {path}, which has all weights of a model, got {base}"
        )


def _sampled_checksum(folder: Path) -> int:
    """Return the checksum of a sample of the files of weights in a folder."""
    checksum = 0
    for path in TensorFiles(folder).paths():
        num_bytes = path.stat().st_size
        checksum = zlib.crc32(f"{path.name} {num_bytes}\n".encode(), checksum)
        last = max(0, num_bytes - _BLOCK_BYTES)
        with path.open("rb", buffering=0) as file:
            for number in range(_NUM_BLOCKS):
                file.seek(last * number // (_NUM_BLOCKS - 1))
                checksum = zlib.crc32(file.read(_BLOCK_BYTES), checksum)
    return checksum
