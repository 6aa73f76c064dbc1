"""Construction of a `Config` from a TOML file and overrides; all errors are reported at once."""

from __future__ import annotations

import copy
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megacore.errors import ConfigError
from megacore.suggest import closest_matches, did_you_mean
from megatrain.config.base import Section, split_key
from megatrain.config.data import SourceConfig
from megatrain.config.other_names import ELSEWHERE, VALUES
from megatrain.config.sections import Config, section_classes
from megatrain.config.toml_file import read_toml, table_of, toml_value
from megatrain.config.user_objects import with_folder

Overrides = Sequence[tuple[str, str]]

FOLDER_OF_FILE = "{here}"  # at the start of a path in a TOML file

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def load_config(
    path: str | Path | None, overrides: Overrides = (), *, flags: Mapping[str, str] | None = None
) -> Config:
    """Read a TOML file, apply overrides, and check every section.

    Args:
        path: The file; ``None`` starts from the defaults. A path in it may start with ``{here}``,
            the folder of the file.
        overrides: Pairs such as ``("parallel.tp", "2")``; the text becomes the field's type,
            ``none`` empties an optional field. Later pairs win.
        flags: Keys set by another option, with its text, as ``{"run.nproc": "--nproc=2"}``, for
            messages.

    Raises:
        ConfigError: One error for all mistakes: unknown keys (with the closest known one), wrong
            types, values out of range, each with its place.

    Example:
        >>> load_config(None, [("parallel.tp", "2"), ("optimizer.lr", "1e-3")]).parallel.tp
        2
    """
    data, where = ({}, {}) if path is None else read_toml(Path(path))
    if path is not None:
        data = _replaced(data, FOLDER_OF_FILE, str(Path(path).parent))
    file = None if path is None else str(path)
    config = _configure(data, where, overrides, file=file, flags=flags or {})
    if path is not None:
        config = _with_folders(config, Path(path).parent)
    return config.with_origins(where)


def with_folder_of_file(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return settings for a TOML file in a folder, with the paths inside relative to the file.

    Example:
        >>> with_folder_of_file({"data": {"tokenizer": "/runs/x/tokenizer.json"}}, Path("/runs/x"))
        {'data': {'tokenizer': '{here}/tokenizer.json'}}
    """
    replaced: dict[str, Any] = _replaced(values, str(folder), FOLDER_OF_FILE)
    return replaced


def _replaced(values: Any, start: str, replacement: str) -> Any:
    """Replace the start of paths in settings."""
    if isinstance(values, dict):
        return {key: _replaced(value, start, replacement) for key, value in values.items()}
    if isinstance(values, list):
        return [_replaced(value, start, replacement) for value in values]
    if isinstance(values, str) and (values == start or values.startswith(f"{start}/")):
        return replacement + values.removeprefix(start)
    return values


def config_from_values(
    values: Mapping[str, Any], *, source: str, overrides: Overrides = ()
) -> Config:
    """Return a configuration from plain values, such as those stored in a checkpoint.

    Raises:
        ConfigError: As in `load_config`, with ``source`` instead of the file.

    Example:
        >>> config_from_values({"train": {"steps": 3}}, source="checkpoint x").train.steps
        3
    """
    data = copy.deepcopy(dict(values))
    where = {
        f"{section}.{key}": source
        for section, settings in data.items()
        if isinstance(settings, Mapping)
        for key in settings
    }
    return _configure(data, where, overrides, file=source).with_origins(where)


def _configure(
    data: dict[str, Any],
    where: dict[str, str],
    overrides: Overrides,
    *,
    file: str | None,
    flags: Mapping[str, str] = MappingProxyType({}),
) -> Config:
    """Apply overrides in place, and check all values.

    Args:
        data: Values by section and key.
        where: Places of values by full key.
        overrides: As in `load_config`.
        file: Place of values without a line.
        flags: As in `load_config`.

    Raises:
        ConfigError: One error for all mistakes.
    """
    problems = [
        _apply_override(data, where, key.replace("-", "_"), text) for key, text in overrides
    ]
    where |= flags
    places = _Places(where=where, file=file)
    found = [problem for problem in problems if problem is not None]
    try:
        config = Config.model_validate(data, strict=True)
    except ValidationError as error:
        found += [_describe(details, places) for details in error.errors()]
    if found:
        raise ConfigError(join_problems(found))
    return config


def _with_folders(config: Config, folder: Path) -> Config:
    """Add the folder of the configuration file to the names of objects whose module is there."""

    def found(name: str | None) -> str | None:
        return None if name is None else with_folder(name, folder)

    def located(sources: list[SourceConfig]) -> list[SourceConfig]:
        return [
            source.model_copy(update={"path": with_folder(source.path, folder)})
            if source.kind == "factory"
            else source
            for source in sources
        ]

    model, train, data, optimizer = config.model, config.train, config.data, config.optimizer
    own_data = {
        "factory": found(data.factory),
        "sources": located(data.sources),
        "validation": located(data.validation),
    }
    own_train = {
        "loss": found(train.loss),
        "callbacks": [with_folder(name, folder) for name in train.callbacks],
    }
    return config.model_copy(
        update={
            "model": model.model_copy(update={"factory": found(model.factory)}),
            "train": train.model_copy(update=own_train),
            "data": data.model_copy(update=own_data),
            "optimizer": optimizer.model_copy(update={"factory": found(optimizer.factory)}),
        }
    )


def split_overrides(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split ``--section.key=value`` and ``--section.key value`` from a command line.

    A switch without a value (``--run.plain``) means ``true``. Keys may use ``-`` or ``_``.

    Returns:
        The settings as pairs for `load_config`, and the other arguments.

    Raises:
        ConfigError: If a setting has no value.

    Example:
        >>> split_overrides(["x.toml", "--train.steps=20", "--run.plain", "--nproc", "2"])
        ([('train.steps', '20'), ('run.plain', 'true')], ['x.toml', '--nproc', '2'])
    """
    pairs: list[tuple[str, str]] = []
    others: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or "." not in name:
            others.append(argument)
            continue
        key = name[2:].replace("-", "_")
        if not equals:
            value = _next_value(key, rest)
        pairs.append((key, value))
    return pairs, others


def _next_value(key: str, rest: list[str]) -> str:
    annotation = _annotation(key)
    is_switch = annotation is bool or bool in typing.get_args(annotation)
    # A word after a switch is its value only if it can be; else it is the next argument.
    if rest and not rest[0].startswith("--") and (not is_switch or rest[0] in _ON + _OFF):
        return rest.pop(0)
    if is_switch:
        return "true"
    raise ConfigError(f"--{key} needs a value, as in --{key}=VALUE")


def join_problems(problems: Sequence[str]) -> str:
    """Return one sentence for one problem, a counted list for several."""
    if len(problems) == 1:
        return problems[0]
    lines = "".join(f"\n  {problem}" for problem in problems)
    return f"{len(problems)} problems in the configuration:{lines}"


# ---- overrides -----------------------------------------------------------------------------------


def _apply_override(data: dict[str, Any], where: dict[str, str], key: str, text: str) -> str | None:
    """Apply one override to ``data``; return an error message if the section is unknown."""
    flag = f"--{key}={text}"
    section, name = split_key(key)
    if typing.get_origin(_annotation(section)) is dict:
        table = table_of(data, section)
        if isinstance(table, dict):
            table[name] = _toml_or_text(text)
            where[key] = flag
        return None
    if not name or section not in section_classes():
        return f"{flag}: {_unknown_key(section, name)}"
    table = table_of(data, section)
    if isinstance(table, dict):
        table[name] = _typed(key, text)
        where[key] = flag
    return None


def _typed(key: str, text: str) -> Any:
    """Return ``text`` converted to the type of field ``key``, or unchanged if invalid."""
    annotation = _annotation(key)
    if annotation is None:
        return text
    is_list = typing.get_origin(annotation) is list
    if text.lower() in ("none", "null") and (is_list or NoneType in typing.get_args(annotation)):
        return [] if is_list else None
    if is_list:
        value = _toml_or_text(text)
        return value.split(",") if isinstance(value, str) and _is_list_of_names(key) else value
    try:
        return TypeAdapter[Any](annotation).validate_python(text)
    except ValidationError:
        return text


def _is_list_of_names(key: str) -> bool:
    annotation = _annotation(key)
    if typing.get_origin(annotation) is not list:
        return False
    [item] = typing.get_args(annotation)
    return item is str or typing.get_origin(item) is typing.Literal


def _toml_or_text(text: str) -> Any:
    """Return the value of TOML syntax, or the text if it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _annotation(key: str) -> Any:
    section, name = split_key(key)
    fields = section_classes().get(section, Section).by_key()
    return fields[name].annotation if name in fields else None


# ---- messages ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Places of keys: file lines and overrides."""

    where: Mapping[str, str]
    file: str | None

    def prefix(self, key: str) -> str:
        section = split_key(key)[0]
        place = self.where.get(key) or self.where.get(section) or self.file
        return f"{place}: " if place else ""

    def prefix_of_rule(self, section: str, sentence: str) -> str:
        """Return the place of a rule between settings of one section.

        This is the place of the overrides among the settings named in ``sentence``, else of the
        first named setting in the file.
        """
        classes = section_classes()
        inner = [f"{name}." for name in classes[section].inner_sections()]
        known = {
            prefix + key
            for prefix in ("", *inner)
            for key in classes[f"{section}.{prefix}".rstrip(".")].by_key()
        }
        named = [word for word in re.findall(r"\w+(?:\.\w+)?", sentence) if word in known]
        places = [self.where.get(f"{section}.{name}", "") for name in dict.fromkeys(named)]
        overrides = [place for place in places if place.startswith("--")]
        shown = " and ".join(overrides) or next(filter(None, places), "")
        return f"{shown}: " if shown else self.prefix(section)


_TYPES = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text in quotes",
    "list_type": "a list",
}


def _describe(details: ErrorDetails, places: _Places) -> str:
    """Return one line for one pydantic error: place, key and value, rule, nearest fix."""
    if any(isinstance(part, int) for part in details["loc"]):
        return _describe_item(details, places)
    key = ".".join(str(part) for part in details["loc"])
    section, name = split_key(key) if key not in section_classes() else (key, "")
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    prefix = places.prefix(key)
    if kind == "extra_forbidden":
        return prefix + _unknown_key(section, name)
    if kind == "value_error" and not name:
        sentence = str(context["error"])
        return f"{places.prefix_of_rule(section, sentence)}[{section}] {sentence}"
    if kind in ("model_type", "model_attributes_type"):
        return f"{prefix}[{section}] must be a table of settings, but it is {value!r}"
    shown = f"{prefix}{key} = {toml_value(value)}: "
    answer = VALUES.get(key, {}).get(str(value).lower())
    if kind == "literal_error" and answer:
        return f"{shown}expected one of {context['expected']}; {answer}"
    if kind == "list_type" and isinstance(value, str) and _is_list_of_names(key):
        names = [word.strip() for word in value.split(",") if word.strip() not in ("", "none")]
        return f"{shown}expected a list, as in {name} = {toml_value(names)}"
    return shown + _rule(details)


def _describe_item(details: ErrorDetails, places: _Places) -> str:
    """Return one line for an error in a list of names, or of tables as ``[[data.sources]]``."""
    section, key, number, *inner = details["loc"]
    table, kind = f"{section}.{key}", details["type"]
    if _is_list_of_names(table):
        place = f"{places.prefix(table)}{table}, entry {int(number) + 1}"
        return f"{place} = {toml_value(details['input'])}: {_rule(details)}"
    prefix = places.prefix(f"{table}.{inner[0]}" if inner else table)
    place = f"{prefix}[[{table}]] number {int(number) + 1}"
    if not inner and kind == "value_error":  # a rule between settings of the table
        return f"{place}: {details['ctx']['error']}"
    if not inner:
        return f"{place} must be a table of settings, but it is {details['input']!r}"
    if kind == "missing":
        return f"{place} has no {inner[0]}"
    if kind == "extra_forbidden":
        known = typing.get_args(_annotation(table))[0].by_key()
        return f"{place}: unknown key {inner[0]}" + (
            did_you_mean(str(inner[0]), list(known)) or f"; it has {', '.join(known)}"
        )
    return f"{place}: {inner[0]} = {toml_value(details['input'])}: {_rule(details)}"


def _rule(details: ErrorDetails) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind in _TYPES:
        return f"expected {_TYPES[kind]}"
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", str(context["expected"]))
        hint = did_you_mean(value, known) if isinstance(value, str) else ""
        return f"expected one of {context['expected']}{hint}"
    rules = {
        "greater_than_equal": "must be at least {ge:g}",
        "greater_than": "must be above {gt:g}",
        "less_than_equal": "must be at most {le:g}",
        "less_than": "must be below {lt:g}",
        "string_too_short": "must not be empty",
        "too_short": "must be a list of {min_length} or more",
        "value_error": "{error}",
    }
    return rules[kind].format(**context) if kind in rules else details["msg"]


def _unknown_key(section: str, name: str) -> str:
    """Return the message for an unknown section or key."""
    classes = section_classes()
    key = f"{section}.{name}"
    if name in ELSEWHERE:
        return f"unknown key {key}; did you mean {' or '.join(setting_homes(name))}?"
    if section not in classes:
        if homes := setting_homes(section):
            return f"{section} stands outside any section; did you mean {' or '.join(homes)}?"
        close = closest_matches(section, list(classes), count=1)
        if close:
            return f"unknown section [{section}]; did you mean [{close[0]}]?"
        return f"unknown section [{section}]; the sections are {', '.join(classes)}"
    if homes := setting_homes(name):
        return f"unknown key {section}.{name}; did you mean {' or '.join(homes)}?"
    close = closest_matches(name, list(classes[section].by_key()), count=1)
    if close:
        return f"unknown key {section}.{name}; did you mean {section}.{close[0]}?"
    known = ", ".join(classes[section].by_key())
    return f"unknown key {section}.{name}; [{section}] has {known}"


def setting_homes(name: str) -> list[str]:
    """Return the full keys of all settings called ``name``, elsewhere or here.

    Example:
        >>> setting_homes("lr"), setting_homes("train_iters")
        (['optimizer.lr'], ['train.steps'])
    """
    homes = [f"{home}.{name}" for home, cls in section_classes().items() if name in cls.by_key()]
    return [*ELSEWHERE.get(name, "").split(), *homes]
