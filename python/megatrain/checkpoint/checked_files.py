"""Checkpoint files with checksums, computed on write and verified on read."""

from __future__ import annotations

import errno
import io
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore import _core
from megacore.errors import CheckpointError, DiskFullError
from megatrain.files import describe_os_error

ADVICE = 'use another checkpoint (checkpoint.resume = "auto" takes the newest complete one)'
_BLOCK_BYTES = 1 << 20
# Threads for the checksum of one file, and the bytes below which another one is not worth it.
_MAX_SUM_THREADS = 2
_MIN_SUM_BYTES = 1 << 26
# The same function; the faster one on this processor.
crc32 = _core.crc32 if _core.has_fast_crc32() else zlib.crc32


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """Expected length and checksum of a file.

    Attributes:
        num_bytes: Length of the file.
        crc32: CRC-32 of the file's bytes.
    """

    num_bytes: int
    crc32: int


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
    starts = range(0, expected.num_bytes, max(1, -(-expected.num_bytes // _sum_threads(expected))))
    with ThreadPoolExecutor(max(1, len(starts))) as pool:
        sums = list(pool.map(lambda start: _sum_range(path, start, starts.step), starts))
    found = 0
    for start, checksum in zip(starts, sums, strict=True):
        length = min(starts.step, expected.num_bytes - start)
        found = _core.crc32_combine(found, checksum, length)
    if found != expected.crc32:
        raise _damaged(path)


def _sum_threads(expected: FileSum) -> int:
    """Return the number of threads for a checksum: more than one only for large files."""
    return max(1, min(_MAX_SUM_THREADS, expected.num_bytes // _MIN_SUM_BYTES))


def _sum_range(path: Path, start: int, length: int) -> int:
    """Compute the checksum of at most ``length`` bytes of a file."""
    found = 0
    # One block: new memory for each would take longer than its checksum.
    block = memoryview(bytearray(min(length, _BLOCK_BYTES)))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while length and (count := file.readinto(block[:length])):
                found = crc32(block[:count], found)
                length -= count
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint file {path}: {error.strerror}") from error
    return found


class CheckedReader:
    """Reader of ranges of files that verifies, at the end, the files that were read.

    Each byte is read once: what was not asked for is read by `verify`. Values are not to be
    trusted before. Files stay open until `close`; also a context manager.

    Args:
        folder: Folder of the files.
        files: Length and checksum of each file to verify, by name; others are only read.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileSum]) -> None:
        self._folder = folder
        self._files = files
        self._descriptors: dict[str, int] = {}
        # (first byte, end, checksum) of what was read.
        self._ranges: dict[str, list[tuple[int, int, int]]] = {}

    def __enter__(self) -> CheckedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        """Read from a position of a file.

        Raises:
            CheckpointError: If the file cannot be read or is too short.
        """
        path = self._folder / name
        ranges = self._ranges.setdefault(name, [])
        start, end, found = (
            ranges.pop() if ranges and ranges[-1][1] == offset else (offset, offset, 0)
        )
        try:
            if name not in self._descriptors:
                self._descriptors[name] = os.open(path, os.O_RDONLY)
            for at in range(0, len(into), _BLOCK_BYTES):
                block = into[at : at + _BLOCK_BYTES]
                done = 0
                while done < len(block):
                    count = os.preadv(self._descriptors[name], [block[done:]], end + done)
                    if count == 0:
                        raise CheckpointError(f"checkpoint file {path} is cut off; {ADVICE}")
                    done += count
                if name in self._files:
                    found = crc32(block, found)
                end += len(block)
        except OSError as error:
            raise CheckpointError(
                f"cannot read checkpoint file {path}: {error.strerror}"
            ) from error
        ranges.append((start, end, found))

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Read bytes from a position of a file; see `read_into`."""
        content = bytearray(length)
        self.read_into(name, offset, memoryview(content))
        return bytes(content)

    def verify(self) -> None:
        """Compare the files with their checksums, also those that nothing was read from.

        Raises:
            CheckpointError: With the name of a damaged file.
        """
        block = memoryview(bytearray(_BLOCK_BYTES))
        for name, expected in self._files.items():
            check_size(self._folder / name, expected)
            end = found = 0
            ranges = sorted(self._ranges.pop(name, []))
            for first, last, checksum in (*ranges, (expected.num_bytes, expected.num_bytes, 0)):
                if first < end:
                    continue  # read twice
                while end < first:
                    gap = block[: min(first - end, _BLOCK_BYTES)]
                    self.read_into(name, end, gap)
                    [(_, _, sum_of_gap)] = self._ranges.pop(name)
                    found = _core.crc32_combine(found, sum_of_gap, len(gap))
                    end += len(gap)
                found = _core.crc32_combine(found, checksum, last - first)
                end = last
            if found != expected.crc32:
                raise _damaged(self._folder / name)


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"checkpoint file {path} is damaged: its content does not match its checksum; {ADVICE}"
    )


@contextmanager
def checked_file(path: Path) -> Iterator[ChecksumFile]:
    """Open a new file to write; at the end of the block, flush it to disk and read it back.

    Raises:
        CheckpointError: If the file cannot be written, or differs from what was written to it.
    """
    try:
        with ChecksumFile(path) as file:
            yield file
    except OSError as error:
        raise write_error(Path(error.filename or path), error) from error
    try:
        check_content(path, file.sum)
    except CheckpointError as error:
        # A damaged `latest` could name another checkpoint.
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise CheckpointError(
            f"a checkpoint file differs from the data that was written ({without_advice(error)}); "
            f"check the disk, or set checkpoint.dir to another one"
        ) from error


def without_advice(error: CheckpointError) -> str:
    """Format an error without the advice to use another checkpoint."""
    return str(error).removesuffix(ADVICE).removesuffix("otherwise ").rstrip(";, ")


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


class ChecksumFile(io.BufferedWriter):
    """File opened for writing: computes length and checksum, and is flushed to disk on close."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._num_bytes = self._crc32 = 0

    def write(self, data: Any, /) -> int:
        """Write all bytes, and sum them."""
        view = memoryview(data).cast("B")
        # In blocks, which are still in the processor's cache when they are written.
        for at in range(0, len(view), _BLOCK_BYTES):
            block = view[at : at + _BLOCK_BYTES]
            self._crc32 = crc32(block, self._crc32)
            super().write(block)
        self._num_bytes += len(view)
        return len(view)

    def close(self) -> None:
        """Flush the file to disk, and close it."""
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()

    @property
    def sum(self) -> FileSum:
        """Length and checksum of what was written so far."""
        return FileSum(num_bytes=self._num_bytes, crc32=self._crc32)
