"""Tokenizers: bytes without any library, or a ``tokenizer.json``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from megacore.errors import DataError
from megatrain.data.paths import missing_path
from megatrain.data.special_tokens import BYTES, SpecialTokens, read_special_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _LibraryTokenizer

    from megatrain.data.chat import MarkedText

TokenArray = NDArray[np.integer]
_SAVE_ADVICE = (
    "write one with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) of transformers"
)


class Tokenizer(Protocol):
    """Interface of tokenizers for data and generation."""

    @property
    def name(self) -> str:
        """Value of ``data.tokenizer``."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is in ``[0, vocab_size)``."""

    def encode(self, text: str) -> TokenArray:
        """Encode ``text``, 1-D, in the smallest integer type for ``vocab_size``."""

    def encode_many(self, texts: Sequence[str]) -> list[TokenArray]:
        """Encode several texts."""

    def encode_with_offsets(self, text: str) -> tuple[TokenArray, NDArray[np.int64]]:
        """Encode ``text``; also return the first and last + 1 character of each token, (N, 2)."""

    def encode_marked(self, text: MarkedText) -> tuple[TokenArray, NDArray[np.bool_]]:
        """Encode a text; also return which tokens hold a character of its answers."""

    @property
    def special(self) -> SpecialTokens:
        """Special tokens, and those that the tokenizer itself puts around a text."""

    @property
    def eod_id(self) -> int | None:
        """Token that ends a document, if the tokenizer has one."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name, or ``None``."""

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Decode token ids, also of an array. Broken UTF-8 gives replacement characters."""


class ByteTokenizer:
    """One token per byte of UTF-8: 256 ids, nothing to download, no unknown tokens.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né").tolist()
        [110, 195, 169]
        >>> tokenizer.decode([110, 195, 169])
        'né'
    """

    name = BYTES
    vocab_size = 256
    special = SpecialTokens()

    def encode(self, text: str) -> TokenArray:
        """Return the UTF-8 bytes of ``text``, uint8."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[TokenArray]:
        """Encode several texts."""
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[TokenArray, NDArray[np.int64]]:
        """Encode ``text``; also return the first and last + 1 character of each byte, (N, 2)."""
        sizes = [len(char.encode("utf-8")) for char in text]
        begin = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
        return self.encode(text), np.stack((begin, begin + 1), axis=1)

    def encode_marked(self, text: MarkedText) -> tuple[TokenArray, NDArray[np.bool_]]:
        """Encode a text; also return which tokens are part of its answers."""
        return _marked(self, text)

    @property
    def eod_id(self) -> int | None:
        """Nothing: every id is a byte."""
        return None

    def token_id(self, token: str) -> int | None:
        """Return the id of a one-byte token."""
        ids = self.encode(token)
        return int(ids[0]) if len(ids) == 1 else None

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Decode the bytes ``ids``. An id that is not a byte gives a replacement character.

        A model may have such ids, because its vocabulary may be larger than 256.

        Raises:
            ValueError: If an id is negative.
        """
        # Not bytes(ids), which would read the raw memory of an array: eight bytes per int64.
        tokens = [operator.index(token) for token in ids]
        if min(tokens, default=0) < 0:
            raise ValueError(f"token ids must be at least 0, got {min(tokens)}")
        return bytes(min(token, 0xFF) for token in tokens).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A ``tokenizer.json`` of the Hugging Face ``tokenizers`` library.

    Encodings have no special tokens; callers add those of `special`. The file's truncation and
    padding are off, because the text is one stream that is cut into samples later.

    Raises:
        DataError: If the package or the file is missing, or the file is not a tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        self._tokenizer = _open_tokenizer(Path(path))
        # Ids need not be dense, so the size follows from the largest one.
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self._dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    def encode(self, text: str) -> TokenArray:
        """Encode ``text``: uint16 if the vocabulary allows, else int32."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[TokenArray]:
        """Encode several texts, without the offsets that single encodings have."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=self._dtype) for one in encoded]

    def encode_with_offsets(self, text: str) -> tuple[TokenArray, NDArray[np.int64]]:
        """Encode ``text``; also return the first and last + 1 character of each token, (N, 2)."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.asarray(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoded.ids, dtype=self._dtype), offsets

    def encode_marked(self, text: MarkedText) -> tuple[TokenArray, NDArray[np.bool_]]:
        """Encode a text; also return which tokens hold a character of its answers."""
        return _marked(self, text)

    @functools.cached_property
    def special(self) -> SpecialTokens:
        """Special tokens of the file, and of the configuration beside it."""
        return read_special_tokens(self._tokenizer, Path(self.name))

    @property
    def eod_id(self) -> int | None:
        """``eos_token`` of the ``tokenizer_config.json`` beside the file, or a usual name."""
        return self.special.eos_id

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name, or ``None``."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Decode ``ids``."""
        tokens = [operator.index(token) for token in ids]
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _marked(tokenizer: Tokenizer, text: MarkedText) -> tuple[TokenArray, NDArray[np.bool_]]:
    ids, offsets = tokenizer.encode_with_offsets(text.text)
    counted = np.zeros(len(ids), dtype=np.bool_)
    for begin, end in text.answers:
        counted |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
    return ids, counted


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer for ``data.tokenizer``: ``"bytes"`` or the path of a ``tokenizer.json``.

    Raises:
        DataError: See :class:`JsonTokenizer`.
    """
    return ByteTokenizer() if name == ByteTokenizer.name else JsonTokenizer(name)


def special_tokens_of(path: str | Path) -> SpecialTokens:
    """Return the special tokens of a tokenizer's file or folder; none for ``"bytes"``.

    Raises:
        DataError: See :class:`JsonTokenizer`.
    """
    return load_tokenizer(str(path)).special


def _missing_text(path: Path) -> str:
    """Describe a path without a tokenizer.json, with the tokenizer files of its folder."""
    hint = ' (data.tokenizer is "bytes" or the path of a tokenizer.json)'
    folder = path if path.is_dir() else path.parent
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    found = [name for name in names if _is_tokenizer_file(name)]
    missing = f"{path} is a folder without a tokenizer.json"
    if not path.is_dir():
        missing = f"tokenizer file {path} does not exist"
    if not found:
        return (missing if path.is_dir() else missing_path("tokenizer file", path)) + hint
    if "tokenizer.json" in found:
        return f"{missing}; did you mean {folder / 'tokenizer.json'}?"
    return (
        f"{missing}; the tokenizer files in {folder.absolute()} are {', '.join(found)}, but "
        f"megacore reads a tokenizer.json; {_SAVE_ADVICE}"
    )


def _is_tokenizer_file(name: str) -> bool:
    """Return whether a file name is one that tokenizers of usual libraries have.

    Example:
        >>> [_is_tokenizer_file(name) for name in ("spiece.model", "vocab.json", "config.json")]
        [True, True, False]
    """
    known = ("vocab.json", "vocab.txt", "merges.txt")
    return "tokenizer" in name or name.endswith((".model", ".tiktoken")) or name in known


def _open_tokenizer(path: Path) -> _LibraryTokenizer:
    if path.is_dir() and (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(_missing_text(path))
    try:
        from tokenizers import Tokenizer as LibraryTokenizer
    except ImportError as error:
        raise DataError(
            f"data.tokenizer = {str(path)!r} needs the tokenizers package: "
            f"pip install '.[tokenizers]' (or set data.tokenizer = \"bytes\")"
        ) from error
    try:
        tokenizer = LibraryTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        whole = path.parent / "tokenizer.json"
        advice = "name the file tokenizer.json of the model's folder"
        if path != whole and _is_tokenizer_file(path.name):
            advice = f"name {whole}" if whole.is_file() else _SAVE_ADVICE
        raise DataError(
            f"{path} is not a tokenizer.json of the tokenizers library ({error}); {advice}"
        ) from error
    # The file stores both, and they would truncate or pad every document.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
