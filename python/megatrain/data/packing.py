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
    sizes = np.diff(document_starts, append=num_tokens)
    counts = np.where(sizes > seq_length + 1, -(-(sizes - 1) // seq_length), sizes > 0)
    ends = np.cumsum(counts)
    num_pieces = int(ends[-1])
    # There may be many more pieces than documents, so few arrays of them are held at once.
    lengths = np.full(num_pieces, seq_length + 1, dtype=np.int32)
    lengths[ends[counts > 0] - 1] = (sizes - (counts - 1) * seq_length)[counts > 0]
    order, rows = ordered_by_best_fit(lengths, seq_length + 1, seed)
    starts = np.arange(num_pieces) * seq_length
    starts += np.repeat(document_starts - (ends - counts) * seq_length, counts)
    continued = np.ones(num_pieces, dtype=np.bool_)
    continued[(ends - counts)[counts > 0]] = False
    return Packing(
        starts=starts[order], lengths=lengths[order], continued=continued[order], rows=rows
    )


def ordered_by_best_fit(
    lengths: NDArray[np.int32], capacity: int, seed: int
) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Pack pieces into samples of a capacity, see `build_packing`.

    Returns:
        The pieces by sample, and the first of each sample and their number at the end.
    """
    dtype = np.int32 if len(lengths) < 1 << 31 else np.int64
    random = np.arange(len(lengths), dtype=dtype)
    np.random.RandomState(seed % (1 << 32)).shuffle(random)
    is_full = lengths[random] == capacity
    full, rest = random[is_full], random[~is_full]
    del random, is_full
    by_length = np.argsort(-lengths[rest], kind="stable")
    order = rest[by_length]
    rows = _best_fit(lengths[order], capacity)
    order = order[np.lexsort((by_length, rows))]
    # Full pieces are the longest, each a sample of its own.
    sizes = np.concatenate((np.ones(len(full) + 1, dtype=np.int64), np.bincount(rows)))
    sizes[0] = 0
    return np.concatenate((full, order)), np.cumsum(sizes, out=sizes)


def _best_fit(lengths: NDArray[np.int32], capacity: int) -> NDArray[np.int64]:
    """Return the sample of each piece; lengths are descending.

    Samples with the same room and pieces of the same length are treated together: a sample takes as
    many as fit, because the room that is left is the least that is enough for the next one.
    """
    rows = np.empty(len(lengths), dtype=np.int64)
    rooms: dict[int, list[NDArray[np.int64]]] = {}
    # Bit r: there are samples with room r. The lowest bit above a length is found at once.
    occupied = 0
    num_rows = 0

    def put(room: int, numbers: NDArray[np.int64]) -> int:
        if len(numbers) == 0 or room == 0:
            return occupied
        rooms.setdefault(room, []).append(numbers)
        return occupied | 1 << room

    ends = np.flatnonzero(np.diff(lengths, append=0)) + 1
    begin = 0
    for end in ends.tolist():
        length = int(lengths[begin])
        while begin < end:
            fitting = occupied >> length
            room = capacity if fitting == 0 else length + (fitting & -fitting).bit_length() - 1
            wanted = -(-(end - begin) // (room // length))
            if fitting == 0:
                taken = np.arange(num_rows, num_rows + wanted)
                num_rows += wanted
            else:
                taken = rooms[room].pop()
                if not rooms[room]:
                    occupied ^= 1 << room
                occupied = put(room, taken[wanted:])
                taken = taken[:wanted]
            each = room // length
            placed = min(end - begin, each * len(taken))
            rows[begin : begin + placed] = np.repeat(taken, each)[:placed]
            full, rest = divmod(placed, each)
            occupied = put(room - each * length, taken[:full])
            occupied = put(room - rest * length, taken[full:])
            begin += placed
    return rows


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

        def make() -> Packing:
            return build_packing(
                self.tokens.document_starts(),
                num_tokens=len(self.tokens),
                seq_length=self.seq_length,
                seed=self._seed,
            )

        if indexed is None or cache is None:
            return make()

        def build(folder: Path) -> None:
            packing = make()
            for name in Packing.__dataclass_fields__:
                np.save(folder / f"{name}.npy", getattr(packing, name))

        facts = {
            "index": file_facts(indexed.prefix.with_name(indexed.prefix.name + ".idx")),
            "tokens": [self.tokens.begin, self.tokens.end],
            "seq_length": self.seq_length,
            "seed": self._seed,
        }
        folder = built_once(cache, "packing", facts, build)
        fields = Packing.__dataclass_fields__
        return Packing(**{name: ArrayFile(folder / f"{name}.npy") for name in fields})
