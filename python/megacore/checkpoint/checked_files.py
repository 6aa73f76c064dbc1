"""Checkpoint files with checksums, computed on write and verified on read."""

from __future__ import annotations

import errno
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from megacore.errors import CheckpointError, DiskFullError
from megacore.files import describe_os_error

ADVICE = 'use another checkpoint (checkpoint.resume = "auto" takes the newest complete one)'
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """Expected length and checksum of a file.

    Attributes:
        num_bytes: Length of the file.
        crc32: CRC-32 of the file's bytes.
    """

    num_bytes: int
    crc32: int


@contextmanager
def _without_archive_sums() -> Iterator[None]:
    """Let torch skip the checksums of its archives, which the sum of the whole file covers.

    torch never verifies them. The setting holds for all threads: an archive that another thread
    writes meanwhile also lacks them. A process writes one checkpoint at a time.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class ChecksumWriter(FileSystemWriter):
    """Writer of `torch.distributed.checkpoint` that records checksums.

    Args:
        folder: Output folder.

    Attributes:
        sums: Length and checksum of each written file, by file name.
    """

    def __init__(self, folder: Path) -> None:
        # Copying ahead would use the current GPU, which in a new thread is the first GPU.
        # Files are flushed to disk on close; torch would flush before the last bytes are written.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.sums: dict[str, FileSum] = {}
        self.fs = _ChecksumFileSystem(self.sums)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan; complete on return."""
        with _without_archive_sums():
            return super().write_data(plan, planner)


def check_size(path: Path, expected: FileSum) -> None:
    """Check that a file exists with its full length.

    Raises:
        CheckpointError: If the file is missing or has another length.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"checkpoint file {path} is missing ({error.strerror}); every rank must see the whole "
            f"checkpoint folder, otherwise {ADVICE}"
        ) from error
    if size != expected.num_bytes:
        raise CheckpointError(
            f"checkpoint file {path} has {size:,} bytes, but was written with "
            f"{expected.num_bytes:,}: it was cut off or changed; {ADVICE}"
        )


def check_content(path: Path, expected: FileSum) -> None:
    """Read a file and verify its checksum.

    Raises:
        CheckpointError: If the file is missing, truncated, unreadable or damaged.
    """
    check_size(path, expected)
    crc32 = 0
    # One block: new memory for each would take longer than its checksum.
    block = memoryview(bytearray(_BLOCK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                crc32 = zlib.crc32(block[:count], crc32)
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint file {path}: {error.strerror}") from error
    if crc32 != expected.crc32:
        raise CheckpointError(
            f"checkpoint file {path} is damaged: its content does not match its checksum; {ADVICE}"
        )


def check_written(path: Path, expected: FileSum) -> None:
    """Read back a file that was just written and verify its checksum.

    Raises:
        CheckpointError: If the file differs from the written data.
    """
    try:
        check_content(path, expected)
    except CheckpointError as error:
        reason = str(error).removesuffix(ADVICE).removesuffix("otherwise ").rstrip(";, ")
        raise CheckpointError(
            f"a checkpoint file differs from the data that was written ({reason}); check the disk, "
            f"or set checkpoint.dir to another one"
        ) from error


def write_durably(path: Path, text: str) -> None:
    """Write a text file, flush it to disk, and read it back.

    Raises:
        CheckpointError: If the file cannot be written, or differs from ``text``.
    """
    try:
        with _ChecksumFile(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise write_error(path, error) from error
    try:
        check_written(path, file.sum)
    except CheckpointError:
        path.unlink(missing_ok=True)  # a damaged `latest` could name another checkpoint
        raise


def write_error(path: Path, error: OSError) -> CheckpointError:
    """Build the error for a checkpoint file or folder that cannot be written."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = (
        "free some space, lower checkpoint.keep, or set checkpoint.dir to another disk"
        if is_full
        else "check the disk, or set checkpoint.dir to another folder"
    )
    return (DiskFullError if is_full else CheckpointError)(
        f"cannot write {path}: {describe_os_error(error)}; {remedy}"
    )


def flush_folder(path: Path) -> None:
    """Flush the directory entries of a folder to disk.

    Raises:
        CheckpointError: If that fails.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise write_error(path, error) from error


class _ChecksumFile(io.BufferedWriter):
    """File opened for writing: computes length and checksum, and is flushed to disk on close."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._num_bytes = self._crc32 = 0
        self.error: OSError | None = None

    def write(self, data: Any, /) -> int:
        self._num_bytes += memoryview(data).nbytes
        self._crc32 = zlib.crc32(data, self._crc32)
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()

    @property
    def sum(self) -> FileSum:
        return FileSum(num_bytes=self._num_bytes, crc32=self._crc32)


class _ChecksumFileSystem(FileSystem):
    """Local file system that adds written files to ``sums`` when they are closed."""

    def __init__(self, sums: dict[str, FileSum]) -> None:
        self._sums = sums

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = _ChecksumFile(Path(path))
        try:
            with file:
                yield file
        except Exception as error:
            # torch's own error about its archive would hide that the disk is full.
            cause = file.error or error
            if isinstance(cause, OSError) and cause.filename is None:
                cause.filename = str(path)
            raise cause from error
        self._sums[Path(path).name] = file.sum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._sums[Path(new_path).name] = self._sums.pop(Path(path).name)
