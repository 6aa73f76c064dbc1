"""README of the package index: README.md with absolute links, for scikit-build-core."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?![a-z]+://|#)([^()\s]+)\)")


def dynamic_metadata(
    field: str, settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, str]:
    """Return the field ``readme``; called by scikit-build-core."""
    if field != "readme":
        raise ValueError(f"this gives the readme of the package, not its {field}")
    text = Path(settings.get("input", "README.md")).read_text(encoding="utf-8")
    address = project["urls"]["Source"]
    return {
        "content-type": "text/markdown",
        "text": with_absolute_links(text, address, f"v{project['version']}"),
    }


def with_absolute_links(text: str, address: str, tag: str) -> str:
    """Return a text whose links into the repository are those of a tag on GitHub.

    Example:
        >>> with_absolute_links("[a](docs/a.md#b) ![c](c.svg) [d](https://d)", "https://x/y", "v1")
        '[a](https://x/y/blob/v1/docs/a.md#b) ![c](https://x/y/raw/v1/c.svg) [d](https://d)'
    """

    def absolute(link: re.Match[str]) -> str:
        mark, shown, target = link.groups()
        kind = "raw" if mark else "blob"
        return f"{mark}[{shown}]({address}/{kind}/{tag}/{target})"

    return _LINK.sub(absolute, text)
