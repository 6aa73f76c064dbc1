"""The folder of a checkpoint comes and goes by renames: at any moment it is whole or not there."""

from __future__ import annotations

import shutil
from pathlib import Path

from megacore.errors import CheckpointError, DiskFullError
from megacore.train.checkpoint.files import flush_folder, write_durably
from megacore.train.checkpoint.format import (
    INDEX_NAME,
    LATEST_NAME,
    PARTIAL_SUFFIX,
    REPLACED_SUFFIX,
    CheckpointIndex,
    check_files,
    is_step_folder,
    step_folders,
)


def prepare(partial: Path, *, num_bytes: int) -> None:
    """Clear what interrupted saves left behind and make the folder to write into.

    Raises:
        DiskFullError: If there is no room for ``num_bytes`` of tensors.
    """
    directory = partial.parent
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(f"step_*{PARTIAL_SUFFIX}"):
        _delete(leftover)
    for replaced in directory.glob(f"step_*{REPLACED_SUFFIX}"):
        if replaced.with_suffix("").exists():
            _remove(replaced)
    _settle_latest(directory)
    check_room(directory, num_bytes=num_bytes)
    partial.mkdir()


def check_room(directory: Path, *, num_bytes: int) -> None:
    """Check that a checkpoint with ``num_bytes`` of tensors fits on the disk of ``directory``.

    Raises:
        DiskFullError: If it does not.
    """
    free = shutil.disk_usage(directory).free
    # Headers and the index come on top of the tensors.
    needed = num_bytes + num_bytes // 50 + (1 << 20)
    if free < needed:
        raise DiskFullError(
            f"no room for a checkpoint: it takes {needed / 1e6:,.1f} MB, but {directory} has "
            f"{free / 1e6:,.1f} MB left; free some space, lower checkpoint.keep, or set "
            f"checkpoint.dir to another disk"
        )


def publish(partial: Path, index: CheckpointIndex, *, keep: int) -> None:
    """Make the written folder the newest checkpoint and remove old ones.

    Args:
        partial: Folder with all files in it.
        index: What they are.
        keep: Of the checkpoints up to this step only the newest ``keep`` stay.

    Raises:
        CheckpointError: If rank 0 does not see every file in full length.
    """
    directory = partial.parent
    try:
        check_files(partial, index)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; checkpoint.dir must be on a file system that all ranks share"
        ) from None
    write_durably(partial / INDEX_NAME, index.to_json())
    flush_folder(partial)
    final = partial.with_suffix("")
    replaced = final.with_name(final.name + REPLACED_SUFFIX)
    if final.exists():  # the same step once more, after resuming from an earlier one
        final.rename(replaced)
    # Written before the folder has its name: it counts from the moment when the folder is there.
    latest = directory / (LATEST_NAME + PARTIAL_SUFFIX)
    write_durably(latest, final.name + "\n")
    flush_folder(directory)
    partial.rename(final)
    flush_folder(directory)
    latest.replace(directory / LATEST_NAME)
    flush_folder(directory)
    if replaced.exists():
        _remove(replaced)
    # Later steps belong to a continuation that was abandoned; they are the user's to delete.
    so_far = [path for step, path in step_folders(directory) if step <= index.state.step]
    for old in so_far[: -max(1, keep)]:
        _remove(old)


def _settle_latest(directory: Path) -> None:
    """Finish what a run killed right after its last rename has left, before it is overwritten."""
    partial = directory / (LATEST_NAME + PARTIAL_SUFFIX)
    try:
        name = partial.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return
    if is_step_folder(name) and (directory / name).is_dir():
        partial.replace(directory / LATEST_NAME)


def _remove(folder: Path) -> None:
    """Delete a checkpoint so that no moment shows half of it under its name."""
    doomed = folder.with_name(f"{folder.name}.old{PARTIAL_SUFFIX}")
    _delete(doomed)
    folder.rename(doomed)
    _delete(doomed)


def _delete(folder: Path) -> None:
    """Delete a folder; of a symbolic link, which somebody made on purpose, only the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
