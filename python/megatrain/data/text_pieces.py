"""Tokens of text that is read in pieces: those of the whole text.

Tokenizers do not look at pieces alone: many put a space before a text, and join line ends with
the space that follows. So a piece is encoded with text of its neighbors, and cut between two
tokens near its border on which encodings with different contexts agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from megatrain.data.tokenizer import TokenArray, Tokenizer

# Characters on either side of a border that are encoded to find the cut.
_CONTEXT = 2048
# Most of it, for text that repeats itself; beyond this, a cut is only where a token ends.
_MOST_CONTEXT = 1 << 20
# Tokens on either side of a cut that must be equal in both encodings.
_EQUAL_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Place between two tokens near the border of two texts.

    Attributes:
        before: End of the left text, which is encoded with the right text.
        head: Tokens of ``before`` and perhaps more, left of the cut.
        after: Beginning of the right text, which is encoded with the left text.
        tail: Tokens right of the cut, up to the end of ``after``.
    """

    before: str
    head: TokenArray
    after: str
    tail: TokenArray


def find_cut(tokenizer: Tokenizer, left: str, right: str) -> Cut | None:
    """Find a cut where the tokens of two adjacent texts can be separated.

    Args:
        tokenizer: The tokenizer.
        left: Text before the border; any part of it that ends there.
        right: Text after the border.

    Returns:
        The cut nearest to the border; ``None`` if no token ends near it.
    """
    size, left = _CONTEXT, left[-_MOST_CONTEXT:]
    while True:
        is_whole = size >= max(len(left), len(right))
        # Odd, so that a repeated character gives other tokens in the other context.
        width = size if is_whole else size // 3 | 1
        before, after = left[-width:], right[:width]
        longer_left = _Encoding.of(tokenizer, left[-size:], after)
        longer_right = _Encoding.of(tokenizer, before, right[:size])
        common = longer_left.cuts.keys() & longer_right.cuts.keys()
        for cut in sorted(common, key=lambda cut: (abs(cut), cut)):
            first, second = longer_left.cuts[cut], longer_right.cuts[cut]
            if abs(cut) <= width // 2 and longer_left.agrees(first, longer_right, second):
                head, tail = longer_right.ids[:second], longer_left.ids[first:]
                return Cut(before=before, head=head, after=after, tail=tail)
        if is_whole:
            return None
        size *= 8


@dataclass(frozen=True, kw_only=True)
class _Encoding:
    """Tokens of a text, and the cuts between them: characters from the border, and indices."""

    ids: TokenArray
    cuts: Mapping[int, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, left: str, right: str) -> _Encoding:
        ids, offsets = tokenizer.encode_with_offsets(left + right)
        ends = np.maximum.accumulate(offsets[:, 1])
        # Several tokens may hold parts of the same character.
        between = 1 + np.flatnonzero(ends[:-1] <= offsets[1:, 0])
        cuts = (offsets[between, 0] - len(left)).tolist()
        return cls(ids=ids, cuts=dict(zip(cuts, between.tolist(), strict=True)))

    def agrees(self, at: int, other: _Encoding, other_at: int) -> bool:
        def around(ids: TokenArray, index: int) -> tuple[list[int], list[int]]:
            before = ids[max(0, index - _EQUAL_TOKENS) : index]
            return before.tolist(), ids[index : index + _EQUAL_TOKENS].tolist()

        return around(self.ids, at) == around(other.ids, other_at)


def tokens_of_pieces(
    tokenizer: Tokenizer, pieces: Iterable[str], *, first: Cut | None, last: Cut | None
) -> Iterator[TokenArray]:
    """Encode the pieces of a text one after another.

    Args:
        tokenizer: The tokenizer.
        pieces: Adjacent texts.
        first: The cut to text before the first piece, if there is any.
        last: The cut to text after the last piece.
    """
    left, held = first, ""
    for piece in _of_enough_length(pieces):
        before = left.before if left else ""
        cut = find_cut(tokenizer, before + held, piece) if held else None
        if cut is None:
            held += piece
            continue
        yield _encode_between(tokenizer, held, left, cut)
        left, held = cut, piece
    yield _encode_between(tokenizer, held, left, last)


def _of_enough_length(pieces: Iterable[str]) -> Iterator[str]:
    """Join pieces that are too short to have a cut at both ends."""
    held = ""
    for piece in pieces:
        if min(len(held), len(piece)) > _CONTEXT:
            yield held
            held = piece
        else:
            held += piece
    yield held


def _encode_between(
    tokenizer: Tokenizer, text: str, left: Cut | None, right: Cut | None
) -> TokenArray:
    before, after = left.before if left else "", right.after if right else ""
    ids = tokenizer.encode(before + text + after)
    begin = len(left.head) if left else 0
    end = len(ids) - (len(right.tail) if right else 0)
    same_head = left is None or np.array_equal(ids[:begin], left.head)
    same_tail = right is None or np.array_equal(ids[end:], right.tail)
    if begin <= end and same_head and same_tail:
        return ids[begin:end]
    return tokenizer.encode(text)
