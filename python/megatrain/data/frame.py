"""Tokens around every document: the only place that decides on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megacore.errors import DataError
from megatrain.data.special_tokens import SpecialTokens
from megatrain.data.tokenizer import Tokenizer

# End of a document for a tokenizer without a token for it.
SEPARATOR = "\n\n"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Tokens around every document; see :func:`frame_of`.

    Attributes:
        before: Tokens before a document.
        after: Tokens after one.
        ends_last: Whether ``after`` also follows the last document of text in memory: not if it
            only separates documents.
        opening: ``before`` as text.
        notes: A line for the user; none if the tokenizer has no special tokens.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    ends_last: bool
    opening: str
    notes: tuple[str, ...] = ()

    def opened(self, ids: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return the tokens of a document with those before it, which are not repeated."""
        if ids[: len(self.before)].tolist() == list(self.before):
            return ids
        return np.concatenate((np.array(self.before, dtype=ids.dtype), ids))

    def notes_on_files(self, tokens: NDArray[np.integer], name: str) -> tuple[str, ...]:
        """Return a line for the user if tokens from files do not begin with ``before``."""
        if len(self.opened(tokens[: len(self.before)])) == len(self.before):
            return ()
        return (
            f"the tokens of {name} do not begin with {self.opening}, which the tokenizer puts "
            'before a text; if that is meant, set data.bos = "", or megacore generate does so too',
        )


def frame_of(tokenizer: Tokenizer, *, bos: str | None = None, eod: str | None = None) -> Frame:
    """Return the tokens around every document.

    Args:
        tokenizer: The tokenizer.
        bos: Token before a document; ``None``: those of the tokenizer's own post-processor;
            ``""``: none.
        eod: Token after one; ``None``: those of the post-processor, else its end-of-text token,
            else an empty line; ``""``: none.

    Raises:
        DataError: If the tokenizer has no such token.
    """
    special = tokenizer.special
    before = special.before if bos is None else _named(tokenizer, bos)
    if eod is not None:
        after = _named(tokenizer, eod)
    elif special.after:
        after = special.after
    elif special.eos_id is not None:
        after = (special.eos_id,)
    else:
        after = tuple(tokenizer.encode(SEPARATOR).tolist())
    opening = tokenizer.decode(before)
    is_plain = special == SpecialTokens() and bos is None and eod is None
    return Frame(
        before=before,
        after=after,
        ends_last=eod is not None or bool(special.after),
        opening=opening,
        notes=() if is_plain else (_description(opening, tokenizer.decode(after)),),
    )


def _named(tokenizer: Tokenizer, name: str) -> tuple[int, ...]:
    if name == "":
        return ()
    token = tokenizer.token_id(name)
    if token is None:
        raise DataError(f'the tokenizer {tokenizer.name} has no token "{name}"')
    return (token,)


def _description(before: str, after: str) -> str:
    first, last = before or "no special token", after or "no special token"
    last = last.replace(SEPARATOR, "an empty line")
    return f"documents begin with {first} and end with {last} (data.bos, data.eod)"
