"""Pairs of a chosen and a rejected answer as texts, in the column forms of TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.chat import ChatTemplate
from megatrain.data.fields import messages_of, needs_template, tools_of

PAIR_COLUMNS = ("chosen", "rejected")


@dataclass(frozen=True, kw_only=True)
class PairText:
    """A pair of answers to one prompt.

    Attributes:
        prompt: The text before the answers.
        chosen: Prompt and the better answer.
        rejected: Prompt and the other answer.
        is_closed: Whether the texts have special tokens of their own, so that none are put around.
    """

    prompt: str
    chosen: str
    rejected: str
    is_closed: bool

    @property
    def length(self) -> int:
        """Number of characters."""
        return len(self.chosen) + len(self.rejected)


def pair_of(row: Mapping[str, Any], template: ChatTemplate | None) -> PairText:
    """Return the pair of a record with ``chosen``, ``rejected`` and maybe ``prompt``.

    Without ``prompt``, it is what both answers have in common at their beginning. Values are texts,
    or lists of messages, which the chat template renders.

    Raises:
        ValueError: For a missing or empty answer, a value of another type, or messages that cannot
            be rendered.
        DataError: For messages without a template.

    Example:
        >>> pair = pair_of({"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}, None)
        >>> pair.prompt, pair.rejected
        ('2 + 2 =', '2 + 2 = 5')
    """
    for name in PAIR_COLUMNS:
        if not row.get(name):
            given = ", ".join(key for key, value in row.items() if value) or "none"
            got = f"an empty {name}" if name in row else given
            raise ValueError(f'a pair must have both "chosen" and "rejected", got {got}')
    if row.get("chat_template_kwargs"):
        raise ValueError("chat_template_kwargs of a record are not supported; leave them out")
    values = {name: row.get(name) for name in ("prompt", *PAIR_COLUMNS)}
    kinds = {type(value) for value in values.values() if value is not None}
    if kinds == {str}:
        return _of_text(values["prompt"], row["chosen"], row["rejected"])
    if kinds != {list}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"the fields of a pair must all be text, or all lists of messages, got {names}"
        )
    return _of_messages(row, values, needs_template(template))


def _of_text(prompt: str | None, chosen: str, rejected: str) -> PairText:
    if prompt is None:
        end = common_length(chosen, rejected)
        # A space belongs to the word behind it.
        end -= end > 0 and chosen[end - 1] == " "
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    _check_differ(chosen, rejected)
    return PairText(
        prompt=prompt, chosen=prompt + chosen, rejected=prompt + rejected, is_closed=False
    )


def _of_messages(
    row: Mapping[str, Any], values: Mapping[str, Any], template: ChatTemplate
) -> PairText:
    given = {name: messages_of(value) for name, value in values.items() if value is not None}
    if "prompt" not in given:
        end = common_length(given["chosen"], given["rejected"])
        given = {
            "prompt": given["chosen"][:end],
            "chosen": given["chosen"][end:],
            "rejected": given["rejected"][end:],
        }
    _check_differ(given["chosen"], given["rejected"])
    tools = tools_of(row)
    prompt = given["prompt"]
    return PairText(
        prompt=template.text(prompt, tools, add_generation_prompt=True) if prompt else "",
        chosen=template.text([*prompt, *given["chosen"]], tools),
        rejected=template.text([*prompt, *given["rejected"]], tools),
        is_closed=True,
    )


def _check_differ(chosen: Sequence[Any], rejected: Sequence[Any]) -> None:
    if not chosen or not rejected or chosen == rejected:
        what = (
            "are equal" if chosen == rejected else "one of them is only the beginning of the other"
        )
        raise ValueError(f"the chosen and the rejected answer must differ, but {what}")


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many elements two sequences have in common at their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


def answer_start(
    prompt: NDArray[np.integer], chosen: NDArray[np.integer], rejected: NDArray[np.integer]
) -> int:
    """Return the first token of both answers: where the tokens first differ from the prompt's.

    A tokenizer may join the end of the prompt with the beginning of an answer.
    """
    ids = prompt.tolist()
    return min(common_length(ids, chosen.tolist()), common_length(ids, rejected.tolist()))
