from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import DataError
from megatrain.data import ByteTokenizer, JsonTokenizer, load_tokenizer


@given(st.text())
def test_bytes_decode_to_the_text_they_encode(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8
    assert tokenizer.decode(ids.tolist()) == text


def test_broken_utf8_decodes_to_replacement_characters() -> None:
    assert ByteTokenizer().decode([0xC3, ord("x")]) == "\ufffdx"


def test_ids_that_are_not_bytes_decode_to_replacement_characters() -> None:
    assert ByteTokenizer().decode([65, 256, 10**6, 66]) == "A\ufffd\ufffdB"
    with pytest.raises(ValueError, match="at least 0, got -1"):
        ByteTokenizer().decode([65, -1])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_bytes_decode_arrays_of_any_integer_type(dtype: type) -> None:
    assert ByteTokenizer().decode(np.array([104, 105], dtype=dtype)) == "hi"


def test_the_byte_tokenizer_refuses_numbers_that_are_no_integers() -> None:
    with pytest.raises(TypeError, match="float"):
        ByteTokenizer().decode(np.array([104.5]))


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    library = pytest.importorskip("tokenizers")
    model = library.models.WordLevel({"<unk>": 0, "the": 1, "cat": 7}, unk_token="<unk>")
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_json_encodes_and_counts_up_to_its_largest_id(tokenizer_json: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_json))
    assert tokenizer.vocab_size == 8
    ids = tokenizer.encode("the cat the dog")
    assert ids.tolist() == [1, 7, 1, 0]
    assert ids.dtype == np.uint16
    assert tokenizer.decode([1, 7]) == "the cat"


def test_truncation_and_padding_of_the_file_do_not_touch_documents(tokenizer_json: Path) -> None:
    library = pytest.importorskip("tokenizers")
    other = library.Tokenizer.from_file(str(tokenizer_json))
    other.enable_truncation(4)
    other.enable_padding(length=6, pad_id=7, pad_token="cat")
    other.save(str(tokenizer_json))
    tokenizer = load_tokenizer(str(tokenizer_json))
    assert tokenizer.encode("the " * 10).tolist() == [1] * 10
    assert tokenizer.encode("the").tolist() == [1]


def test_a_tokenizer_json_decodes_an_array(tokenizer_json: Path) -> None:
    assert load_tokenizer(str(tokenizer_json)).decode(np.array([1, 7])) == "the cat"


def test_the_folder_of_a_tokenizer_json_is_enough(tokenizer_json: Path) -> None:
    assert JsonTokenizer(tokenizer_json.parent).encode("cat").tolist() == [7]


def test_a_missing_tokenizer_file_names_the_closest_one(tokenizer_json: Path) -> None:
    wrong = tokenizer_json.with_name("tokeniser.json")
    with pytest.raises(DataError, match=r"did you mean .*tokenizer\.json\?"):
        load_tokenizer(str(wrong))


@pytest.mark.parametrize("asked", ["", "tokenizer.json"])
def test_other_tokenizer_files_of_the_folder_are_listed(tmp_path: Path, asked: str) -> None:
    for name in ("config.json", "tokenizer.model", "tokenizer_config.json", "merges.txt"):
        (tmp_path / name).touch()
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(tmp_path / asked))
    start = "does not exist" if asked else "is a folder without a tokenizer.json"
    assert f"{start}; the tokenizer files in {tmp_path} are merges.txt, tokenizer.model, " in str(
        caught.value
    )
    assert "tokenizer_config.json, but megacore reads a tokenizer.json" in str(caught.value)
    assert "config.json," not in str(caught.value).replace("tokenizer_config.json,", "")


def test_a_missing_package_names_the_line_that_installs_it(
    tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without_tokenizers(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with pytest.raises(DataError, match=r"pip install '\.\[tokenizers\]'"):
        load_tokenizer(str(tokenizer_json))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "merges.txt", "qwen.tiktoken"])
def test_a_file_of_another_library_gets_the_advice_of_its_folder(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / name
    path.write_bytes(b'{"a": 0}' if name.endswith("json") else b"\x0a\xff\xfe")
    advice = r"write one with AutoTokenizer\.from_pretrained\(\.\.\.\)\.save_pretrained\(FOLDER\)"
    with pytest.raises(DataError, match=f"{name} is not a tokenizer.json .*; {advice}"):
        load_tokenizer(str(path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=f"; name .*{tmp_path.name}/tokenizer.json$"):
        load_tokenizer(str(path))
