"""Early checks of the checkpoint folder, and atomic publication and removal by renames.

At any time a checkpoint exists completely or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path

from megacore.errors import CheckpointError, DiskFullError
from megacore.parallel.process_groups import ProcessGroups
from megatrain.checkpoint.agreement import on_every_rank, on_rank_0
from megatrain.checkpoint.checked_files import checked_file, flush_folder
from megatrain.checkpoint.format import (
    INDEX_NAME,
    LATEST_NAME,
    PARTIAL_SUFFIX,
    REPLACED_SUFFIX,
    CheckpointIndex,
    check_files,
    is_step_folder,
    step_folders,
)
from megatrain.files import describe_os_error, probe_folder


def check_checkpoint_folder(
    directory: str | Path, *, num_bytes: int, groups: ProcessGroups
) -> None:
    """Create the checkpoint folder and check that checkpoints can be written there. Collective.

    Every rank writes a small file; rank 0 checks that all files are visible and that there is disk
    space for one checkpoint. The small files are then removed.

    Args:
        directory: Folder of all checkpoints of the run, on a file system that all ranks share.
        num_bytes: Size of the tensors of one checkpoint.
        groups: Process groups of this rank.

    Raises:
        DiskFullError: On every rank, if the disk is too full.
        CheckpointError: On every rank, if a rank cannot write or the folder is not shared.
    """
    directory = Path(directory)
    mine = _probe_file(directory, groups.rank)
    try:
        on_every_rank(lambda: _write_probe(mine), groups)
        on_rank_0(lambda: _check_probes(directory, groups.world.size), groups)
        on_rank_0(lambda: check_room(directory, num_bytes=num_bytes), groups)
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)


def _probe_file(directory: Path, rank: int) -> Path:
    return directory / f".probe_rank_{rank:05d}"


def _write_probe(file: Path) -> None:
    try:
        probe_folder(file.parent)
        file.write_bytes(b"x")
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (DiskFullError if is_full else CheckpointError)(
            f"cannot write checkpoints to {file.parent} (checkpoint.dir): "
            f"{describe_os_error(error)}; choose another folder, or set checkpoint.interval = -1 "
            f"for a run without checkpoints"
        ) from error


def _check_probes(directory: Path, world_size: int) -> None:
    unseen = [rank for rank in range(world_size) if not _probe_file(directory, rank).exists()]
    if unseen:
        raise CheckpointError(
            f"rank 0 does not see what rank {unseen[0]} writes to {directory}; checkpoint.dir must "
            f"be on a file system that all ranks share"
        )


def prepare(partial: Path, *, num_bytes: int) -> None:
    """Remove the leftovers of interrupted saves and create the folder to write into.

    Raises:
        DiskFullError: If there is not enough space for ``num_bytes`` of tensors.
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
        DiskFullError: If the checkpoint does not fit.
    """
    free = shutil.disk_usage(directory).free
    # Allow for headers and the index in addition to the tensors.
    needed = num_bytes + num_bytes // 50 + (1 << 20)
    if free < needed:
        raise DiskFullError(
            f"no room for a checkpoint: it takes {needed / 1e6:,.1f} MB, but {directory} has "
            f"{free / 1e6:,.1f} MB left; free some space, lower checkpoint.keep, or set "
            f"checkpoint.dir to another disk"
        )


def publish(partial: Path, index: CheckpointIndex, *, keep: int | None) -> None:
    """Publish the written folder as the newest checkpoint, and remove old checkpoints.

    Args:
        partial: Folder with all files.
        index: Index of the checkpoint.
        keep: Number of checkpoints up to this step to keep; ``None`` for all.

    Raises:
        CheckpointError: If a file is missing or truncated for rank 0.
    """
    directory = partial.parent
    try:
        check_files(partial, index)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; checkpoint.dir must be on a file system that all ranks share"
        ) from None
    _write_text(partial / INDEX_NAME, index.to_json())
    flush_folder(partial)
    final = partial.with_suffix("")
    replaced = final.with_name(final.name + REPLACED_SUFFIX)
    if final.exists():  # the same step once more, after resuming from an earlier one
        final.rename(replaced)
    # Written before the folder is renamed: it takes effect as soon as the folder exists.
    latest = directory / (LATEST_NAME + PARTIAL_SUFFIX)
    _write_text(latest, final.name + "\n")
    flush_folder(directory)
    partial.rename(final)
    flush_folder(directory)
    latest.replace(directory / LATEST_NAME)
    flush_folder(directory)
    if replaced.exists():
        _remove(replaced)
    if keep is not None:
        remove_old(directory, step=index.state.step, keep=keep)


def _write_text(path: Path, text: str) -> None:
    with checked_file(path) as file:
        file.write(text.encode())


def remove_old(directory: Path, *, step: int, keep: int) -> None:
    """Remove all checkpoints up to ``step`` but the newest ``keep``.

    Later steps belong to an abandoned continuation; deleting them is left to the user.
    """
    so_far = [path for number, path in step_folders(directory) if number <= step]
    for old in so_far[: -max(1, keep)]:
        _remove(old)


def _settle_latest(directory: Path) -> None:
    """Finish the update of ``latest`` of a run that was killed right after its last rename."""
    partial = directory / (LATEST_NAME + PARTIAL_SUFFIX)
    try:
        name = partial.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return
    if is_step_folder(name) and (directory / name).is_dir():
        partial.replace(directory / LATEST_NAME)


def _remove(folder: Path) -> None:
    """Delete a checkpoint atomically: rename the folder first, then delete it."""
    doomed = folder.with_name(f"{folder.name}.old{PARTIAL_SUFFIX}")
    _delete(doomed)
    folder.rename(doomed)
    _delete(doomed)


def _delete(folder: Path) -> None:
    """Delete a folder; for a symbolic link, which was made on purpose, delete only the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
