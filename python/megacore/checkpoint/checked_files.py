"""Checkpoint files with checksums, computed on write and verified on read."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from megacore.errors import CheckpointError

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


class ChecksumWriter(FileSystemWriter):
    """Writer of `torch.distributed.checkpoint` that records checksums.

    Args:
        folder: Output folder.

    Attributes:
        sums: Length and checksum of each written file, by file name.
    """

    def __init__(self, folder: Path) -> None:
        # Copying ahead would use the current GPU, which in a new thread is the first GPU.
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=0)
        self.sums: dict[str, FileSum] = {}
        self.fs = _ChecksumFileSystem(self.sums)


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
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                crc32 = zlib.crc32(block, crc32)
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint file {path}: {error.strerror}") from error
    if crc32 != expected.crc32:
        raise CheckpointError(
            f"checkpoint file {path} is damaged: its content does not match its checksum; {ADVICE}"
        )


def write_durably(path: Path, text: str) -> FileSum:
    """Write a text file and flush it to disk."""
    file = _ChecksumFile(path)
    with file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    return file.sum


def flush_folder(path: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _ChecksumFile(io.BufferedWriter):
    """File opened for writing that computes the length and checksum of its content."""

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
            raise file.error or error from error
        self._sums[Path(path).name] = file.sum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._sums[Path(new_path).name] = self._sums.pop(Path(path).name)
