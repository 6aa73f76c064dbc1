"""TOML files: reading with the line number of each key, writing with derived values as comments."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic.fields import FieldInfo

from megacore.errors import ConfigError
from megacore.suggest import closest_matches
from megatrain.config.base import split_key
from megatrain.config.sections import Config, section_classes

# The description of a model in the folder format of Hugging Face.
_HF_CONFIG = "config.json"


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
        if path.name == _HF_CONFIG:
            raise ConfigError(_explain_model(path.parent)) from None
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return data, {key: f"{path}:{line}" for key, line in key_lines(text).items()}


def _explain_model(folder: Path) -> str:
    return (
        f"{folder} is a model in the format of Hugging Face, not a TOML file; "
        f"megacore import-hf {folder} OUT makes OUT/config.toml"
    )


def _explain_unreadable(path: Path, error: OSError) -> str:
    if (path / _HF_CONFIG).is_file():
        return _explain_model(path)
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


# ---- writing -------------------------------------------------------------------------------------


def config_to_toml(config: Config) -> str:
    r"""Return the configuration as TOML, for a file that starts the same run again.

    Derived values are written as comments: a start with other settings, for example another
    ``run.dir``, derives them again. Other comments are ``checkpoint.resume``, which applies to one
    start only, and settings without a value, with their default.

    Example:
        >>> from megatrain.config import resolve
        >>> text = config_to_toml(resolve(Config(), 2, vocab_size=256, cuda=False))
        >>> print(next(part for part in text.split("\n\n") if part.startswith("[parallel]")))
        [parallel]
        tp = 1
        cp = 1
        pp = 1
        ep = 1
        # etp = 1   (derived)
        order = "tp-cp-ep-dp-pp"
        cp_comm = "allgather"
        sequence_parallel = false
    """
    parts = []
    values = config.model_dump(exclude_none=True)
    for section, cls in section_classes().items():
        table = table_of(values, section)
        lines = [
            _saved_line(config, f"{section}.{key}", table[key])
            if key in table
            else f"# {key} is not set: {_default_text(info)}"
            for key, info in cls.by_key().items()
        ]
        parts.append("\n".join([f"[{section}]", *lines]) + "\n")
    return "\n".join(parts)


def _saved_line(config: Config, key: str, value: Any) -> str:
    name = split_key(key)[1]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        # Tables, in one value so that the section goes on.
        line = f"{name} = [\n" + "".join(f"    {_inline_table(item)},\n" for item in value) + "]"
    else:
        line = f"{name} = {toml_value(value)}"
    if key in config.derived:
        return f"# {line}   (derived)"
    return f"# {line}   (of one start)" if key == "checkpoint.resume" else line


def _inline_table(table: Mapping[str, Any]) -> str:
    keys = (tomli_w.dumps({key: 0}).removesuffix(" = 0\n") for key in table)
    pairs = (
        f"{key} = {toml_value(value)}" for key, value in zip(keys, table.values(), strict=True)
    )
    return f"{{ {', '.join(pairs)} }}"


def _default_text(info: FieldInfo) -> str:
    """Return the meaning of an empty setting, from its description."""
    return (info.description or "").partition("Default: ")[2].rstrip(".").replace("`", "")


def toml_value(value: Any) -> str:
    """Return a value in TOML syntax, on one line.

    Example:
        >>> toml_value(["mlp", "norm"]), toml_value({"a": [True]})
        ('["mlp", "norm"]', '{ a = [true] }')
    """
    if isinstance(value, dict):
        return _inline_table(value) if value else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    try:
        return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")
    except TypeError:
        return repr(value)


def table_of(data: dict[str, Any], section: str) -> Any:
    """Return the table of a section in ``data``; create missing tables."""
    table: Any = data
    for name in section.split("."):
        if not isinstance(table, dict):
            return table
        table = table.setdefault(name, {})
    return table
