"""Text in pieces: the tokens of the whole text, with tokenizers that look across borders."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data import load_tokenizer, read_indexed
from megatrain.data import records as records_module
from megatrain.data.frame import frame_of
from megatrain.data.prepare import PrepareOptions, prepare
from megatrain.data.text_pieces import find_cut, tokens_of_pieces
from megatrain.data.tokenizer import Tokenizer
from tests.support.tokenizers import TEXTS, save_byte_level, save_llama_like, save_unigram

pytest.importorskip("tokenizers")
KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": save_llama_like,
    "byte-level": save_byte_level,
    "unigram": save_unigram,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: Any, tmp_path_factory: Any) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    return load_tokenizer(str(KINDS[request.param](folder)))


def long_text(seed: int, size: int) -> str:
    """Return lines of words, code, blank lines, numbers and bytes outside of the vocabulary."""
    draw = random.Random(seed)
    parts = [*TEXTS, "\n", "\n\n  ", "    x = 1\n", "日本語\n", "</s>\n", "word ", "\u0301\n"]
    text = ""
    while len(text) < size:
        text += draw.choice(parts) * draw.choice([1, 1, 1, 7])
    return text


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_tokens_of_pieces_are_those_of_the_whole(
    tokenizer: Tokenizer, seed: int, data: st.DataObject
) -> None:
    text = long_text(seed, 20_000)
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    edges = [0, *borders, len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    parts = list(tokens_of_pieces(tokenizer, pieces, first=None, last=None))
    assert [int(token) for part in parts for token in part] == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("repeated", ["a", "\n", " ", "ab\n", "   \n"])
def test_repeated_characters_have_no_other_tokens(tokenizer: Tokenizer, repeated: str) -> None:
    text = repeated * (30_000 // len(repeated))
    pieces = [text[:9_001], text[9_001:21_002], text[21_002:]]
    parts = list(tokens_of_pieces(tokenizer, pieces, first=None, last=None))
    assert [int(token) for part in parts for token in part] == tokenizer.encode(text).tolist()


def test_both_sides_of_a_border_find_the_same_cut(tokenizer: Tokenizer) -> None:
    text = long_text(5, 40_000)
    left, right = text[:20_000], text[20_000:]
    cut = find_cut(tokenizer, left, right)
    first = tokens_of_pieces(tokenizer, [left[:9_000], left[9_000:]], first=None, last=cut)
    second = tokens_of_pieces(tokenizer, [right], first=cut, last=None)
    tokens = [int(token) for part in (*first, *second) for token in part]
    assert tokens == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_prepared_text_has_the_tokens_of_the_whole_in_blocks_and_shards(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(KINDS[kind](tmp_path)))
    monkeypatch.setattr(records_module, "BLOCK_BYTES", 6_000)
    monkeypatch.setattr(records_module, "SHARD_BYTES", 20_000)
    path = tmp_path / "a.txt"
    # A line longer than a shard, so that a shard has no line of its own.
    text = long_text(1, 50_000) + "x" * 45_000 + "\n" + long_text(2, 30_000)
    path.write_text(text, newline="")
    prepare([path], tmp_path / "x", PrepareOptions(tokenizer=tokenizer.name), workers=1)
    indexed = read_indexed(tmp_path / "x")
    frame = frame_of(tokenizer)
    expected = [*frame.before, *tokenizer.encode(text).tolist(), *frame.after]
    assert indexed.num_documents == 1
    assert indexed.tokens.tolist() == expected
