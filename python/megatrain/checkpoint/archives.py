"""Archives of single tensors as `torch.save` writes them, without torch's copies of the values."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, cast

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options, skip_data


@dataclass(frozen=True, kw_only=True)
class Archive:
    """Bytes of an archive around the values of its tensor.

    Attributes:
        head: Bytes before the values.
        tail: Bytes after the values.
        num_bytes: Length of the whole archive.
    """

    head: bytes
    tail: bytes
    num_bytes: int


@functools.lru_cache(maxsize=1024)
def archive_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Archive:
    """Return the archive of contiguous tensors of one dtype and shape, as torch would write it.

    Example:
        >>> archive = archive_of(torch.float32, (2, 3))
        >>> archive.num_bytes == len(archive.head) + 2 * 3 * 4 + len(archive.tail)
        True
    """
    stream = _Framing()
    with _without_sums(), skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], stream))
    head, tail = bytes(stream.parts[0]), b"".join(stream.parts[1:])
    return Archive(head=head, tail=tail, num_bytes=len(head) + stream.skipped + len(tail))


def bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, in place."""
    return memoryview(values.detach().reshape(-1).view(torch.uint8).numpy().data)


class _Framing(io.RawIOBase):
    """Output of `torch.save` that splits where values are skipped."""

    def __init__(self) -> None:
        self.parts = [bytearray()]
        self.skipped = 0

    def write(self, data: object, /) -> int:
        self.parts[-1] += cast(bytes, data)
        return len(cast(bytes, data))

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        assert whence == os.SEEK_CUR  # torch moves forward over the values
        self.skipped += offset
        self.parts.append(bytearray())
        return self.skipped


@contextmanager
def _without_sums() -> Iterator[None]:
    """Let torch skip the checksums of its archives, which the sum of the whole file covers.

    torch never verifies them. The setting holds for all threads: an archive that another thread
    writes meanwhile also lacks them.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
