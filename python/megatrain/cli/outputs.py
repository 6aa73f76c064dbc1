"""Output of commands: files and tables."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megacore.pipeline import Costs, Schedule


def require_folder(file: str | None) -> None:
    """Check that an output file can be written, before the work that produces it.

    Args:
        file: Value of the option; ``None`` if it was not given.

    Raises:
        ConfigError: If the folder of the file does not exist, or the file is a folder.
    """
    if file is None:
        return
    path = Path(file)
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {file}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"cannot write {file}: it is a folder; name a file in it")


def write_pictures(args: argparse.Namespace, schedule: Schedule, costs: Costs) -> None:
    """Write what ``--svg`` and ``--trace`` ask for: a schedule as simulated."""
    from megatrain.view import schedule_svg, simulated_trace

    write_output(args.svg, lambda path: path.write_text(schedule_svg(schedule, costs=costs)))
    write_output(
        args.trace, lambda path: path.write_text(json.dumps(simulated_trace(schedule, costs=costs)))
    )


def terminal(*, least: int) -> Console:
    """Return a console as wide as the terminal, or 120 characters where there is none.

    Args:
        least: Smallest width, in characters.
    """
    from rich.console import Console

    width = max(shutil.get_terminal_size((120, 24)).columns, least)
    return Console(highlight=False, width=width)


def plain_table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return a table without lines, for columns of text and then of numbers.

    Args:
        left: Names of the columns that are aligned left.
        right: Names of those that are aligned right.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def write_output(file: str | None, write: Callable[[Path], object]) -> None:
    """Call ``write`` with the output path, if there is one, and report it.

    Raises:
        ConfigError: If the file cannot be written.
    """
    if file is None:
        return
    try:
        write(Path(file))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    print(f"wrote {file}", file=sys.stderr)
