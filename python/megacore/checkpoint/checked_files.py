"""Checkpoint files with checksums, computed on write and verified on read."""

from __future__ import annotations

import errno
import io
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megacore import _core
from megacore.checkpoint.archives import archive_of, bytes_of
from megacore.checkpoint.planner import ChunkSavePlanner
from megacore.errors import CheckpointError, DiskFullError
from megacore.files import describe_os_error

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

    def storage_meta(self) -> StorageMeta:
        """Return the folder and identity of the checkpoint, readable by every Python.

        A pickled path names a module that only Python 3.13 has, or does not have.
        """
        return StorageMeta(checkpoint_id=str(self.checkpoint_id), save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan; complete on return."""
        assert isinstance(planner, ChunkSavePlanner)
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results: list[WriteResult] = []
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            for item in plan.items:
                results.append(_write_item(stream, name, item, planner))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _write_item(stream: Any, name: str, item: WriteItem, planner: ChunkSavePlanner) -> WriteResult:
    """Write one chunk as an archive of `torch.save`."""
    assert item.tensor_data is not None  # we write tensors only
    dtype, sizes = item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes
    archive, offset = archive_of(dtype, tuple(sizes)), stream.tell()
    stream.write(archive.head)
    for part in planner.parts(item):
        stream.write(bytes_of(part.cpu().contiguous()))
    stream.write(archive.tail)
    assert stream.tell() - offset == archive.num_bytes
    return WriteResult(
        index=item.index,
        size_in_bytes=archive.num_bytes,
        storage_data=_StorageInfo(relative_path=name, offset=offset, length=archive.num_bytes),
    )


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
        sums = list(pool.map(lambda start: _sum_part(path, start, starts.step), starts))
    found = 0
    for start, part in zip(starts, sums, strict=True):
        length = min(starts.step, expected.num_bytes - start)
        found = _core.crc32_combine(found, part, length)
    if found != expected.crc32:
        raise _damaged(path)


def _sum_threads(expected: FileSum) -> int:
    """Return the number of threads for a checksum: more than one only for large files."""
    return max(1, min(_MAX_SUM_THREADS, expected.num_bytes // _MIN_SUM_BYTES))


def _sum_part(path: Path, start: int, length: int) -> int:
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
    """Reader of parts of files that verifies, at the end, the files that were read.

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
        self._parts: dict[str, list[tuple[int, int, int]]] = {}

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
        parts = self._parts.setdefault(name, [])
        start, end, found = parts.pop() if parts and parts[-1][1] == offset else (offset, offset, 0)
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
        parts.append((start, end, found))

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
            parts = sorted(self._parts.pop(name, []))
            for first, last, part in (*parts, (expected.num_bytes, expected.num_bytes, 0)):
                if first < end:
                    continue  # read twice
                while end < first:
                    gap = block[: min(first - end, _BLOCK_BYTES)]
                    self.read_into(name, end, gap)
                    [(_, _, sum_of_gap)] = self._parts.pop(name)
                    found = _core.crc32_combine(found, sum_of_gap, len(gap))
                    end += len(gap)
                found = _core.crc32_combine(found, part, last - first)
                end = last
            if found != expected.crc32:
                raise _damaged(self._folder / name)


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
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
        view = memoryview(data).cast("B")
        try:
            # In blocks, which are still in the processor's cache when they are written.
            for at in range(0, len(view), _BLOCK_BYTES):
                block = view[at : at + _BLOCK_BYTES]
                self._crc32 = crc32(block, self._crc32)
                super().write(block)
        except OSError as error:
            self.error = error
            raise
        self._num_bytes += len(view)
        return len(view)

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
