r"""Megatron's indexed dataset: token ids in ``<prefix>.bin``, their offsets in ``<prefix>.idx``.

``.bin`` has the token ids of all sequences, little-endian, without header or padding. ``.idx`` is
packed and little-endian:

    offset  type       meaning
    0       9 bytes    magic "MMIDIDX\0\0"
    9       u64        version, 1
    17      u8         token type: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
    18      u64        S, number of sequences
    26      u64        D, number of documents + 1
    34      i32[S]     length of each sequence in tokens
    34+4S   i64[S]     start of each sequence in bytes
    34+12S  i64[D]     document borders, as sequence numbers, from 0 to S
    (then)  i8[S]      optional: mode per sequence, multimodal data only; ignored here

The arrays after offset 34 are unaligned, so they are read as bytes and reinterpreted.

``<prefix>.mask`` is an addition of megacore: one byte per token of ``.bin``, 0 where the prediction
of the token does not count in the loss. Without the file, all tokens count.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import shutil
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from megacore.errors import DataError
from megatrain.data.paths import missing_path
from megatrain.data.tokenizer import TokenArray

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPE_OF_CODE = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
# The format uses u16 below this vocabulary size, else i32.
U16_VOCAB_LIMIT = 65_500
# Copied to memory, so a small index must not claim a multiple of the file.
MAX_SHARING = 8
MAX_VOCAB = 1 << 31
# A read maps up to 1 MB: few enough for 40 MB, and so many that unmapping costs nothing.
READS_BEFORE_RELEASE = 32


def release_pages(*arrays: NDArray[Any] | None) -> None:
    """Unmap the read pages of the files of mapped arrays; the next read maps them again."""
    for view in arrays:
        mapped = view if view is None or isinstance(view, np.memmap) else view.base
        if isinstance(mapped, np.memmap):
            mapped._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class IndexedTokens:
    """Contents of an indexed dataset, mapped from its files and read as needed.

    Attributes:
        prefix: Path without ``.bin`` and ``.idx``.
        stored: Tokens in the order of the ``.bin`` file, 1-D.
        lengths: Tokens per sequence, ``(num_sequences,)``, int32.
        starts: Position in ``stored`` of the first token of each sequence, times the bytes per
            token, ``(num_sequences,)``, int64.
        document_borders: Sequence number of the start of each document, and the number of
            sequences at the end, ``(num_documents + 1,)``, int64.
        in_order: Whether ``stored`` begins with the sequences in their order, without gaps.
        stored_mask: Whether the prediction of each token of ``stored`` counts, uint8; ``None``: all
            do.
    """

    prefix: Path
    stored: TokenArray
    lengths: NDArray[np.int32]
    starts: NDArray[np.int64]
    document_borders: NDArray[np.int64]
    in_order: bool
    stored_mask: NDArray[np.uint8] | None = None

    def note_read(self, *others: NDArray[Any]) -> None:
        """Unmap read pages now and then; the system keeps them in its cache as long as it can.

        Otherwise they would count as memory of the process until the whole file does.

        Args:
            others: Mapped arrays that are read as often.
        """
        if next(self._num_reads) % READS_BEFORE_RELEASE == 0:
            # The other arrays of the index are views of the same file as the lengths.
            release_pages(self.stored, self.stored_mask, self.lengths, *others)

    @functools.cached_property
    def _num_reads(self) -> Iterator[int]:
        return itertools.count()

    @functools.cached_property
    def tokens(self) -> TokenArray:
        """All tokens in sequence order, 1-D: mapped, or a copy if the file has another order."""
        if self.in_order:
            return self.stored[: self.num_tokens]
        sequences = [self.sequence(number) for number in range(len(self.lengths))]
        return np.concatenate(sequences or [self.stored[:0]])

    @functools.cached_property
    def mask(self) -> NDArray[np.uint8] | None:
        """Marks of the tokens whose prediction counts, as :attr:`tokens`; ``None``: all do."""
        if self.stored_mask is None or self.in_order:
            return None if self.stored_mask is None else self.stored_mask[: self.num_tokens]
        return np.concatenate([self.mask_of(n) for n in range(len(self.lengths))])

    def mask_of(self, number: int, begin: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        """Return whether the tokens ``[begin, end)`` of a sequence count."""
        if self.stored_mask is None:
            return np.ones(len(self.sequence(number, begin, end)), dtype=np.uint8)
        start = int(self.starts[number]) // self.stored.dtype.itemsize
        length = int(self.lengths[number])
        return self.stored_mask[start + begin : start + min(length, length if end is None else end)]

    @functools.cached_property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(int(self.lengths[block].sum(dtype=np.int64)) for block in _slices(self.lengths))

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_borders) - 1

    def sequence(self, number: int, begin: int = 0, end: int | None = None) -> TokenArray:
        """Return the tokens ``[begin, end)`` of a sequence, a view of the mapped file."""
        start = int(self.starts[number]) // self.stored.dtype.itemsize
        length = int(self.lengths[number])
        return self.stored[start + begin : start + (length if end is None else min(end, length))]

    @property
    def document_starts(self) -> Sequence[int]:
        """Position in ``tokens`` of the first token of each document, ascending."""
        if self.in_order:
            return _DocumentStarts(self)
        ends = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        positions: list[int] = ends[self.document_borders[:-1]].tolist()
        return positions


class _DocumentStarts(Sequence[int]):
    """Token positions of the starts of documents, computed from the index when they are read."""

    def __init__(self, indexed: IndexedTokens) -> None:
        self._indexed = indexed

    def __len__(self) -> int:
        return self._indexed.num_documents

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        del copy
        positions = self._positions(slice(None))
        return positions if dtype is None else positions.astype(dtype)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return self._positions(number)
        indexed = self._indexed
        sequence = int(indexed.document_borders[number if number >= 0 else number - 1])
        if sequence == len(indexed.starts):  # an empty document at the end
            return indexed.num_tokens
        return int(indexed.starts[sequence]) // indexed.stored.dtype.itemsize

    def _positions(self, numbers: slice) -> NDArray[np.int64]:
        indexed = self._indexed
        sequences = indexed.document_borders[:-1][numbers]
        # An empty document at the end starts where the tokens end.
        inside = np.searchsorted(sequences, len(indexed.starts))
        positions = np.full(len(sequences), indexed.num_tokens, dtype=np.int64)
        positions[:inside] = indexed.starts[sequences[:inside]] // indexed.stored.dtype.itemsize
        release_pages(indexed.starts)
        return positions


def indexed_prefix(source: str | Path) -> Path | None:
    """Return the prefix of an indexed dataset, given the prefix or either file, or ``None``."""
    path = Path(source)
    prefix = path.with_suffix("") if path.suffix in {".bin", ".idx"} else path
    # A prefix may contain dots ("v1.2_text_document"), so suffixes are appended, not replaced.
    for candidate in (path, prefix):
        if _file(candidate, ".bin").is_file() and _file(candidate, ".idx").is_file():
            return candidate
    return None


def read_indexed(prefix: str | Path) -> IndexedTokens:
    """Open an indexed dataset without reading its tokens.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.

    Raises:
        DataError: If a file is missing, damaged, of another format, or has no integer tokens.
    """
    prefix = Path(prefix)
    index_path, data_path = _file(prefix, ".idx"), _file(prefix, ".bin")
    for path in (index_path, data_path):
        if not path.is_file():
            raise DataError(missing_path("indexed data file", path))
    size = index_path.stat().st_size
    with index_path.open("rb") as file:
        dtype, num_sequences, num_borders = _read_header(index_path, file.read(HEADER.size))
    lengths, starts, borders = _map_arrays(index_path, size, num_sequences, num_borders)
    _check_arrays(index_path, lengths, starts, borders, dtype)
    file_bytes = _check_data_size(data_path, lengths, starts, dtype)
    stored = np.memmap(data_path, dtype=dtype, mode="r") if file_bytes else np.empty(0, dtype=dtype)
    in_order = _in_order(lengths, starts, dtype.itemsize)
    num_bytes = int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    if not in_order and num_bytes > MAX_SHARING * file_bytes:
        raise DataError(
            f"{index_path} describes {num_bytes:,} bytes of tokens in a file of "
            f"{file_bytes:,}; sequences may share tokens up to {MAX_SHARING} times: the index "
            f"is damaged, write or copy it again"
        )
    release_pages(lengths)
    return IndexedTokens(
        prefix=prefix,
        stored=stored,
        lengths=lengths,
        starts=starts,
        document_borders=borders,
        in_order=in_order,
        stored_mask=_map_mask(_file(prefix, ".mask"), len(stored)),
    )


def write_indexed(
    prefix: str | Path, documents: Iterable[TokenArray | list[int]], *, vocab_size: int
) -> None:
    """Write documents as an indexed dataset, one sequence per document.

    Both files are written under temporary names and renamed, so readers never see partial files.

    Args:
        prefix: Path without ``.bin`` and ``.idx``; its folder is created.
        documents: Token ids of each document, 1-D, consumed lazily.
        vocab_size: Determines the width on disk: u16 below 65,500, else i32; at most 2^31.

    Raises:
        DataError: If a document is not 1-D or not of integers, a token id is not in
            ``[0, vocab_size)``, or ``vocab_size`` is too large.
    """
    if vocab_size > MAX_VOCAB:
        raise DataError(
            f"vocab_size = {vocab_size} needs token ids wider than the 32 bits on disk; the "
            f"largest is {MAX_VOCAB}"
        )
    dtype = token_dtype(vocab_size)
    with IndexWriter(Path(prefix), dtype) as writer:
        for number, document in enumerate(documents):
            ids = np.asarray(document)
            _check_ids(number, ids, vocab_size)
            writer.append(ids)
            writer.add(ids.size)


def token_dtype(vocab_size: int) -> np.dtype[np.integer]:
    """Return the type of token ids on disk."""
    return np.dtype("<u2" if vocab_size < U16_VOCAB_LIMIT else "<i4")


class IndexWriter:
    """Writer of an indexed dataset; a context manager.

    Both files get their names at the end of the context, the index last; after an error nothing is
    left under the final names.

    Args:
        prefix: Path without ``.bin`` and ``.idx``; its folder is created.
        dtype: Type of the token ids on disk.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[np.integer]) -> None:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._prefix = prefix
        self._dtype = dtype
        self._file = _file(prefix, ".bin.partial").open("wb")
        self._mask: BinaryIO | None = None
        self._lengths = array("i")
        self._borders = array("q", [0])

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return len(self._borders) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences so far."""
        return sum(self._lengths)

    def append(self, ids: NDArray[Any], mask: NDArray[np.uint8] | None = None) -> None:
        """Write token ids, and whether their prediction counts if not all do."""
        if mask is not None:
            self._open_mask().write(mask.tobytes())
        self._file.write(ids.astype(self._dtype).tobytes())
        self._fill_mask()

    def append_file(self, path: Path, mask: Path | None = None) -> None:
        """Write the token ids of a file, which has the type of this dataset, and their mask."""
        if mask is not None:
            with mask.open("rb") as source:
                shutil.copyfileobj(source, self._open_mask(), 1 << 20)
        with path.open("rb") as source:
            shutil.copyfileobj(source, self._file, 1 << 20)
        self._fill_mask()

    def _open_mask(self) -> BinaryIO:
        """Begin the mask with ones for all tokens before it."""
        if self._mask is None:
            self._mask = _file(self._prefix, ".mask.partial").open("wb")
            self._fill_mask()
        return self._mask

    def _fill_mask(self) -> None:
        if self._mask is not None:
            missing = self._file.tell() // self._dtype.itemsize - self._mask.tell()
            while missing > 0:
                missing -= self._mask.write(b"\1" * min(missing, 1 << 20))

    def add(self, length: int, *, ends_document: bool = True) -> None:
        """End a sequence of ``length`` tokens, and its document unless others follow."""
        self._lengths.append(length)
        if ends_document:
            self.end_document()

    def end_document(self) -> None:
        """End a document with the sequences since the last end."""
        self._borders.append(len(self._lengths))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        data, index = _file(self._prefix, ".bin.partial"), _file(self._prefix, ".idx.partial")
        mask = _file(self._prefix, ".mask.partial")
        if self._mask is not None:
            self._mask.flush()
            os.fsync(self._mask.fileno())
            self._mask.close()
        if error is not None:
            data.unlink()
            mask.unlink(missing_ok=True)
            return
        code = next(code for code, name in DTYPE_OF_CODE.items() if np.dtype(name) == self._dtype)
        sizes = np.frombuffer(self._lengths, dtype=np.int32).astype("<i4")
        ends = np.cumsum(sizes, dtype="<i8") * self._dtype.itemsize
        starts = ends - sizes.astype("<i8") * self._dtype.itemsize
        borders = np.frombuffer(self._borders, dtype=np.int64).astype("<i8")
        header = HEADER.pack(MAGIC, 1, code, len(sizes), len(borders))
        with index.open("wb") as file:
            for part in (header, sizes.tobytes(), starts.tobytes(), borders.tobytes()):
                file.write(part)
            os.fsync(file.fileno())
        # An index of before must not describe the new tokens.
        _file(self._prefix, ".idx").unlink(missing_ok=True)
        _file(self._prefix, ".mask").unlink(missing_ok=True)
        data.replace(_file(self._prefix, ".bin"))
        if self._mask is not None:
            mask.replace(_file(self._prefix, ".mask"))
        index.replace(_file(self._prefix, ".idx"))


def check_documents(
    indexed: IndexedTokens,
    *,
    vocab_size: int | None,
    progress: Callable[[int, int], None],
) -> None:
    """Read every document of a dataset.

    Args:
        indexed: The dataset.
        vocab_size: Every token must be below it; ``None``: any token that is not negative.
        progress: Called with read and all sequences.

    Raises:
        DataError: For the first empty document or token outside of the vocabulary.
    """
    borders = indexed.document_borders
    for block in _slices(borders):
        empty = np.flatnonzero(np.diff(borders[block.start : block.stop + 1]) == 0)
        if empty.size:
            raise DataError(f"{indexed.prefix}.idx: document {block.start + empty[0]:,} is empty")
    limit = MAX_VOCAB if vocab_size is None else vocab_size
    for block in _slices(indexed.lengths, 1 << 14):
        for number in range(block.start, block.stop):
            tokens = indexed.sequence(number)
            document = int(np.searchsorted(borders, number, side="right")) - 1
            if len(tokens) == 0:
                raise DataError(f"{indexed.prefix}.idx: document {document:,} is empty")
            at = out_of_range(tokens, limit)
            if at is not None:
                raise DataError(
                    f"{indexed.prefix}.bin: document {document:,} holds token id "
                    f"{int(tokens[at])} at its position {at:,}; ids must be in [0, {limit:,})"
                )
        progress(block.stop, len(indexed.lengths))


def out_of_range(tokens: TokenArray, vocab_size: int) -> int | None:
    """Return the index of the first token that is not in ``[0, vocab_size)``, or ``None``."""
    # Minimum and maximum first: they need no memory, and errors are rare.
    if len(tokens) == 0 or (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
        return None
    return int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])


def _check_ids(number: int, ids: NDArray[Any], vocab_size: int) -> None:
    if ids.ndim != 1:
        raise DataError(
            f"document {number} has shape {ids.shape}; a document is a 1-D array or a list of "
            "token ids"
        )
    if ids.size == 0:  # an empty document may have any dtype
        return
    if ids.dtype.kind not in "iu":
        raise DataError(
            f"document {number} holds {ids.dtype.name} values, the first is {ids[0]}; token ids "
            "must be integers"
        )
    if not (ids.min() >= 0 and ids.max() < vocab_size):
        raise DataError(
            f"document {number} holds token ids from {ids.min()} to {ids.max()}; "
            f"with vocab_size = {vocab_size} they must be in [0, {vocab_size})"
        )


def _map_mask(path: Path, num_tokens: int) -> NDArray[np.uint8] | None:
    if not path.is_file():
        return None
    if path.stat().st_size != num_tokens:
        raise DataError(
            f"{path} has {path.stat().st_size:,} bytes, but {path.with_suffix('.bin').name} has "
            f"{num_tokens:,} tokens: the mask is cut off or belongs to other tokens; prepare both "
            f"again"
        )
    return np.memmap(path, dtype=np.uint8, mode="r") if num_tokens else np.empty(0, np.uint8)


def _file(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _read_header(path: Path, raw: bytes) -> tuple[np.dtype[np.integer], int, int]:
    if raw and MAGIC.startswith(raw[: len(MAGIC)]) and len(raw) < HEADER.size:
        raise DataError(
            f"{path} has {len(raw)} bytes, but the header of an index takes {HEADER.size}: the "
            f"file is cut off, write or copy it again"
        )
    if not raw.startswith(MAGIC):
        raise DataError(
            f"{path} is no index of an indexed dataset: it does not start with {MAGIC!r}; "
            f"make one with megatrain.data.write_indexed or Megatron's preprocess_data.py"
        )
    _, version, code, num_sequences, num_borders = HEADER.unpack_from(raw)
    if version != 1:
        raise DataError(f"{path} has format version {version}; this reader knows version 1")
    if code not in DTYPE_OF_CODE:
        raise DataError(f"{path} names token type {code}; known types are 1 to 8")
    dtype = np.dtype(DTYPE_OF_CODE[code])
    if not np.issubdtype(dtype, np.integer):
        raise DataError(f"{path} holds {dtype.name} values; token ids must be integers")
    return dtype, num_sequences, num_borders


def _map_arrays(
    path: Path, size: int, num_sequences: int, num_borders: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    needed = HEADER.size + 12 * num_sequences + 8 * num_borders
    if size not in {needed, needed + num_sequences}:
        raise DataError(
            f"{path} has {size:,} bytes; {num_sequences:,} sequences and {num_borders:,} "
            f"document borders take {needed:,}: the file is damaged, write or copy it again"
        )
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    arrays = []
    at = HEADER.size
    for name, count in (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_borders)):
        arrays.append(np.frombuffer(raw, dtype=name, count=count, offset=at))
        at += count * np.dtype(name).itemsize
    lengths, starts, borders = arrays
    return lengths, starts, borders


def _check_arrays(
    path: Path,
    lengths: NDArray[np.int32],
    starts: NDArray[np.int64],
    borders: NDArray[np.int64],
    dtype: np.dtype[np.integer],
) -> None:
    """Check signs, the order of document borders, and that sequences start at whole tokens."""
    broken = any((lengths[p] < 0).any() or (starts[p] < 0).any() for p in _slices(lengths))
    falling = any((np.diff(borders[p.start : p.stop + 1]) < 0).any() for p in _slices(borders))
    if broken or falling or len(borders) == 0 or borders[0] != 0 or borders[-1] != len(lengths):
        raise DataError(
            f"{path} is damaged: lengths and starts must not be negative, and document borders "
            f"must rise from 0 to {len(lengths)}; write or copy it again"
        )
    for block in _slices(starts):
        uneven = np.flatnonzero(starts[block] % dtype.itemsize)
        if uneven.size:
            first = block.start + int(uneven[0])
            raise DataError(
                f"{path} is damaged: sequence {first} of {len(lengths):,} starts at byte "
                f"{starts[first]:,}, which is no multiple of {dtype.itemsize}, the bytes of a "
                f"{dtype.name} token; write or copy it again"
            )


def _in_order(lengths: NDArray[np.int32], starts: NDArray[np.int64], itemsize: int) -> bool:
    if len(starts) == 0:
        return True
    return bool(starts[0] == 0) and all(
        np.array_equal(
            starts[block.start + 1 : block.stop + 1],
            (starts[block] + lengths[block].astype(np.int64) * itemsize)[
                : len(starts) - 1 - block.start
            ],
        )
        for block in _slices(starts)
    )


def _slices(array: NDArray[Any], size: int = 1 << 20) -> Iterator[slice]:
    """Cut an array into slices, so that checks of a mapped file take little memory."""
    for begin in range(0, len(array), size):
        yield slice(begin, min(begin + size, len(array)))


def _check_data_size(
    path: Path,
    lengths: NDArray[np.int32],
    starts: NDArray[np.int64],
    dtype: np.dtype[np.integer],
) -> int:
    """Check that ``.bin`` has whole tokens and every sequence; return its bytes."""
    file_bytes = path.stat().st_size
    index_name = path.with_suffix(".idx").name
    end = 0
    for block in _slices(starts):
        # Unsigned, because a damaged start near 2^63 plus a length would overflow.
        sizes = lengths[block].astype(np.uint64) * np.uint64(dtype.itemsize)
        end = max(end, int((starts[block].astype(np.uint64) + sizes).max()))
    if end > file_bytes:
        raise DataError(
            f"{path} has {file_bytes:,} bytes, but {index_name} describes {end:,}: "
            f"the file is cut off or belongs to another index; write or copy both files again"
        )
    if file_bytes % dtype.itemsize:
        raise DataError(
            f"{path} has {file_bytes:,} bytes, which is no multiple of {dtype.itemsize}, the bytes "
            f"of a {dtype.name} token in {index_name}, which describes {end:,}: the file is "
            f"damaged or belongs to another index; write or copy both files again"
        )
    return file_bytes
