"""Whole documents packed into samples by best fit.

Documents are packed in order of their length, the longest first, each into the sample with the
least room that is enough. Documents longer than a sample are cut into pieces that overlap by one
token, so that every token but the first of a document is predicted once.

The packing is a function of the lengths and the seed; every epoch reads its samples in another
order, which is a function of the sample counter, as in :mod:`megatrain.data.dataset`.

Source:
    Best-fit packing of documents: Ding et al., arXiv:2404.10830.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megacore.errors import DataError
from megatrain.data.cache import built_once, file_facts
from megatrain.data.dataset import mixed_seed, permute
from megatrain.data.sample import Sample, Window, sample_of_window
from megatrain.data.stream import TokenRange

# Pieces of documents in one step of numpy.
_BLOCK = 1 << 20


class ArrayFile:
    """One-dimensional array in an ``.npy`` file, of which slices are read.

    A mapped file would count as memory of the process: a read of it maps up to 2 MB.
    """

    def __init__(self, path: Path) -> None:
        array = np.load(path, mmap_mode="r")
        self._dtype, self._offset, self._size = array.dtype, array.offset, len(array)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> NDArray[Any]:
        begin, end, _ = part.indices(self._size)
        width = self._dtype.itemsize
        raw = os.pread(self._file, (end - begin) * width, self._offset + begin * width)
        return np.frombuffer(raw, dtype=self._dtype)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Pieces of documents by sample, in memory or in files.

    Attributes:
        starts: Position of the first token of each piece, samples one after the other, int64.
        lengths: Tokens of each piece, int32.
        continued: Whether the piece continues a document, bool.
        rows: First piece of each sample, and the number of pieces at the end, int64.
    """

    starts: NDArray[np.int64] | ArrayFile
    lengths: NDArray[np.int32] | ArrayFile
    continued: NDArray[np.bool_] | ArrayFile
    rows: NDArray[np.int64] | ArrayFile

    @property
    def num_rows(self) -> int:
        """Number of samples."""
        return len(self.rows) - 1

    def pieces(self, row: int) -> list[tuple[int, int, bool]]:
        """Return start, length, and whether it continues a document, of the pieces of a sample."""
        part = slice(*self.rows[row : row + 2].tolist())
        columns = (self.starts, self.lengths, self.continued)
        return list(zip(*(column[part].tolist() for column in columns), strict=True))


def build_packing(
    document_starts: NDArray[np.int64], *, num_tokens: int, seq_length: int, seed: int
) -> Packing:
    """Pack documents into samples of ``seq_length + 1`` tokens.

    Args:
        document_starts: Position of the first token of each document, ascending from 0.
        num_tokens: Tokens of all documents.
        seq_length: Number of predicted tokens per sample.
        seed: Decides between documents of the same length, and the order inside a sample.

    Example:
        >>> ends = np.cumsum([5, 7, 3, 2, 4, 6, 1])
        >>> packing = build_packing(
        ...     np.array([0, *ends[:-1]]), num_tokens=28, seq_length=9, seed=1)
        >>> [sorted(row.tolist()) for row in np.split(packing.lengths, packing.rows[1:-1])]
        [[3, 7], [4, 6], [1, 2, 5]]
    """
    lengths, continued = _cut(document_starts, num_tokens, seq_length)
    order, rows = ordered_by_best_fit(lengths, seq_length + 1, seed)
    return Packing(
        starts=_starts(lengths, continued)[order],
        lengths=lengths[order],
        continued=continued[order],
        rows=rows,
    )


def write_packing(
    folder: Path,
    document_starts: NDArray[np.int64],
    *,
    num_tokens: int,
    seq_length: int,
    seed: int,
) -> None:
    """Write the packing of `build_packing` as arrays of the names of its fields.

    At its peak it needs 17 bytes per piece and 16 per sample; ``document_starts`` is not kept.
    """
    lengths, continued = _cut(document_starts, num_tokens, seq_length)
    del document_starts
    order, rows = ordered_by_best_fit(lengths, seq_length + 1, seed)
    np.save(folder / "rows.npy", rows)
    del rows
    _write_in_order(folder / "starts.npy", _starts(lengths, continued), order)
    _write_in_order(folder / "lengths.npy", lengths, order)
    _write_in_order(folder / "continued.npy", continued, order)


def _blocks(size: int) -> Iterator[slice]:
    for begin in range(0, size, _BLOCK):
        yield slice(begin, begin + _BLOCK)


def _write_in_order(path: Path, column: NDArray[Any], order: NDArray[np.integer]) -> None:
    with path.open("wb") as file:
        header = {"descr": column.dtype.str, "fortran_order": False, "shape": column.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for part in _blocks(len(order)):
            file.write(column[order[part]].data)


def _cut(
    document_starts: NDArray[np.int64], num_tokens: int, seq_length: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the length of each piece of the documents, and whether it continues one."""

    def sizes_and_counts(part: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        starts = document_starts[part.start : part.stop + 1]
        is_last = part.stop >= len(document_starts)
        sizes = np.diff(starts, append=num_tokens) if is_last else np.diff(starts)
        return sizes, np.where(sizes > seq_length + 1, -(-(sizes - 1) // seq_length), sizes > 0)

    parts = list(_blocks(len(document_starts)))
    num_pieces = sum(int(sizes_and_counts(part)[1].sum()) for part in parts)
    lengths = np.full(num_pieces, seq_length + 1, dtype=np.int32)
    continued = np.ones(num_pieces, dtype=np.bool_)
    at = 0
    for part in parts:
        sizes, counts = sizes_and_counts(part)
        sizes, counts = sizes[counts > 0], counts[counts > 0]
        ends = at + np.cumsum(counts)
        lengths[ends - 1] = sizes - (counts - 1) * seq_length
        continued[ends - counts] = False
        at = int(ends[-1]) if len(ends) else at
    return lengths, continued


def _starts(lengths: NDArray[np.int32], continued: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the position of the first token of each piece; pieces of a document share one."""
    starts = np.zeros(len(lengths), dtype=np.int64)
    np.subtract(lengths[:-1], continued[1:], out=starts[1:])
    return np.cumsum(starts, out=starts)


def ordered_by_best_fit(
    lengths: NDArray[np.int32], capacity: int, seed: int
) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Pack pieces into samples of a capacity, see `build_packing`.

    Args:
        lengths: Tokens of each piece, from 1 to the capacity.
        capacity: Tokens of a sample.
        seed: Decides between pieces of the same length, and the order inside a sample.

    Returns:
        The pieces by sample, and the first of each sample and their number at the end.
    """
    dtype: type[np.integer] = np.int32 if len(lengths) < 1 << 31 else np.int64
    random = np.arange(len(lengths), dtype=dtype)
    np.random.RandomState(seed % (1 << 32)).shuffle(random)
    counts = np.zeros(capacity + 1, dtype=np.int64)
    for part in _blocks(len(lengths)):
        counts += np.bincount(lengths[part], minlength=capacity + 1)
    row_of, rows = _best_fit(counts, capacity, dtype)
    # Of each length and each row, the place of the next piece: in `row_of`, and in `order`.
    next_of_length = len(lengths) - np.cumsum(counts)
    next_of_row: NDArray[np.integer] = rows[:-1].astype(dtype)
    order: NDArray[np.integer] = np.empty(len(lengths), dtype=dtype)
    for part in _blocks(len(lengths)):
        pieces = random[part]
        row = row_of[_take_places(next_of_length, lengths[pieces])]
        order[_take_places(next_of_row, row)] = pieces
    return order, rows


def _take_places(next_place: NDArray[np.integer], kinds: NDArray[np.integer]) -> NDArray[np.int64]:
    """Give each element, in order, the next place of its kind; ``next_place`` moves on."""
    by_kind = np.argsort(kinds, kind="stable")
    ordered = kinds[by_kind]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    sizes = np.diff(firsts, append=len(kinds))
    places = np.empty(len(kinds), dtype=np.int64)
    places[by_kind] = np.repeat(next_place[ordered[firsts]] - firsts, sizes) + np.arange(len(kinds))
    next_place[ordered[firsts]] += sizes
    return places


def _best_fit(
    counts: NDArray[np.int64], capacity: int, dtype: type[np.integer]
) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Return the sample of each piece, longest first, and the first piece of each sample.

    Samples with the same room and pieces of the same length are treated together: a sample takes as
    many as fit, because the room that is left is the least that is enough for the next one.

    Args:
        counts: Number of pieces of each length.
        capacity: Tokens of a sample.
        dtype: For numbers of samples.
    """
    num_pieces = int(counts.sum())
    row_of: NDArray[np.integer] = np.empty(num_pieces, dtype=dtype)
    # Pieces of each sample; takes memory for those that exist.
    sizes = np.zeros(num_pieces + 1, dtype=dtype)
    rooms: dict[int, list[NDArray[np.integer]]] = {}
    # Bit r: there are samples with room r. The lowest bit above a length is found at once.
    occupied = 0
    num_rows = begin = 0

    def put(room: int, numbers: NDArray[np.integer]) -> int:
        if len(numbers) == 0 or room == 0:
            return occupied
        rooms.setdefault(room, []).append(numbers)
        return occupied | 1 << room

    for length in np.flatnonzero(counts)[::-1].tolist():
        end = begin + int(counts[length])
        while begin < end:
            fitting = occupied >> length
            room = capacity if fitting == 0 else length + (fitting & -fitting).bit_length() - 1
            wanted = -(-(end - begin) // (room // length))
            if fitting == 0:
                taken = np.arange(num_rows, num_rows + wanted, dtype=dtype)
                num_rows += wanted
            else:
                taken = rooms[room].pop()
                if not rooms[room]:
                    occupied ^= 1 << room
                occupied = put(room, taken[wanted:])
                taken = taken[:wanted]
            each = room // length
            placed = min(end - begin, each * len(taken))
            row_of[begin : begin + placed] = np.repeat(taken, each)[:placed]
            full, rest = divmod(placed, each)
            sizes[taken[:full] + 1] += each
            sizes[taken[full:] + 1] += rest
            occupied = put(room - each * length, taken[:full])
            occupied = put(room - rest * length, taken[full:])
            begin += placed
    return row_of, np.cumsum(sizes[: num_rows + 1], dtype=np.int64)


class PackedDataset:
    """Samples of whole documents, padded at the end.

    Args:
        tokens: The stream of documents.
        name: Name of the data in messages.
        label: Name of the source in metrics.
        seq_length: Number of predicted tokens per sample.
        seed: Seed of packing and order.
        vocab_size: Every token read must be in ``[0, vocab_size)``.
        cache: Folder of the packing of token files, which the first process builds and all read.
        reshuffle: A new order in every epoch.
        document_mask: No document predicts the first token of the next one.

    Raises:
        DataError: If there are no two tokens.
    """

    def __init__(
        self,
        tokens: TokenRange,
        *,
        name: str,
        label: str,
        seq_length: int,
        seed: int,
        vocab_size: int,
        cache: Path | None,
        reshuffle: bool = True,
        document_mask: bool = False,
    ) -> None:
        if len(tokens) < 2:
            raise DataError(f"{name} has {len(tokens)} tokens, but a sample takes at least 2")
        self.name = name
        self.label = label
        self.tokens = tokens
        self.num_tokens = len(tokens)
        self.seq_length = seq_length
        self._vocab_size = vocab_size
        self._seed, self._reshuffle = seed, reshuffle
        self._document_mask = document_mask
        self.packing = self._packed(cache)
        self.num_rows = self.packing.num_rows

    def sample(self, number: int) -> Sample:
        """Return sample ``number`` >= 0.

        Raises:
            DataError: If a token is not in the vocabulary.
        """
        epoch, index = divmod(number, self.num_rows)
        key = mixed_seed(mixed_seed(self._seed) ^ (epoch if self._reshuffle else 0))
        row = permute(index, self.num_rows, key)
        size = self.seq_length + 1
        tokens = np.zeros(size, dtype=np.int64)
        counted = np.zeros(size, dtype=np.bool_)
        starts, at = [], 0
        for start, length, is_continued in self.packing.pieces(row):
            self.tokens.check(start, length, vocab_size=self._vocab_size, name=self.name)
            window = self.tokens.window(start, length)
            tokens[at : at + length] = window.tokens
            counted[at : at + length] = True if window.counted is None else window.counted
            # Predicted at the end of the piece before it.
            counted[at] &= not is_continued
            starts.append(at)
            at += length
        if at < size:  # padding is a document of its own
            starts.append(at)
        window = Window(tokens=tokens, starts=starts, counted=counted, length=at)
        return sample_of_window(window, document_mask=self._document_mask)

    def epochs(self, num_samples: int) -> dict[str, float]:
        """Return the passes over the documents that the first samples make."""
        return {self.label: num_samples / self.num_rows}

    def _packed(self, cache: Path | None) -> Packing:
        indexed = self.tokens.source.indexed

        num_tokens, seq_length, seed = len(self.tokens), self.seq_length, self._seed
        if indexed is None or cache is None:
            starts = self.tokens.document_starts()
            return build_packing(starts, num_tokens=num_tokens, seq_length=seq_length, seed=seed)

        def build(folder: Path) -> None:
            write_packing(
                folder,
                self.tokens.document_starts(),
                num_tokens=num_tokens,
                seq_length=seq_length,
                seed=seed,
            )

        facts = {
            "index": file_facts(indexed.prefix.with_name(indexed.prefix.name + ".idx")),
            "tokens": [self.tokens.begin, self.tokens.end],
            "seq_length": seq_length,
            "seed": seed,
        }
        folder = built_once(cache, "packing", facts, build)
        fields = Packing.__dataclass_fields__
        return Packing(**{name: ArrayFile(folder / f"{name}.npy") for name in fields})
