"""Conversations and pairs of prompt and completion as text with its answers marked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megacore.errors import DataError

# Noncharacters of Unicode, which no text may hold, around the output of {% generation %}.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class MarkedText:
    """Text of which only parts are learned.

    Attributes:
        text: The text.
        answers: Ranges of characters whose tokens count in the loss.
        is_closed: Whether the text has its own end, so that no end-of-document token follows.
    """

    text: str
    answers: Ranges
    is_closed: bool


def marked_pair(prompt: str, completion: str) -> MarkedText:
    """Join a prompt and its completion, which is learned.

    Example:
        >>> marked_pair("2+2=", "4").answers
        ((4, 5),)
    """
    text = prompt + completion
    return MarkedText(text=text, answers=((len(prompt), len(text)),), is_closed=False)


def template_files(tokenizer: str) -> list[Path]:
    """Return the files beside a tokenizer that its chat template is read from."""
    path = Path(tokenizer)
    folder = path if path.is_dir() else path.parent
    return [folder / name for name in _TEMPLATE_FILES if (folder / name).is_file()]


class ChatTemplate:
    """Chat template of a tokenizer, as ``transformers`` stores and renders it.

    Args:
        source: The jinja template.
        tokens: Special tokens by name, such as ``eos_token``.
        name: Path of the template, for messages.
    """

    def __init__(self, source: str, *, tokens: Mapping[str, str], name: str) -> None:
        # Imported here: jinja2 comes with torch, but only conversations need it.
        from jinja2 import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import CallBlock
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

            def _mark(self, caller: Any) -> str:
                return f"{_BEGIN}{caller()}{_END}"

        def fail(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = fail
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.name = name
        self._error = TemplateError
        self._tokens = dict(tokens)
        self._marks = re.search(r"\{%-?\s*generation\b", source) is not None
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DataError(f"the chat template {name} is not valid: {error}") from error

    @classmethod
    def of_tokenizer(cls, tokenizer: str) -> ChatTemplate | None:
        """Read the template beside a tokenizer; ``None`` without one.

        Raises:
            DataError: If it is not valid.
        """
        source, found, tokens = None, "", {}
        for path in reversed(template_files(tokenizer)):
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".jinja":
                source, found = text, str(path)
                continue
            try:
                config = json.loads(text)
                stored = config.get("chat_template")
            except (ValueError, AttributeError) as error:
                raise DataError(f"{path} is not a JSON object: {error}") from error
            tokens = {key: _token(value) for key, value in config.items() if key.endswith("_token")}
            if isinstance(stored, list):
                stored = {one["name"]: one["template"] for one in stored}.get("default")
            if stored is not None:
                source, found = stored, str(path)
        return None if source is None else cls(source, tokens=tokens, name=found)

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> MarkedText:
        """Render a conversation; messages of the role ``assistant`` are its answers.

        Answers are the text inside ``{% generation %}`` marks of the template. Without marks, they
        are the text that a message adds to the conversation before it, after the generation prompt.

        Args:
            messages: Objects with ``role`` and usually ``content``.
            tools: Descriptions of tools, for templates that take them.

        Raises:
            ValueError: For a conversation that cannot be rendered or has no answer.
        """
        if not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise ValueError('every message must be an object with a "role"')
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError('the conversation has no message of the role "assistant"')
        if self._marks:
            text, answers = _unmark(self._run(messages, tools))
        else:
            text, answers = self._compare(messages, tools)
        return MarkedText(text=text, answers=answers, is_closed=True)

    def _compare(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> tuple[str, Ranges]:
        text = self._run(messages, tools)
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._run(messages[:number], tools, add_generation_prompt=True)
            after = self._run(messages[: number + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"the chat template {self.name} renders message {number} differently alone "
                    f"and before others; mark its answers with {{% generation %}}"
                )
            answers.append((len(before), len(after)))
        return text, tuple(answers)

    def _run(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except (self._error, TypeError, ValueError) as error:
            raise ValueError(f"the chat template {self.name} fails: {error}") from error


def _unmark(marked: str) -> tuple[str, Ranges]:
    parts, answers, length, begin = [], [], 0, 0
    for part in re.split(f"([{_BEGIN}{_END}])", marked):
        if part == _BEGIN:
            begin = length
        elif part == _END:
            answers.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), tuple(answers)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Not jinja's filter, which escapes characters of HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _token(value: Any) -> str:
    return str(value.get("content", "") if isinstance(value, dict) else value or "")
