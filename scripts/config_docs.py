#!/usr/bin/env python3
"""Print ``docs/configuration.md``, made from the configuration models.

Usage: ``scripts/config_docs.py > docs/configuration.md``
"""

from __future__ import annotations

from typing import get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from megacore.config import section_classes
from megacore.config.load import toml_value

HEAD = """\
# Configuration

A run is described by one TOML file. Every setting has a default, so a file names only what differs:

```toml
[model]
hidden_size = 256
num_layers = 8

[parallel]
tp = 2
pp = 2

[train]
steps = 200
global_batch_size = 64
```

Any setting can also be given on the command line, where it wins over the file; `-` and `_` are the
same:

```
megacore train demo.toml --nproc 4 --train.steps=20 --parallel.pp 1 --run.plain
```

`none` empties a setting, which gives it its derived default. The whole configuration is saved as
`config.toml` in the run's folder; it starts the same run again, or with other settings a similar
one: derived values stand in it as comments (`# etp = 2   (derived)`) and are derived anew.
`checkpoint.resume` is a comment as well, because it belongs to one start.

The data parallel size is not a setting: it is the number of processes divided by `tp * cp * pp`.

All mistakes are reported at once, each with its place and the nearest value that works:

```
megacore: 2 problems in the configuration:
  demo.toml:6: unknown key parallel.tpp; did you mean parallel.tp?
  --train.steps=0: train.steps = 0: must be at least 1
```

This page is made by `scripts/config_docs.py`; a test keeps it current.
"""


def document() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, cls in section_classes().items():
        parts.append(f"\n## [{name}]\n\n{_summary(cls.__doc__ or '')}\n\n")
        parts.append("| key | values | default | meaning |\n| --- | --- | --- | --- |\n")
        for key, info in cls.by_key().items():
            cells = (f"`{key}`", _values(info), _default(info), info.description or "")
            row = " | ".join(cell.replace("|", "\\|") for cell in cells)
            parts.append(f"| {row} |\n")
    return "".join(parts)


def _summary(text: str) -> str:
    sentence = text.strip().splitlines()[0].partition(": ")[2]
    return (sentence[0].upper() + sentence[1:]).replace("``", "`")


def _values(info: FieldInfo) -> str:
    """``int >= 1``, or the allowed words."""
    options = get_args(info.annotation)
    words = [
        word
        for option in (info.annotation, *options)
        for word in get_args(option)
        if isinstance(word, str)
    ]
    if words:
        return ", ".join(f'`"{word}"`' for word in words)
    kind = next(option for option in (*options, info.annotation) if isinstance(option, type))
    names = {str: "text", int: "integer", float: "number", bool: "true, false"}
    return names[kind] + "".join(_bound(rule) for rule in info.metadata)


def _bound(rule: object) -> str:
    match rule:
        case Ge(ge=bound):
            return f" ≥ {bound:g}"
        case Gt(gt=bound):
            return f" > {bound:g}"
        case Le(le=bound):
            return f", ≤ {bound:g}"
        case Lt(lt=bound):
            return f", < {bound:g}"
    return ""


def _default(info: FieldInfo) -> str:
    return "derived" if info.default is None else f"`{toml_value(info.default)}`"


if __name__ == "__main__":
    print(document(), end="")
