"""Conversations and pairs: tokens and masks of transformers, and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import DataError
from megatrain.config import DataConfig
from megatrain.data import ByteTokenizer, load_data, load_tokenizer, read_indexed
from megatrain.data.chat import ChatTemplate
from megatrain.data.merge import merge_indexed
from megatrain.data.prepare import PrepareOptions, prepare
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
    ({"messages": MESSAGES, "tools": "[]"}, '"tools" must be a list of objects'),
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


SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


@pytest.mark.parametrize("system", ["message", "field"])
def test_conversations_of_sharegpt_have_the_tokens_of_messages(system: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=MARKED)
    rows = []
    for row in CONVERSATIONS:
        turns = [{"from": SHAREGPT[m["role"]], "value": m["content"]} for m in row["messages"]]
        shared = {"conversations": turns}
        if system == "field" and turns[0]["from"] == "system":
            shared = {"system": turns[0]["value"], "conversations": turns[1:]}
        if "tools" in row:  # many such files have them as text
            shared["tools"] = json.dumps(row["tools"])
        rows.append(shared)
    ours = PrepareOptions(tokenizer=str(tmp_path), field="messages")
    prepare([jsonl(tmp_path / "a.jsonl", CONVERSATIONS)], tmp_path / "x", ours)
    theirs = PrepareOptions(tokenizer=str(tmp_path), field="conversations")
    prepare([jsonl(tmp_path / "b.jsonl", rows)], tmp_path / "y", theirs)
    for suffix in (".bin", ".idx", ".mask"):
        first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in "xy")
        assert first == second, suffix


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {"from": "alien", "value": "x"},
            '"from" of a message must be one of system, human, .*got',
        ),
        ({"from": "gpt"}, 'every message must be an object with "from" and "value"'),
        ("text", 'every message must be an object with "from" and "value"'),
    ],
)
def test_bad_messages_of_sharegpt_are_one_sentence(turn: Any, message: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=MARKED)
    rows = [{"conversations": [{"from": "human", "value": "a"}, turn]}]
    options = PrepareOptions(tokenizer=str(tmp_path), field="conversations")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 1: {message}"):
        prepare([jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "x", options)


ALPACA = {"instruction": "Add", "input": "2 and 2", "output": "4"}
FORMS = [
    ("instruction,input,output", None, ALPACA, "Add\n\n2 and 2\n\n|4"),
    ("instruction, input, output", None, {**ALPACA, "input": ""}, "Add\n\n|4"),
    ("instruction,input,output", None, {**ALPACA, "input": None}, "Add\n\n|4"),
    ("instruction,input,output", "\n###\n", ALPACA, "Add\n###\n2 and 2\n###\n|4"),
    ("instruction,output", None, ALPACA, "Add\n\n|4"),
    ("prompt,completion", None, {"prompt": "Add", "completion": " 4"}, "Add| 4"),
    ("prompt,completion", " =", {"prompt": "Add", "completion": " 4"}, "Add =| 4"),
    ("a.q,a.b.c", None, {"a": {"q": "Q", "b": {"c": "C"}}}, "Q\n\n|C"),
    ("a.q,x.y", "", {"a": {"q": "Q"}, "x.y": "C"}, "Q|C"),
]


@pytest.mark.parametrize(("field", "separator", "row", "expected"), FORMS)
def test_fields_are_joined_and_the_last_one_is_learned(
    field: str, separator: str | None, row: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [row])
    options = PrepareOptions(field=field, separator=separator, eod="")
    prepare([path], tmp_path / "x", options)
    indexed = read_indexed(tmp_path / "x")
    prompt, answer = expected.split("|")
    assert bytes(indexed.tokens.astype("u1")).decode() == prompt + answer
    assert indexed.mask_of(0).tolist() == [0] * len(prompt) + [1] * len(answer)
    config = DataConfig(
        source=str(path), field=field, separator=separator, cache=str(tmp_path / "cache")
    )
    data = load_data(config, seq_length=1, seed=0)
    assert bytes(data.sources["a.jsonl"].tokens.astype("u1")).startswith((prompt + answer).encode())


@pytest.mark.parametrize(
    ("field", "row", "message"),
    [
        (
            "data.text",
            {"data": {"body": "x"}, "id": 1},
            'no field "data.text"; it has data.body, id',
        ),
        ("data.text", {"data": ["x"]}, 'no field "data.text"; it has data'),
        ("data.text", {"data": {"text": 1}}, 'the field "data.text" must be text, got int'),
        ("a,b,c", {"a": None, "b": "x", "c": "y"}, 'the field "a" must be text, got NoneType'),
        ("a,b,c", {"a": "x", "b": "x", "c": None}, 'the field "c" must be text, got NoneType'),
    ],
)
def test_a_missing_field_is_one_sentence(
    field: str, row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl, line 1: {message}"):
        prepare([jsonl(tmp_path / "a.jsonl", [row])], tmp_path / "x", PrepareOptions(field=field))


def test_nested_columns_are_read_as_nested_fields(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"data": [{"text": "deep"}]}), tmp_path / "a.parquet")
    prepare([tmp_path / "a.parquet"], tmp_path / "x", PrepareOptions(field="data.text", eod=""))
    assert bytes(read_indexed(tmp_path / "x").tokens.astype("u1")) == b"deep"


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


@pytest.mark.parametrize("field", ["a,,c", "a,", ","])
def test_empty_names_of_fields_are_one_sentence(field: str) -> None:
    with pytest.raises(DataError, match=r"one name, or several joined by commas, .*, got"):
        PrepareOptions(field=field)


# As Qwen3's: only the last answer has a block of reasoning.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_an_answer_that_is_rendered_otherwise_before_others_does_not_count(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=THINKING)
    path = jsonl(tmp_path / "a.jsonl", [{"messages": MESSAGES}] * 2)
    options = PrepareOptions(tokenizer=str(tmp_path), field="messages")
    result = prepare([path], tmp_path / "x", options)
    assert result.num_left_out == 2
    [note] = result.notes
    assert note.startswith("answers left out of the loss: 2 (the chat template renders them")
    indexed = read_indexed(tmp_path / "x")
    learned = indexed.sequence(0)[indexed.mask_of(0).astype(bool)]
    expected = "<think>\n\n</think>\n\nEight 😀.<|im_end|>\n"
    assert load_tokenizer(str(tmp_path)).decode(learned.tolist()) == expected
    # A run states it at its start, also if its cache is there already.
    config = DataConfig(
        source=str(path), tokenizer=str(tmp_path), field="messages", cache=str(tmp_path / "cache")
    )
    for _ in range(2):
        assert f"a.jsonl: {note}" in load_data(config, seq_length=8, seed=1).notes


def test_a_conversation_without_an_answer_as_it_is_generated_is_one_sentence() -> None:
    template = ChatTemplate({"default": THINKING}, tokens={}, name="t")
    with pytest.raises(ValueError, match="template t renders no answer as it is generated; end"):
        template.render([*MESSAGES[1:3], {"role": "user", "content": "more"}])
    source = "{% for m in messages if m.marked %}{% generation %}x{% endgeneration %}{% endfor %}"
    template = ChatTemplate({"default": source}, tokens={}, name="t")
    with pytest.raises(ValueError, match="template t marks no answer of it"):
        template.render(MESSAGES)


def test_an_answer_without_the_prompted_reasoning_counts_from_the_difference() -> None:
    prompt = "{% if add_generation_prompt %}A:<think>\n{% endif %}"
    source = "{% for m in messages %}{{ m.role[0] | upper }}:{{ m.content }};{% endfor %}" + prompt
    template = ChatTemplate({"default": source}, tokens={}, name="t")
    rendered = template.render(MESSAGES)
    assert rendered.num_unprompted == 2
    learned = [rendered.text[begin:end] for begin, end in rendered.answers]
    assert learned == ["Four, naïvely.;", "Eight 😀.;"]


def rendered(folder: Path, tools: list[dict[str, Any]] | None = None) -> str:
    """Return a conversation as the templates of a folder render it, checked by transformers."""
    from transformers import AutoTokenizer

    template = ChatTemplate.of_tokenizer(str(folder))
    assert template is not None
    messages = [{"role": "assistant", "content": ""}]
    oracle = AutoTokenizer.from_pretrained(folder)
    text = template.render(messages, tools).text
    assert text == oracle.apply_chat_template(messages, tools=tools, tokenize=False)
    return text


def test_templates_are_chosen_by_name_as_in_transformers(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=CHATML)
    (tmp_path / "chat_template.jinja").unlink()
    path = tmp_path / "tokenizer_config.json"
    named = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D{{ bos_token }}{{ pad_token is defined }}"},
    ]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    assert rendered(tmp_path) == "D<|endoftext|>False"
    assert rendered(tmp_path, [{"name": "x"}]) == rendered(tmp_path, []) == "T"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("U")
    assert rendered(tmp_path, [{"name": "x"}]) == "U"
    template = ChatTemplate.of_tokenizer(str(tmp_path))
    assert template is not None
    with pytest.raises(ValueError, match='must have one with the name "default", got tool_use'):
        template.render([{"role": "assistant", "content": ""}])
    (tmp_path / "chat_template.jinja").write_text("J")
    assert rendered(tmp_path) == "J"
    assert rendered(tmp_path, [{"name": "x"}]) == "U"
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
