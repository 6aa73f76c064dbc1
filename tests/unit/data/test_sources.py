from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.errors import DataError
from megatrain.config import DataConfig
from megatrain.data import (
    ByteTokenizer,
    Dataset,
    load_data,
    load_tokens,
    unigram_entropy,
    write_indexed,
)
from megatrain.data.frame import SEPARATOR
from megatrain.data.loading import split_range


def _text(source: str) -> str:
    return ByteTokenizer().decode(load_tokens(source, ByteTokenizer()).tokens.tolist())


def test_python_docs_are_english_prose() -> None:
    source = load_tokens("python-docs", ByteTokenizer())
    text = ByteTokenizer().decode(source.tokens[:200_000].tolist())
    assert source.num_tokens > 300_000
    assert source.num_documents > 50
    assert text.count(" the ") > 500


@pytest.mark.parametrize(("name", "tolerance"), [("python-docs", 0.1), ("stdlib", 0.3)])
def test_validation_text_of_a_built_in_source_is_like_its_training_text(
    name: str, tolerance: float
) -> None:
    data = load_data(DataConfig(source=name), seq_length=64, seed=0)
    held_out = data.validation[name]
    assert isinstance(held_out, Dataset)
    entropy = unigram_entropy(held_out.tokens.tokens)
    assert entropy == pytest.approx(data.unigram_entropy, abs=tolerance)
    again = load_tokens(name, ByteTokenizer()).tokens
    assert np.array_equal(again, data.sources[name].tokens)


def test_stdlib_holds_modules_but_no_tests() -> None:
    text = _text("stdlib")
    assert len(text) > 5_000_000
    assert "class OrderedDict(dict)" in text
    assert "class TestOrderedDict" not in text


def test_a_folder_is_read_in_name_order_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "deep.md").write_text("first: ä")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").write_text("")
    source = load_tokens(str(tmp_path), ByteTokenizer())
    assert ByteTokenizer().decode(source.tokens.tolist()) == f"first: ä{SEPARATOR}second"
    assert source.num_documents == 2
    assert source.notes == (
        f"{tmp_path}: left out: .git (hidden), .hidden (hidden), empty.txt (empty), "
        "picture.png (a picture)",
    )
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    with pytest.raises(DataError, match=r"cannot be read: nul\.txt \(binary, not text\); move"):
        load_tokens(str(tmp_path), ByteTokenizer())


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tale.txt"
    path.write_text("Once upon a time\n")
    assert _text(str(path)) == "Once upon a time\n"


def test_token_files_are_taken_without_encoding(tmp_path: Path) -> None:
    write_indexed(tmp_path / "x", [[3, 1], [2]], vocab_size=4)
    source = load_tokens(str(tmp_path / "x.bin"), ByteTokenizer())
    assert source.tokens.tolist() == [3, 1, 2]
    assert source.num_documents == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tael.txt", r"tael\.txt does not exist; did you mean .*/tale\.txt"),
        ("zzz", r"zzz does not exist; .* holds half\.bin, latin1\.txt, tale\.txt"),
        ("nowhere/zzz", r"zzz does not exist, nor does its folder \(only .* does\)"),
        ("half", r"half\.bin exists but .*half\.idx does not"),
        ("latin1.txt", r"latin1\.txt, line 1: not UTF-8 text: byte 3 is 0xe9"),
        ("void", r"void has no text: found no files"),
    ],
)
def test_a_bad_source_is_explained(tmp_path: Path, name: str, message: str) -> None:
    base = tmp_path / "data"
    base.mkdir()
    (base / "tale.txt").write_text("Once upon a time\n")
    (base / "latin1.txt").write_bytes("café".encode("latin1"))
    (base / "half.bin").write_bytes(b"")
    if name == "void":
        (base / "void").mkdir()
    with pytest.raises(DataError, match=message):
        load_tokens(str(base / name), ByteTokenizer())


def test_a_device_is_no_text() -> None:
    with pytest.raises(DataError, match="/dev/zero is neither a regular file nor a folder"):
        load_tokens("/dev/zero", ByteTokenizer())


def test_a_misspelt_built_in_source_is_recognised() -> None:
    with pytest.raises(DataError, match=r"did you mean python-docs\?"):
        load_tokens("python_docs", ByteTokenizer())


def _config(tmp_path: Path, text: str, split: str = "75,25") -> DataConfig:
    path = tmp_path / "t.txt"
    path.write_text(text)
    return DataConfig(source=str(path), split=split)


def test_the_split_is_by_position(tmp_path: Path) -> None:
    data = load_data(_config(tmp_path, "a" * 30 + "b" * 10), seq_length=4, seed=0)
    train, validation = data.train, data.validation["t.txt"]
    assert isinstance(train, Dataset)
    assert isinstance(validation, Dataset)
    assert bytes(train.tokens.tokens) == b"a" * 30
    assert bytes(validation.tokens.tokens) == b"b" * 10
    assert data.unigram_entropy == 0.0


def test_the_third_share_of_a_split_is_left_alone() -> None:
    docs = load_tokens("python-docs", ByteTokenizer())
    train, validation = split_range(docs.range(), (0.5, 0.3))
    total = len(load_tokens("python-docs", ByteTokenizer()).tokens)
    assert (len(train), len(validation)) == (round(total * 0.5), round(total * 0.8) - len(train))


def test_too_little_training_text_is_an_error_with_numbers(tmp_path: Path) -> None:
    message = r"has 8 tokens, but one sample takes model.seq_length \+ 1 = 9; .* at most 7"
    with pytest.raises(DataError, match=message):
        load_data(_config(tmp_path, "x" * 16, split="50,50"), seq_length=8, seed=0)
    load_data(_config(tmp_path, "x" * 16, split="50,50"), seq_length=7, seed=0)


def test_too_little_validation_text_is_an_error_only_if_it_is_needed(tmp_path: Path) -> None:
    config = _config(tmp_path, "x" * 100, split="95,5")
    assert not load_data(config, seq_length=8, seed=0).validation
    with pytest.raises(DataError, match=r"has 5 tokens.* = 9; .*train.eval_interval = 0"):
        load_data(config, seq_length=8, seed=0, need_validation=True)


def test_ids_outside_the_vocabulary_are_found_before_training(tmp_path: Path) -> None:
    write_indexed(tmp_path / "x", [[1] * 20, [1, 300]], vocab_size=400)
    config = DataConfig(source=str(tmp_path / "x"))
    with pytest.raises(
        DataError, match=r"token id 300 \(at position 21, in document 1 of .*x\.bin\).* 256 ids"
    ):
        load_data(config, seq_length=4, seed=0)
    assert load_data(config, seq_length=4, seed=0, vocab_size=400).train.num_tokens > 0


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_a_tokenizer_larger_than_the_vocabulary_is_named_with_both_sizes(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text('{"text": "abc~"}\n' * 9)
    config = DataConfig(source=str(tmp_path / name), cache=str(tmp_path / "cache"))
    with pytest.raises(
        DataError,
        match=r"token id \d+ .*, but ids must be below model\.vocab_size = 99, and the tokenizer "
        r"bytes has 256; set data\.tokenizer to the tokenizer of the model, or, for a model that "
        r"is not imported, leave model\.vocab_size out",
    ):
        load_data(config, seq_length=4, seed=0, vocab_size=99)
    # Unused ids of a tokenizer are no reason to refuse it.
    assert load_data(config, seq_length=4, seed=0, vocab_size=128).train.num_tokens > 0


def test_entropy_of_the_python_docs_is_the_known_value() -> None:
    tokens = load_tokens("python-docs", ByteTokenizer()).tokens
    # 3.26 nats per byte; the text differs a little between Python versions.
    assert unigram_entropy(tokens) == pytest.approx(3.26, abs=0.05)


@pytest.mark.parametrize("documents", [[], [[], []]], ids=["no documents", "empty documents"])
@pytest.mark.parametrize(
    "choice", [{}, {"packing": "best_fit"}, {"order": "megatron"}], ids=["stream", "packed", "mega"]
)
def test_token_files_without_tokens_are_one_sentence(
    documents: list[list[int]], choice: dict[str, Any], tmp_path: Path
) -> None:
    write_indexed(tmp_path / "x", documents, vocab_size=256)
    config = DataConfig(
        source=str(tmp_path / "x"), document_mask=True, cache=str(tmp_path / "c"), **choice
    )
    with pytest.raises(DataError, match=r"has 0 tokens|0 tokens are too few"):
        load_data(config, seq_length=4, seed=0)
