"""A source as one stream of tokens with document borders, read as needed."""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megacore.errors import DataError
from megatrain.data.indexed import IndexedTokens, out_of_range
from megatrain.data.sample import Window
from megatrain.data.tokenizer import TokenArray, Tokenizer

# Tokens at both ends of a source that identify its content.
CHECKED_ENDS = 1 << 14
# Documents whose starts are read at once.
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TokenSource:
    """One stream of token ids.

    Attributes:
        name: Path, or name of a built-in source.
        description: Readable description, e.g. ``"79 topics of the Python language reference"``.
        tokens: Token ids, 1-D, any integer type; may be mapped from a file.
        document_starts: Position of the first token of each document, ascending from 0.
        loss_mask: Whether the loss of predicting each token counts, 1-D, uint8; ``None``: all.
        indexed: The files that the tokens are mapped from, if any.
        tokenizer: The tokenizer of the ids; ``None`` if it is not known.
        notes: Sentences about the tokens for the start of a run.
    """

    name: str
    description: str
    tokens: TokenArray
    document_starts: Sequence[int] = (0,)
    loss_mask: NDArray[np.uint8] | None = None
    indexed: IndexedTokens | None = None
    tokenizer: Tokenizer | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents that the stream is joined from."""
        return len(self.document_starts)

    def facts(self) -> list[int]:
        """Return the number of tokens and a checksum of the first and last ones.

        A run that continues compares them, because the order of samples depends on them.
        """
        ends = (self.tokens[:CHECKED_ENDS], self.tokens[-CHECKED_ENDS:])
        content = b"".join(np.asarray(part, dtype=np.int64).tobytes() for part in ends)
        return [self.num_tokens, zlib.crc32(content)]

    def range(self, begin: int = 0, end: int | None = None) -> TokenRange:
        """Return the tokens ``[begin, end)``, for one part of a split."""
        return TokenRange(source=self, begin=begin, end=self.num_tokens if end is None else end)


@dataclass(frozen=True, kw_only=True)
class TokenRange:
    """Tokens ``[begin, end)`` of a source; positions count from ``begin``.

    Example:
        >>> whole = TokenSource(name="x", description="", tokens=np.arange(9),
        ...                     document_starts=[0, 4, 6])
        >>> window = whole.range(2, 9).window(1, 4)
        >>> window.tokens.tolist(), window.starts
        ([3, 4, 5, 6], [1, 3])
    """

    source: TokenSource
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def tokens(self) -> TokenArray:
        """The tokens, a view."""
        return self.source.tokens[self.begin : self.end]

    def window(self, start: int, count: int) -> Window:
        """Return ``count`` tokens from position ``start``."""
        first = self.begin + start
        mask = self.source.loss_mask
        borders = self.source.document_starts
        starts: list[int] = []
        for number in range(bisect_left(borders, first), len(borders)):
            if (border := borders[number]) >= first + count:
                break
            # An empty document starts where the next one does.
            if not starts or border - first > starts[-1]:
                starts.append(border - first)
        if self.source.indexed is not None:
            self.source.indexed.note_read()
        return Window(
            tokens=self.source.tokens[first : first + count].astype(np.int64),
            starts=starts,
            counted=None if mask is None else mask[first : first + count] != 0,
        )

    def document_starts(self) -> NDArray[np.int64]:
        """Return the first token of every document of the range, ascending from 0."""
        borders = self.source.document_starts
        first = bisect_right(borders, self.begin)
        last = bisect_left(borders, self.end, lo=first)
        starts = np.zeros(1 + last - first, dtype=np.int64)
        # In blocks, because there may be more documents than fit into memory several times.
        for begin in range(first, last, _BLOCK):
            block = borders[begin : min(begin + _BLOCK, last)]
            starts[1 + begin - first :][: len(block)] = np.asarray(block) - self.begin
        return starts

    def check(self, start: int, count: int, *, vocab_size: int, name: str | None = None) -> None:
        """Check that ``count`` tokens from ``start`` are in ``[0, vocab_size)``.

        Raises:
            DataError: For a token outside, with its id, file and document.
        """
        first = self.begin + start
        where = out_of_range(self.source.tokens[first : first + count], vocab_size)
        if where is None:
            return
        position = first + where
        document = bisect_right(self.source.document_starts, position) - 1
        indexed = self.source.indexed
        file = self.source.name if indexed is None else f"{indexed.prefix}.bin"
        raise DataError(
            f"{self.source.name if name is None else name} holds token id "
            f"{int(self.source.tokens[position])} (at position {position:,}, in document "
            f"{document:,} of {file}), but "
            f"{vocab_text(vocab_size, self.source.tokenizer)}"
        )

    def part(self, begin: int, end: int) -> TokenRange:
        """Return the tokens ``[begin, end)`` of this range."""
        return replace(self, begin=self.begin + begin, end=self.begin + end)


def vocab_text(vocab_size: int, tokenizer: Tokenizer | None = None) -> str:
    """Format the end of an error about a token outside of the vocabulary.

    Args:
        vocab_size: Ids of the model.
        tokenizer: The tokenizer that made the token, if it is known.
    """
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        return (
            f"ids must be below model.vocab_size = {vocab_size:,}, and the tokenizer "
            f"{tokenizer.name} has {tokenizer.vocab_size:,}; set data.tokenizer to the tokenizer "
            "of the model, or, for a model that is not imported, leave model.vocab_size out"
        )
    return (
        f"the vocabulary has {vocab_size:,} ids; set data.tokenizer to the tokenizer.json these "
        f"tokens were made with, or model.vocab_size to its size"
    )
