"""Print all public names of megacore and megatrain with their signatures.

The list is ``tests/golden/public_api.txt``; a change of it is a change for users:

    python scripts/public_api.py > tests/golden/public_api.txt
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator

import megacore
import megatrain


def public_api() -> Iterator[str]:
    """Yield one line per public name of every package, in a fixed order."""
    names = [f"megacore.{name}" for name in megacore.__all__]
    names += [f"megatrain.{name}" for name in megatrain.__all__]
    for package in sorted(names):
        if package == "megatrain.cli" or package.endswith("__"):
            continue
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None)
        if names is None:  # what is defined there
            names = [
                name
                for name, value in vars(module).items()
                if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
            ]
        yield package
        for name in sorted(names):
            yield from _lines(name, getattr(module, name))
        yield ""


def _lines(name: str, value: object) -> Iterator[str]:
    if inspect.isclass(value):
        yield from _class_lines(name, value)
    elif callable(value):
        yield f"  {name}{_signature(value)}"
    else:
        yield f"  {name}: {type(value).__name__}"


def _class_lines(name: str, value: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    if issubclass(value, enum.Enum):
        yield f"  class {name}({bases}): {', '.join(member.name for member in value)}"
        return
    native = value.__module__ == "megacore._core"
    if hasattr(value, "model_fields"):  # a section; docs/configuration.md describes its settings
        yield f"  class {name}({bases}): {', '.join(value.model_fields)}"
    else:
        has_own = not native and "Protocol" not in bases
        yield f"  class {name}{f'({bases})' if bases else ''}{_signature(value) if has_own else ''}"
    fields = {field.name for field in dataclasses.fields(value)} if _is_data(value) else set()
    for member, raw in sorted(vars(value).items()):
        if member.startswith("_") or member in fields or hasattr(value, "model_fields"):
            continue
        if isinstance(raw, staticmethod | classmethod):
            raw = raw.__func__
        is_value = isinstance(raw, property) or not callable(raw)
        shown = "" if is_value or native else _signature(raw)
        yield f"    .{member}{shown}{'' if is_value or not native else '()'}"


def _is_data(value: type) -> bool:
    return dataclasses.is_dataclass(value)


def _signature(value: object) -> str:
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    # Defaults that are objects show their address, and types their version of Python or torch.
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(
        r"(typing|collections\.abc|torch|megacore|megatrain)\.(\w+\.)*", "", text
    ).replace("'", "")


if __name__ == "__main__":
    print("\n".join(public_api()).rstrip())
