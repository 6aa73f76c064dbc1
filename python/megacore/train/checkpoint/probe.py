"""Finding out before the first step whether checkpoints can be written."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from megacore.errors import CheckpointError, DiskFullError
from megacore.parallel.process_groups import ProcessGroups
from megacore.train.checkpoint.agreement import on_every_rank, on_rank_0
from megacore.train.checkpoint.publish import check_room
from megacore.train.folder import describe_os_error, probe_folder


def check_checkpoint_folder(
    directory: str | Path, *, num_bytes: int, groups: ProcessGroups
) -> None:
    """Make the folder of checkpoints and prove that they can be written there. Collective.

    Every rank writes a small file, rank 0 looks whether it sees all of them, and whether there is
    room for one checkpoint. The small files go away again.

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
        on_every_rank(lambda: _write(mine), groups)
        on_rank_0(lambda: _look(directory, groups.world.size), groups)
        on_rank_0(lambda: check_room(directory, num_bytes=num_bytes), groups)
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)


def _probe_file(directory: Path, rank: int) -> Path:
    return directory / f".probe_rank_{rank:05d}"


def _write(file: Path) -> None:
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


def _look(directory: Path, world_size: int) -> None:
    unseen = [rank for rank in range(world_size) if not _probe_file(directory, rank).exists()]
    if unseen:
        raise CheckpointError(
            f"rank 0 does not see what rank {unseen[0]} writes to {directory}; checkpoint.dir must "
            f"be on a file system that all ranks share"
        )
