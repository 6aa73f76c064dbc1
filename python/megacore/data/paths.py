"""One sentence about a path that does not exist, with the closest names that do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megacore.config import close_words


def missing_path(what: str, path: Path, *, names: Sequence[str] = ()) -> str:
    """Say that ``path`` does not exist and what its folder holds instead.

    Args:
        what: What was looked for, e.g. ``"data file"``.
        path: The path that is not there.
        names: Other things the user may have meant, e.g. ``("stdlib",)``.

    Returns:
        A sentence without a full stop, to be extended.
    """
    close = close_words(str(path), names, count=1)
    if close:
        return f"{what} {path} does not exist; did you mean {close[0]}?"
    folder = path.parent
    if not folder.is_dir():
        existing = next(parent for parent in path.absolute().parents if parent.is_dir())
        return f"{what} {path} does not exist, nor does its folder (only {existing} does)"
    present = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    close = close_words(path.name, present, count=3)
    if close:
        guesses = " or ".join(str(folder / name) for name in close)
        return f"{what} {path} does not exist; did you mean {guesses}?"
    shown = ", ".join(present[:6]) + (f", … ({len(present)} in all)" if present[6:] else "")
    holds = f"holds {shown}" if present else "is empty"
    return f"{what} {path} does not exist; {folder.absolute()} {holds}"
