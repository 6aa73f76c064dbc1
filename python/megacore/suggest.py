"""Suggestions for misspelled words."""

from __future__ import annotations

import re
from collections.abc import Sequence


def closest_matches(word: str, known: Sequence[str], *, count: int) -> list[str]:
    """Return the known words within a few edits of ``word``, best first.

    One edit is allowed per three letters. Leading dashes and an ending such as ``.toml`` do not
    count as letters. A word that is the larger part of a known one, such as ``layers`` of
    ``num_layers``, is close, too.

    Args:
        word: The misspelled word.
        known: Candidates.
        count: Maximum number of words to return.

    Example:
        >>> closest_matches("tarin", ["plan", "train"], count=1)
        ['train']
        >>> closest_matches("layers", ["num_layers", "num_heads"], count=1)
        ['num_layers']
        >>> closest_matches("adamW", ["adam", "adamw"], count=1)
        ['adamw']
        >>> closest_matches("nope.toml", ["demo.toml", "pyproject.toml"], count=3)
        []
    """
    scored = []
    for candidate in known:
        a, b = word.lower(), candidate.lower()
        distance = min(edit_distance(a, b), 1 if _is_larger_part(a, b) else len(a) + len(b))
        if distance <= _allowed_edits(a, b):
            scored.append((distance, a[:1] != b[:1], candidate))
    return [candidate for *_, candidate in sorted(scored)[:count]]


def nearest(word: str, known: Sequence[str], *, count: int) -> list[str]:
    """Return the known words with the fewest edits from ``word``, however many these are.

    A ``*`` in ``word`` stands for any letters, as in shell-style patterns.

    Example:
        >>> nearest("layer.*", ["head", "layers.0.attn", "layers.0.mlp"], count=2)
        ['layers.0.attn', 'layers.0.mlp']
    """
    return sorted(known, key=lambda candidate: edit_distance(word, candidate, star=True))[:count]


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return ``"; did you mean X?"`` if a known word is close, else ``""``.

    Example:
        >>> did_you_mean("tarin", ["train", "plan"])
        '; did you mean train?'
    """
    close = closest_matches(word, known, count=1)
    return f"; did you mean {close[0]}?" if close else ""


def _allowed_edits(a: str, b: str) -> int:
    letters = min(len(re.sub(r"^-+|(?<=.)\.\w+$", "", text)) for text in (a, b))
    return max(1, letters // 3) if letters > 1 else 0


def _is_larger_part(word: str, candidate: str) -> bool:
    parts = f"_{re.sub('[-.]', '_', candidate)}_"
    return f"_{word.replace('-', '_')}_" in parts and 2 * len(word) > len(candidate)


def edit_distance(first: str, second: str, *, star: bool = False) -> int:
    """Return the edit distance: insertions, deletions, changes and swaps of neighbours.

    Args:
        first: A word.
        second: Another one.
        star: A ``*`` of ``first`` stands for any letters of ``second``.

    Example:
        >>> edit_distance("tarin", "train"), edit_distance("ab", "abcd")
        (1, 2)
        >>> edit_distance("layer.*.mlp", "layers.12.mlp", star=True)
        1
    """
    above: list[int] = []
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        second_above, above, row = above, row, [row[0] if star and a == "*" else row[0] + 1]
        for j, b in enumerate(second, start=1):
            if star and a == "*":
                row.append(min(row[j - 1], above[j], above[j - 1]))
                continue
            best = min(row[j - 1] + 1, above[j] + 1, above[j - 1] + (a != b))
            if i > 1 and j > 1 and (a, b) == (second[j - 2], first[i - 2]):
                best = min(best, second_above[j - 2] + 1)
            row.append(best)
    return row[-1]
