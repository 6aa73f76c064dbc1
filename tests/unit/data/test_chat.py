"""Conversations and pairs: tokens and masks of transformers, and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacore.config import DataConfig
from megacore.data import ByteTokenizer, load_data, load_tokenizer, read_indexed
from megacore.data.chat import ChatTemplate
from megacore.data.indexed import merge_indexed
from megacore.data.prepare import PrepareOptions, prepare
from megacore.errors import DataError
from tests.support.chat import CHATML, CONVERSATIONS, MARKED, save_tokenizer

MESSAGES = CONVERSATIONS[0]["messages"]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["compared", "marked"])
def test_tokens_and_masks_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    oracle = save_tokenizer(tmp_path, template=MARKED)
    expected = [
        oracle.apply_chat_template(
            row["messages"],
            tools=row.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        for row in CONVERSATIONS
    ]
    assert all(any(one["assistant_masks"]) for one in expected)
    save_tokenizer(tmp_path, template=template)
    tokenizer = str(tmp_path / "tokenizer.json")
    path = jsonl(tmp_path / "a.jsonl", CONVERSATIONS)
    options = PrepareOptions(tokenizer=tokenizer, field="messages")
    assert prepare([path], tmp_path / "x", options).num_documents == len(CONVERSATIONS)
    indexed = read_indexed(tmp_path / "x")
    for number, one in enumerate(expected):
        assert indexed.sequence(number).tolist() == one["input_ids"]
        assert indexed.mask_of(number).tolist() == one["assistant_masks"]


def test_parquet_has_the_tokens_of_json_lines(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    save_tokenizer(tmp_path, template=MARKED)
    options = PrepareOptions(tokenizer=str(tmp_path), field="messages")
    rows = [{"messages": row["messages"]} for row in CONVERSATIONS]
    prepare([jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "x", options)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    prepare([tmp_path / "a.parquet"], tmp_path / "y", options)
    for suffix in (".bin", ".idx", ".mask"):
        assert (tmp_path / f"x{suffix}").read_bytes() == (tmp_path / f"y{suffix}").read_bytes()


def test_only_completions_count_and_text_counts_whole(tmp_path: Path) -> None:
    pairs = [{"prompt": "é 2+2=", "completion": "4é"}, {"prompt": "a", "completion": ""}]
    options = PrepareOptions(field="prompt,completion")
    prepare([jsonl(tmp_path / "a.jsonl", pairs)], tmp_path / "pairs", options)
    indexed = read_indexed(tmp_path / "pairs")
    assert ByteTokenizer().decode(indexed.tokens) == "é 2+2=4é\n\na\n\n"
    assert indexed.mask is not None
    assert indexed.mask.tolist() == [0] * 7 + [1] * 5 + [0, 1, 1]
    prepare([jsonl(tmp_path / "b.jsonl", [{"text": "abc"}])], tmp_path / "text", PrepareOptions())
    assert read_indexed(tmp_path / "text").mask is None
    merge_indexed([tmp_path / "text", tmp_path / "pairs", tmp_path / "text"], tmp_path / "all")
    merged = read_indexed(tmp_path / "all").mask
    assert merged is not None
    assert merged.tolist() == [1] * 5 + indexed.mask.tolist() + [1] * 5
    # A mask of before does not stay beside new tokens.
    prepare([tmp_path / "b.jsonl"], tmp_path / "pairs", PrepareOptions())
    assert read_indexed(tmp_path / "pairs").mask is None


@pytest.mark.parametrize("order", ["megacore", "megatron"])
def test_prompts_have_no_loss(order: str, tmp_path: Path) -> None:
    rows = [{"prompt": "p" * (n % 5 + 1), "completion": "c" * (n % 3 + 1)} for n in range(80)]
    config = DataConfig(
        source=str(jsonl(tmp_path / "a.jsonl", rows)),
        cache=str(tmp_path / "cache"),
        field="prompt,completion",
        order=order,
        split="100,0",
    )
    data = load_data(config, seq_length=32, seed=1, num_samples=8)
    assert data.default_normalization == "token"
    for number in range(8):
        sample = data.train.sample(number)
        counted = bytes(sample.labels[sample.labels >= 0].astype("u1"))
        assert set(counted) == set(b"c\n")
        assert (sample.labels == -1).any()


BAD = [
    ({"messages": "text"}, None),
    ({"messages": [{"role": "user", "content": "x"}]}, 'no message of the role "assistant"'),
    ({"messages": ["x"]}, 'every message must be an object with a "role"'),
    ({"messages": [{"content": "x"}]}, 'every message must be an object with a "role"'),
    ({"messages": 7}, 'the field "messages" must be text, got int'),
    ({"other": []}, 'no field "messages"; it has other'),
    (
        {"messages": [{"role": "alien", "content": "x"}, {"role": "assistant", "content": "y"}]},
        "chat_template.jinja fails: no role alien",
    ),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_conversation_is_one_sentence(row: Any, message: str | None, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=MARKED)
    path = jsonl(tmp_path / "a.jsonl", [{"messages": MESSAGES}, row])
    options = PrepareOptions(
        tokenizer=str(tmp_path), field="messages", advice="; --skip-bad leaves such records out"
    )
    if message is None:  # text among conversations is text
        assert prepare([path], tmp_path / "x", options).num_documents == 2
        return
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{message}.*--skip-bad"):
        prepare([path], tmp_path / "x", options)


def test_a_missing_or_broken_template_is_one_sentence(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"messages": MESSAGES}])
    with pytest.raises(DataError, match=r"^conversations need a chat template: set the tokenizer"):
        prepare([path], tmp_path / "x", PrepareOptions(field="messages", skip_bad=True))
    save_tokenizer(tmp_path, template="{% if %}")
    with pytest.raises(DataError, match=r"chat_template\.jinja is not valid"):
        ChatTemplate.of_tokenizer(str(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(DataError, match="is not a JSON object"):
        ChatTemplate.of_tokenizer(str(tmp_path))


@pytest.mark.parametrize("field", ["a,b,c", "a,", ","])
def test_other_numbers_of_fields_are_one_sentence(field: str) -> None:
    with pytest.raises(DataError, match="one name, or two for prompt and completion, got"):
        PrepareOptions(field=field)


def test_a_template_that_changes_earlier_answers_needs_marks() -> None:
    source = "{% for m in messages %}{{ m.content if loop.last else '...' }}{% endfor %}"
    template = ChatTemplate(source, tokens={}, name="t")
    with pytest.raises(ValueError, match="renders message 1 differently alone"):
        template.render([*MESSAGES[1:3], {"role": "user", "content": "more"}])


def test_templates_of_the_configuration_are_found(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D{{ bos_token }}"},
    ]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.of_tokenizer(str(tmp_path / "tokenizer.json"))
    assert template is not None
    assert template.render([{"role": "assistant", "content": ""}]).text == "D<s>"
    (tmp_path / "chat_template.jinja").write_text("J")
    template = ChatTemplate.of_tokenizer(str(tmp_path))
    assert template is not None
    assert template.render([{"role": "assistant", "content": ""}]).text == "J"
    assert ChatTemplate.of_tokenizer("bytes") is None


def test_a_mask_of_other_tokens_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    prepare([path], tmp_path / "x", PrepareOptions(field="prompt,completion"))
    (tmp_path / "x.mask").write_bytes(b"\1")
    with pytest.raises(DataError, match=r"x\.mask has 1 bytes, but x\.bin has 4 tokens"):
        read_indexed(tmp_path / "x")


def test_a_token_counts_if_it_holds_a_character_of_an_answer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=MARKED)
    tokenizer = load_tokenizer(str(tmp_path))
    template = ChatTemplate.of_tokenizer(str(tmp_path))
    assert template is not None
    ids, counted = tokenizer.encode_marked(template.render(MESSAGES))
    answers = "".join(f"{message['content']}<|im_end|>\n" for message in MESSAGES[2::2])
    assert tokenizer.decode(ids[counted]) == answers
