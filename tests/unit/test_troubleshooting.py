"""The messages that docs/troubleshooting.md explains are messages of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


def texts_of_code() -> list[str]:
    """Return string constants; what an f-string inserts is an ellipsis."""
    found = []
    for path in sorted((ROOT / "python").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    for path in sorted((ROOT / "cpp" / "src").rglob("*.cc")):
        found += re.findall(r'"([^"\n]+)"', path.read_text())
    return found


def messages() -> list[str]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [message for row in rows for message in re.findall("`([^`]+)`", row.split(" | ")[0])]


TEXTS = texts_of_code()


def is_in_code(message: str) -> bool:
    """Check that every fixed part of a message is in some text of the code."""
    parts = [part.strip() for part in message.split("…")]
    return all(any(part in text for text in TEXTS) for part in parts if len(part) > 2)


@pytest.mark.parametrize("message", messages())
def test_a_message_exists(message: str) -> None:
    assert is_in_code(message)


def test_messages_are_found_on_the_page() -> None:
    assert len(messages()) > 20
    assert not is_in_code("rank … is on holiday")
