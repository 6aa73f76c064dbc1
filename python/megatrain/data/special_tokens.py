"""Special tokens that the files of a tokenizer and of its model state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _LibraryTokenizer

# The tokenizer without files.
BYTES = "bytes"
# End-of-document tokens of models whose tokenizer comes without a configuration.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# As transformers saves them; older versions wrote the second file only.
NAME_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# As transformers reads the ids: the first file that has them counts.
_END_FILES = ("generation_config.json", "config.json")


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Special tokens that the files of a tokenizer state.

    Attributes:
        bos_id: Beginning of a text: ``bos_token`` of the configuration, if the tokenizer has it.
        eos_id: End of a text: ``eos_token`` of the configuration, else a usual name such as
            ``<|endoftext|>``.
        pad_id: ``pad_token`` of the configuration.
        before: Tokens that the post-processor of the tokenizer puts before a text.
        after: Tokens that it puts after one.

    Example:
        >>> SpecialTokens(bos_id=1, eos_id=2, before=(1,)).adds_bos
        True
    """

    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def adds_bos(self) -> bool:
        """True if the tokenizer puts ``bos_id`` before a text by itself."""
        return self.bos_id is not None and self.before[-1:] == (self.bos_id,)

    @property
    def adds_eos(self) -> bool:
        """True if the tokenizer puts ``eos_id`` after a text by itself."""
        return self.eos_id is not None and self.after[:1] == (self.eos_id,)


def read_special_tokens(tokenizer: _LibraryTokenizer, path: Path) -> SpecialTokens:
    """Read the special tokens of a ``tokenizer.json`` and of the files beside it."""
    names = token_names(path)
    eos = (tokenizer.token_to_id(name) for name in (names.get("eos_token"), *_EOS_NAMES) if name)
    bos, pad = names.get("bos_token"), names.get("pad_token")
    before, after = _around(tokenizer)
    return SpecialTokens(
        bos_id=tokenizer.token_to_id(bos) if bos else None,
        eos_id=next((found for found in eos if found is not None), None),
        pad_id=tokenizer.token_to_id(pad) if pad else None,
        before=before,
        after=after,
    )


def _around(tokenizer: _LibraryTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that the post-processor puts before and after any text."""
    if tokenizer.num_special_tokens_to_add(False) == 0:
        return (), ()
    # A text must have a token of its own, which few vocabularies refuse to "a".
    for probe in ("a", *tokenizer.get_vocab(with_added_tokens=False)):
        encoded = tokenizer.encode(probe)
        own = [at for at, added in enumerate(encoded.special_tokens_mask) if not added]
        if own:
            ids = encoded.ids
            return tuple(ids[: own[0]]), tuple(ids[own[-1] + 1 :])
    return (), ()


def token_names(path: Path) -> dict[str, str]:
    """Return the tokens that the files beside a tokenizer name, such as ``eos_token``.

    Args:
        path: The tokenizer's file or folder.
    """
    names: dict[str, str] = {}
    for file in NAME_FILES:
        for key, value in _json_object(folder_of(path) / file).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str) and content:
                names.setdefault(key, content)
    return names


def generation_ends(path: Path) -> tuple[int, ...]:
    """Return the ids that end a generated text by the files of a folder, as in ``transformers``.

    These are ``eos_token_id``, a number or a list, of ``generation_config.json``, else of
    ``config.json``.

    Args:
        path: The folder, or a file in it.
    """
    for file in _END_FILES:
        found = _json_object(folder_of(path) / file).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        ends = tuple(end for end in ids if isinstance(end, int) and not isinstance(end, bool))
        if ends:
            return ends
    return ()


def folder_of(path: Path) -> Path:
    """Return the folder of a tokenizer that is given by its file or folder."""
    return path if path.is_dir() else path.parent


def _json_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; empty if there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
