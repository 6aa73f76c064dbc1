"""Special tokens: those of transformers around a text, and the ids that end a generated one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacore.data.special_tokens import SpecialTokens, generation_ends
from megacore.data.tokenizer import special_tokens_of
from tests.support.tokenizers import save_byte_level, save_llama_like, save_unigram

pytest.importorskip("transformers")


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize("flag", [None, False, True])
def test_the_tokens_around_a_text_are_those_of_transformers(
    adds_bos: bool, adds_eos: bool, flag: bool | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    flags = {} if flag is None else {"add_bos_token": flag, "add_eos_token": flag}
    path = save_llama_like(tmp_path, adds_bos=adds_bos, adds_eos=adds_eos, **flags)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    special = special_tokens_of(path)
    text = "the dog, twice"
    plain = oracle(text, add_special_tokens=False)["input_ids"]
    assert [*special.before, *plain, *special.after] == oracle(text)["input_ids"]
    assert (special.adds_bos, special.adds_eos) == (adds_bos, adds_eos)
    assert (special.bos_id, special.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert special_tokens_of(tmp_path) == special


def test_tokens_are_found_in_the_files_of_older_versions(tmp_path: Path) -> None:
    save_llama_like(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<unk>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    special = special_tokens_of(tmp_path)
    assert (special.bos_id, special.eos_id, special.pad_id) == (1, 2, 0)


def test_a_tokenizer_without_a_post_processor_adds_nothing(tmp_path: Path) -> None:
    assert special_tokens_of("bytes") == SpecialTokens()
    assert special_tokens_of(save_byte_level(tmp_path)) == SpecialTokens(eos_id=0)
    assert special_tokens_of(save_unigram(tmp_path)) == SpecialTokens(eos_id=1)


def test_the_ends_are_those_of_the_generation_or_of_the_model(tmp_path: Path) -> None:
    assert generation_ends(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert generation_ends(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert generation_ends(tmp_path / "tokenizer.json") == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 128009]}')
    assert generation_ends(tmp_path) == (1, 128009)
