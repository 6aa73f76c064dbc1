"""Chat templates of published models: tokens and masks of transformers.

The templates, and twins of them that mark answers, are those of the installed package trl.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import load_tokenizer
from megatrain.data.chat import ChatTemplate, make_environment
from tests.support.chat import CHATML, save_tokenizer
from tests.support.conversations import CONVERSATIONS

pytest.importorskip("transformers")


def trl_templates() -> dict[str, Path]:
    found = find_spec("trl")
    folders = list(found.submodule_search_locations or ()) if found else []
    return {
        path.stem: path for folder in folders for path in Path(folder, "chat_templates").glob("*")
    }


TEMPLATES = {name: path for name, path in trl_templates().items() if path.suffix == ".jinja"}
TWINS = [name for name in sorted(TEMPLATES) if f"{name}_training" in TEMPLATES]


class Twin:
    """The tokenizer of a folder, here and in transformers, with any template."""

    def __init__(self, folder: Path) -> None:
        self.oracle = save_tokenizer(folder, template=CHATML)
        self.tokenizer = load_tokenizer(str(folder))
        self._folder = folder

    def template(self, source: str) -> ChatTemplate:
        (self._folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        self.oracle.chat_template = source
        template = ChatTemplate.of_tokenizer(str(self._folder))
        assert template is not None
        return template

    def expected(self, conversation: dict[str, Any], *, has_marks: bool) -> Any:
        """Return what transformers encodes; ``None`` if the template refuses the conversation."""
        from jinja2 import TemplateError

        try:
            return self.oracle.apply_chat_template(
                conversation["messages"],
                tools=conversation.get("tools"),
                return_dict=True,
                return_assistant_tokens_mask=has_marks,
            )
        except (TemplateError, TypeError, ValueError):
            return None


@pytest.fixture(scope="module")
def twin(tmp_path_factory: Any) -> Twin:
    return Twin(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.skipif(not TEMPLATES, reason="needs trl, which has chat templates (make test has it)")
@pytest.mark.parametrize("name", sorted(TEMPLATES) or ["none"])
def test_tokens_and_masks_of_published_templates_are_those_of_transformers(
    name: str, twin: Twin
) -> None:
    source = TEMPLATES[name].read_text(encoding="utf-8")
    has_marks = "{%- generation" in source or "{% generation" in source
    template = twin.template(source)
    for kind, conversation in CONVERSATIONS.items():
        oracle = twin.expected(conversation, has_marks=has_marks)
        if oracle is None:
            with pytest.raises(ValueError, match=r"the chat template .* fails"):
                template.render(conversation["messages"], conversation.get("tools"))
            continue
        text = template.render(conversation["messages"], conversation.get("tools"))
        ids, counted = twin.tokenizer.encode_marked(text)
        assert ids.tolist() == oracle["input_ids"], kind
        if has_marks:
            assert counted.astype(int).tolist() == oracle["assistant_masks"], kind


@pytest.mark.skipif(not TWINS, reason="needs trl, which has chat templates (make test has it)")
@pytest.mark.parametrize("name", TWINS or ["none"])
def test_the_last_answer_of_published_templates_counts_without_marks(name: str, twin: Twin) -> None:
    template = twin.template(TEMPLATES[name].read_text(encoding="utf-8"))
    for kind, conversation in CONVERSATIONS.items():
        if twin.expected(conversation, has_marks=False) is None:
            continue
        text = template.render(conversation["messages"], conversation.get("tools"))
        learned = [text.text[begin:end] for begin, end in text.answers]
        answer = conversation["messages"][-1]["content"].strip()
        if answer not in text.text:  # templates for images skip content that is not a list
            continue
        assert answer in learned[-1], kind
        assert text.answers[-1][1] == len(text.text), kind
        if "tools" not in conversation:
            others = [m["content"] for m in conversation["messages"] if m["role"] != "assistant"]
            assert not any(other and other in "".join(learned) for other in others), kind


def test_the_environment_has_the_names_of_transformers() -> None:
    from transformers.utils import chat_template_utils

    oracle = chat_template_utils._compile_jinja_template("x").environment
    environment = make_environment()
    for names in ("filters", "tests", "globals"):
        assert getattr(environment, names).keys() == getattr(oracle, names).keys()
    for name in ("trim_blocks", "lstrip_blocks", "autoescape", "keep_trailing_newline"):
        assert getattr(environment, name) == getattr(oracle, name)
    extensions = {tag for one in environment.extensions.values() for tag in one.tags}
    assert extensions == {tag for one in oracle.extensions.values() for tag in one.tags}
    for ours, theirs in (
        (environment.filters["tojson"], oracle.filters["tojson"]),
        (environment.globals["strftime_now"], oracle.globals["strftime_now"]),
        (environment.globals["raise_exception"], oracle.globals["raise_exception"]),
    ):
        assert parameters(ours) == parameters(theirs)


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.default) for each in inspect.signature(function).parameters.values()]


EXPRESSIONS = [
    "x | tojson",
    "x | tojson(ensure_ascii=True)",
    "x | tojson(indent=2, sort_keys=True)",
    "x | tojson(separators=(',', ':'))",
    "strftime_now('%Y')",
    "dict(a=1) | tojson",
    "namespace(a=1).a",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_rendered_as_in_transformers(expression: str) -> None:
    from transformers.utils import chat_template_utils

    source = "{{ " + expression + " }}"
    value = {"b": "<é & '\u2028>", "a": [1, None, True]}
    oracle = chat_template_utils._compile_jinja_template(source)
    ours = make_environment().from_string(source)
    assert ours.render(x=value) == oracle.render(x=value)


def test_messages_reach_templates_as_in_transformers(twin: Twin) -> None:
    source = (
        "{{ documents is defined }}{{ tools is none }}"
        "{% for m in messages %}{{ m | tojson(sort_keys=True) }}{% endfor %}"
    )
    template = twin.template(source)
    for key in ("reasoning_content", "thinking", "reasoning"):
        # Rows of tables have all keys.
        message = {"role": "assistant", "content": "x", "tool_calls": None, "name": None, key: "y"}
        text = template.render([message]).text
        oracle = twin.expected({"messages": [message]}, has_marks=False)
        assert twin.tokenizer.encode(text).tolist() == oracle["input_ids"]
        assert "tool_calls" not in text
        assert '"reasoning_content": "y"' in text
