"""Special tokens: those of transformers around a text, and the ids that end a generated one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import DataError
from megatrain.cli import main
from megatrain.config import DataConfig
from megatrain.data import load_data, load_tokenizer, load_tokens, read_indexed
from megatrain.data.prepare import PrepareOptions, prepare
from megatrain.data.special_tokens import SpecialTokens, generation_ends
from megatrain.data.tokenizer import special_tokens_of
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


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(folder: Path, rows: list[Any], **options: Any) -> list[list[int]]:
    path = jsonl(folder / "a.jsonl", rows)
    prepare([path], folder / "x", PrepareOptions(tokenizer=str(folder), **options))
    indexed = read_indexed(folder / "x")
    return [indexed.sequence(number).tolist() for number in range(len(indexed.lengths))]


@pytest.mark.parametrize("adds_eos", [False, True])
def test_prepared_documents_are_those_of_transformers(adds_eos: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_llama_like(tmp_path, adds_eos=adds_eos)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    rows = [{"text": text} for text in ("Hello, dog.", " two\n\nlines ", "</s> inside", "")]
    end = [] if adds_eos else [oracle.eos_token_id]
    expected = [oracle(row["text"])["input_ids"] + end for row in rows[:3]]
    assert prepared(tmp_path, rows) == expected
    plain = [oracle(row["text"], add_special_tokens=False)["input_ids"] for row in rows[:3]]
    assert prepared(tmp_path, rows, bos="", eod="") == plain
    # As Megatron's preprocessing with --append-eod.
    assert prepared(tmp_path, rows, bos="") == [[*ids, 2] for ids in plain]
    assert prepared(tmp_path, rows, bos="</s>", eod="<unk>")[0] == [2, *plain[0], 0]
    with pytest.raises(DataError, match='has no token "<bos>"'):
        prepared(tmp_path, rows, bos="<bos>")


def test_the_first_token_is_there_once(tmp_path: Path) -> None:
    save_llama_like(tmp_path)
    text = "the dog"
    [ids] = prepared(tmp_path, [{"text": text}])
    assert prepared(tmp_path, [{"text": "<s>" + text}])[0].count(1) == ids.count(1) == 1
    template = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    rows = [{"messages": [{"role": "assistant", "content": text}]}]
    [chat] = prepared(tmp_path, rows, field="messages")
    assert (chat[0], chat[-1], chat.count(1), chat.count(2)) == (1, 2, 1, 1)
    assert prepared(tmp_path, rows, field="messages", bos="<s>") == [chat]


def test_the_first_token_of_a_pair_does_not_count(tmp_path: Path) -> None:
    save_llama_like(tmp_path)
    rows = [{"prompt": "the ", "completion": "dog"}]
    [ids] = prepared(tmp_path, rows, field="prompt,completion")
    mask = read_indexed(tmp_path / "x").mask_of(0).tolist()
    assert ids[0] == 1
    assert ids[-1] == 2
    assert (mask[0], mask[-1]) == (0, 1)


def test_text_in_memory_has_the_tokens_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(str(save_llama_like(tmp_path)))
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = ["The dog.\n", "naïve fox"]
    for name, text in zip("ab", texts, strict=True):
        (folder / f"{name}.txt").write_text(text)
    first, second = (oracle(text)["input_ids"] for text in texts)
    assert load_tokens(str(folder / "a.txt"), tokenizer).tokens.tolist() == first
    joined = load_tokens(str(folder), tokenizer)
    assert joined.tokens.tolist() == [*first, 2, *second]
    assert list(joined.document_starts) == [0, len(first) + 1]
    [note] = joined.notes
    assert note == "documents begin with <s> and end with </s> (data.bos, data.eod)"
    config = DataConfig(source=str(folder), tokenizer=str(tmp_path), bos="", eod="<unk>")
    data = load_data(config, seq_length=2, seed=0)
    assert data.sources["texts"].tokens.tolist() == [*first[1:], 0, *second[1:], 0]
    assert data.notes == (
        "documents begin with no special token and end with <unk> (data.bos, data.eod)",
    )
    assert load_tokens(str(folder), load_tokenizer("bytes")).notes == ()


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_bytes_for_a_model_with_a_larger_vocabulary_are_noted(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_text(json.dumps({"text": "the quick dog"}) + "\n")
    config = DataConfig(source=str(path), cache=str(tmp_path / "cache"), split="1,0")
    for vocab_size, count in ((None, 0), (256, 0), (420, 1)):
        notes = load_data(config, seq_length=2, seed=0, vocab_size=vocab_size).notes
        found = [note for note in notes if "256 of the 420 ids of model.vocab_size" in note]
        assert len(found) == count


def test_files_without_the_first_token_are_noted(tmp_path: Path) -> None:
    save_llama_like(tmp_path)
    config = DataConfig(source=str(tmp_path / "x"), tokenizer=str(tmp_path), split="1,0")
    rows = [{"text": "the quick dog"}]
    prepared(tmp_path, rows)
    assert load_data(config, seq_length=2, seed=0).notes == ()
    prepared(tmp_path, rows, bos="")
    [note] = load_data(config, seq_length=2, seed=0).notes
    assert "do not begin with <s>, which the tokenizer puts before a text" in note
    meant = config.model_copy(update={"bos": ""})
    assert load_data(meant, seq_length=2, seed=0).notes == ()


def test_prepare_prints_the_tokens_around_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_llama_like(tmp_path)
    path = jsonl(tmp_path / "a.jsonl", [{"text": "the dog"}])
    command = ["data", "prepare", str(path), "-o", str(tmp_path / "x"), "--tokenizer"]
    assert main([*command, str(tmp_path), "--eod="]) == 0
    assert "documents begin with <s> and end with no special token" in capsys.readouterr().out
    assert main([*command, "bytes", "--force"]) == 0
    assert "documents begin" not in capsys.readouterr().out
    assert main([*command, str(tmp_path), "--bos=<x>", "--force"]) == 2
    assert 'has no token "<x>"' in capsys.readouterr().err


def test_the_start_table_has_the_tokens_around_documents(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_llama_like(tmp_path)
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    run = tmp_path / "run.toml"
    run.write_text(
        f'[data]\nsource = "{tmp_path / "a.txt"}"\ntokenizer = "{tmp_path}"\n'
        "[model]\nhidden_size = 16\nnum_layers = 1\nnum_heads = 2\nseq_length = 8\n"
        "[train]\nsteps = 1\nmicrobatch_size = 1\nglobal_batch_size = 1\neval_interval = 0\n"
        f'[run]\ndir = "{tmp_path / "run"}"\nplain = true\n'
    )
    assert main(["train", str(run), "--nproc=1"]) == 0
    shown = capfd.readouterr().out
    assert "documents begin with <s> and end with </s> (data.bos, data.eod)" in shown
