"""TOML files with the line number of each key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from megacore.config.words import closest_matches
from megacore.errors import ConfigError


def read_toml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the contents of a TOML file, and the file and line of every key.

    Raises:
        ConfigError: If the file is missing (with close names), unreadable or not valid TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except OSError as error:
        raise ConfigError(_explain_unreadable(path, error)) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8; expected a TOML file") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return data, {key: f"{path}:{line}" for key, line in key_lines(text).items()}


def _explain_unreadable(path: Path, error: OSError) -> str:
    if path.is_dir():
        return f"{path} is a folder, not a TOML file{_list_toml(path)}"
    if isinstance(error, FileNotFoundError):
        parent = path.parent
        if not parent.is_dir():
            return f"no such file: {path}: the folder {parent} does not exist"
        names = [entry.name for entry in parent.iterdir() if entry.is_file()]
        close = closest_matches(path.name, names, count=3)
        if close:
            best = " or ".join(str(parent / name) for name in close)
            return f"no such file: {path}; did you mean {best}?"
        return f"no such file: {path}{_list_toml(parent)}"
    return f"cannot read {path}: {error.strerror}"


def _list_toml(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.glob("*.toml"))
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"; {folder} holds {shown}" if names else f"; {folder} holds no .toml file"


def key_lines(text: str) -> dict[str, int]:
    r"""Return the line number (from 1) of each ``section.key`` and ``section`` of TOML text.

    Example:
        >>> key_lines("[parallel]\ntp = 2\n")
        {'parallel': 1, 'parallel.tp': 2}
    """
    lines: dict[str, int] = {}
    section = ""
    open_quote = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if open_quote:
            if open_quote in line:
                open_quote = ""
            continue
        if header := re.match(r"\s*\[{1,2}\s*([^\[\]]+?)\s*\]", line):
            section = _plain_key(header[1])
            lines.setdefault(section, number)
        elif pair := re.match(r"\s*([\w\"'. -]+?)\s*=(.*)", line):
            key = _plain_key(pair[1])
            lines.setdefault(f"{section}.{key}" if section else key, number)
            for quote in ('"""', "'''"):
                if pair[2].count(quote) == 1:
                    open_quote = quote
    return lines


def _plain_key(text: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in text.split("."))
