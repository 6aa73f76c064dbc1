"""Conversations and pairs of prompt and completion as text with its answers marked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.errors import DataError
from megatrain.data.special_tokens import BYTES, NAME_FILES, folder_of, token_names

if TYPE_CHECKING:
    from jinja2 import Environment, Template

# Noncharacters of Unicode, which no text may hold, around the output of {% generation %}.
_BEGIN, _END = "\ufdd0", "\ufdd1"
# The template without a name, others by name, and the place of both before these files.
_TEMPLATE_FILE, _NAMED_TEMPLATES, _CONFIG_FILE = (
    "chat_template.jinja",
    "additional_chat_templates",
    "tokenizer_config.json",
)
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
# Names of the reasoning in a message; templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")

_ROLE_RULE = 'every message must be an object with a "role"'

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class MarkedText:
    """Text of which only parts are learned.

    Attributes:
        text: The text.
        answers: Ranges of characters whose tokens count in the loss.
        is_closed: Whether the text has special tokens of its own, so that none are put around it.
        num_left_out: Answers that do not count, because the template renders them otherwise once
            other messages follow.
        num_unprompted: Answers that do not begin as the template prompts for them.
    """

    text: str
    answers: Ranges
    is_closed: bool
    num_left_out: int = 0
    num_unprompted: int = 0


def marked_pair(prompt: str, completion: str) -> MarkedText:
    """Join a prompt and its completion, which is learned.

    Example:
        >>> marked_pair("2+2=", "4").answers
        ((4, 5),)
    """
    text = prompt + completion
    return MarkedText(text=text, answers=((len(prompt), len(text)),), is_closed=False)


def template_files(tokenizer: str) -> list[Path]:
    """Return the files beside a tokenizer that conversations and special tokens depend on."""
    if tokenizer == BYTES:
        return []
    folder = folder_of(Path(tokenizer))
    names = [_TEMPLATE_FILE, *NAME_FILES]
    files = [folder / name for name in names if (folder / name).is_file()]
    return files + sorted((folder / _NAMED_TEMPLATES).glob("*.jinja"))


class ChatTemplate:
    """Chat template of a tokenizer, as ``transformers`` stores and renders it.

    Args:
        sources: The jinja templates by name. Conversations with tools are rendered by
            ``tool_use``, if there is one, all others by ``default``.
        tokens: Special tokens by name, such as ``eos_token``.
        name: Path of the template, for messages.

    Raises:
        DataError: If a template is not valid.
    """

    def __init__(self, sources: Mapping[str, str], *, tokens: Mapping[str, str], name: str) -> None:
        from jinja2 import TemplateError

        self.name = name
        self._tokens = dict(tokens)
        self._error = TemplateError
        environment = make_environment()
        try:
            self._templates = {
                key: _Compiled(environment, source) for key, source in sources.items()
            }
        except TemplateError as error:
            raise DataError(f"the chat template {name} is not valid: {error}") from error

    @classmethod
    def of_tokenizer(cls, tokenizer: str) -> ChatTemplate | None:
        """Read the templates beside a tokenizer; ``None`` without any.

        Raises:
            DataError: If one is not valid.
        """
        if tokenizer == BYTES:
            return None
        folder = folder_of(Path(tokenizer))
        files = {_DEFAULT: folder / _TEMPLATE_FILE} if (folder / _TEMPLATE_FILE).is_file() else {}
        files |= {path.stem: path for path in (folder / _NAMED_TEMPLATES).glob("*.jinja")}
        found = next(iter(files.values()), folder / _CONFIG_FILE)
        sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        sources = sources or _sources_of_config(folder / _CONFIG_FILE)
        if not sources:
            return None
        return cls(sources, tokens=token_names(folder), name=str(found))

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> MarkedText:
        """Render a conversation; messages of the role ``assistant`` are its answers.

        Answers are the text inside ``{% generation %}`` marks of the template. Without marks, they
        are the text that a message adds to the conversation before it, after the generation
        prompt. Some templates render an answer otherwise once other messages follow, e.g. without
        its reasoning; such an answer does not count, as it is never generated like that. One that
        does not begin with the generation prompt counts from where it differs from the prompt.

        Args:
            messages: Objects with ``role`` and usually ``content``.
            tools: Descriptions of tools, for templates that take them.

        Raises:
            ValueError: For a conversation that cannot be rendered or has no answer.
        """
        if not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise ValueError(_ROLE_RULE)
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise ValueError('"tools" must be a list of objects')
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError('the conversation has no message of the role "assistant"')
        messages = [_plain(message) for message in messages]
        if self._template_for(tools).has_marks:
            text, answers = _unmark(self._run(messages, tools))
            if not answers:
                raise ValueError(f"the chat template {self.name} marks no answer of it")
            return MarkedText(text=text, answers=answers, is_closed=True)
        return self._compare(messages, tools)

    def text(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render messages, without marks.

        Raises:
            ValueError: For messages that cannot be rendered.
        """
        if not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise ValueError(_ROLE_RULE)
        plain = [_plain(message) for message in messages]
        marked = self._run(plain, tools, add_generation_prompt=add_generation_prompt)
        return _unmark(marked)[0]

    def _compare(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> MarkedText:
        text = self._run(messages, tools)
        numbers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        answers, num_unprompted = [], 0
        for number in numbers:
            prompt = self._run(messages[:number], tools, add_generation_prompt=True)
            after = self._run(messages[: number + 1], tools)
            if not text.startswith(after):
                continue
            if not after.startswith(prompt):
                if not after.startswith(self._run(messages[:number], tools)):
                    continue
                num_unprompted += 1
            answers.append((_first_difference(prompt, after), len(after)))
        if not answers:
            raise ValueError(
                f"the chat template {self.name} renders no answer as it is generated; end the "
                "conversation with an answer, or mark answers in the template with "
                "{% generation %}"
            )
        return MarkedText(
            text=text,
            answers=tuple(answers),
            is_closed=True,
            num_left_out=len(numbers) - len(answers),
            num_unprompted=num_unprompted,
        )

    def _template_for(self, tools: Sequence[Any] | None) -> _Compiled:
        names = [_WITH_TOOLS] * (tools is not None) + [_DEFAULT]
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise ValueError(
            f'the chat template {self.name} must have one with the name "{_DEFAULT}", got '
            f"{', '.join(self._templates)}"
        )

    def _run(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            return self._template_for(tools).template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except (self._error, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"the chat template {self.name} fails: {error}") from error


class _Compiled:
    """One jinja template."""

    def __init__(self, environment: Environment, source: str) -> None:
        self.template: Template = environment.from_string(source)
        self.has_marks = re.search(r"\{%-?\s*generation\b", source) is not None


def make_environment() -> Environment:
    """Return an environment of jinja with what ``transformers`` adds for chat templates."""
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
    environment.globals["strftime_now"] = _format_now
    return environment


def _format_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja's filter, which escapes characters of HTML.
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates get it: without empty entries, its reasoning by one name."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in _REASONING if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _sources_of_config(path: Path) -> dict[str, str]:
    """Return the templates of a ``tokenizer_config.json``: one, or a list of named ones."""
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is not a JSON object: {error}") from error
    if isinstance(stored, list):
        return {one["name"]: one["template"] for one in stored}
    if isinstance(stored, dict):
        return stored
    return {} if stored is None else {_DEFAULT: stored}


def _first_difference(prompt: str, text: str) -> int:
    """Return the number of characters that two texts have in common at their beginning."""
    pairs = enumerate(zip(prompt, text, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(prompt), len(text)))


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
