"""Documents of records: a field of text, joined fields, conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacore.errors import DataError
from megatrain.data.chat import ChatTemplate, MarkedText, marked_pair

SETTING = "set data.field; --field of data prepare"
# The only pair whose completions usually begin with their own separator.
_PLAIN_PAIR = ("prompt", "completion")
_JOINT = "\n\n"
# Roles of the ShareGPT form by the names that its files use.
_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


@dataclass(frozen=True, kw_only=True)
class FieldForm:
    r"""Fields of a record that make its document.

    Attributes:
        names: One name: a field with text, or with the messages of a conversation. Several: those
            of the prompt and, last, the completion, which is learned. ``a.b`` is the field ``b``
            of the object ``a``.
        separator: Text after each field of the prompt.

    Example:
        >>> form = FieldForm.of("instruction,input,output")
        >>> form.document({"instruction": "Add", "input": "", "output": "4"}, None).text
        'Add\n\n4'
    """

    names: tuple[str, ...]
    separator: str

    @classmethod
    def of(cls, field: str, separator: str | None = None) -> FieldForm:
        """Read ``data.field``: names joined by commas.

        Args:
            field: The names.
            separator: Text after each field of a prompt. Default: an empty line; for
                ``prompt,completion`` nothing.

        Raises:
            DataError: For an empty name.
        """
        names = tuple(name.strip() for name in field.split(","))
        if not all(names):
            raise DataError(
                "the field must be one name, or several joined by commas, the last of the answer, "
                f'got "{field}"'
            )
        if separator is None:
            separator = "" if names == _PLAIN_PAIR else _JOINT
        return cls(names=names, separator=separator)

    def document(
        self, row: Mapping[str, Any], template: ChatTemplate | None, *, noun: str = "field"
    ) -> str | MarkedText:
        """Return the text of a record.

        Args:
            row: The record.
            template: Renders conversations.
            noun: ``"field"`` or ``"column"``, for messages.

        Raises:
            ValueError: For a missing field, a value of another type, or a conversation that cannot
                be rendered.
            DataError: For a conversation without a template.
        """
        values = [_lookup(row, name) for name in self.names]
        if isinstance(values[0], list) and len(values) == 1:
            kinds = {type(one).__name__ for one in values[0] if not isinstance(one, Mapping)}
            if kinds and template is None:
                raise ValueError(
                    f'the {noun} "{self.names[0]}" must be text or a conversation, a list of '
                    f"objects, got a list with {' and '.join(sorted(kinds))}"
                )
            return _conversation(values[0], row, template)
        # Only fields between the first and the last may be left empty: "input" of Alpaca.
        for number, (name, value) in enumerate(zip(self.names, values, strict=True)):
            if value is None and 0 < number < len(values) - 1:
                values[number] = ""
            elif not isinstance(value, str):
                raise ValueError(f'the {noun} "{name}" must be text, got {type(value).__name__}')
        if len(values) == 1:
            return str(values[0])
        prompt = "".join(value + self.separator for value in values[:-1] if value)
        return marked_pair(prompt, values[-1])


def column_of(name: str, columns: Sequence[str]) -> str | None:
    """Return the column of a table that holds a field, or ``None``."""
    parts = name.split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((head for head in heads if head in columns), None)


def _lookup(row: Mapping[str, Any], name: str) -> Any:
    """Return a field; a name with dots may lead through nested objects.

    Raises:
        ValueError: If there is no such field.
    """
    if name in row:
        return row[name]
    value: Any = row
    rest = name
    while isinstance(value, Mapping) and (head := column_of(rest, list(value))) is not None:
        value, rest = value[head], rest[len(head) + 1 :]
        if not rest:
            return value
    fields = ", ".join(_names(row)) or "none"
    raise ValueError(f'no field "{name}"; it has {fields} ({SETTING})')


def _names(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    names = []
    for name, value in row.items():
        inner = _names(value, f"{prefix}{name}.") if isinstance(value, Mapping) else []
        names += inner or [f"{prefix}{name}"]
    return names


def _conversation(
    messages: Sequence[Any], row: Mapping[str, Any], template: ChatTemplate | None
) -> MarkedText:
    template, is_old = needs_template(template), _is_sharegpt(messages)
    if is_old:
        messages = messages_of(messages)
        system = row.get("system")
        if isinstance(system, str) and system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
    return template.render(messages, tools_of(row) if is_old else row.get("tools"))


def needs_template(template: ChatTemplate | None) -> ChatTemplate:
    """Return the template of conversations.

    Raises:
        DataError: If there is none.
    """
    if template is None:
        raise DataError(
            "conversations need a chat template: set the tokenizer to a tokenizer.json with "
            "chat_template.jinja, or chat_template in tokenizer_config.json, beside it"
        )
    return template


def _is_sharegpt(messages: Sequence[Any]) -> bool:
    return any(isinstance(one, Mapping) and "from" in one for one in messages)


def messages_of(messages: Sequence[Any]) -> list[Any]:
    """Return messages with the keys that templates read.

    Raises:
        ValueError: For a message in the form of ShareGPT that lacks a key.
    """
    return [_with_role(one) for one in messages] if _is_sharegpt(messages) else list(messages)


def tools_of(row: Mapping[str, Any]) -> Any:
    """Return the tools of a record, which many files have as JSON text.

    Raises:
        ValueError: If they are text that is not JSON.
    """
    tools = row.get("tools")
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools) if tools.strip() else None
    except ValueError as error:
        raise ValueError(f'"tools" must be a list of objects or its JSON text: {error}') from error


def _with_role(message: Any) -> dict[str, Any]:
    """Rename the keys of a message in the form of ShareGPT."""
    if not isinstance(message, Mapping) or "from" not in message or "value" not in message:
        raise ValueError('every message must be an object with "from" and "value"')
    role = _ROLES.get(str(message["from"]))
    if role is None:
        known = ", ".join(_ROLES)
        raise ValueError(f'"from" of a message must be one of {known}, got "{message["from"]}"')
    rest = {key: value for key, value in message.items() if key not in {"from", "value"}}
    return {"role": role, "content": message["value"], **rest}
