"""Error text for a path that does not exist, with the closest existing names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megacore.suggest import closest_matches


def missing_path(what: str, path: Path, *, names: Sequence[str] = ()) -> str:
    """Describe a missing ``path``, with the closest names or the contents of its folder.

    Args:
        what: Kind of the file, e.g. ``"data file"``.
        path: The missing path.
        names: Other possible values, e.g. ``("stdlib",)``.

    Returns:
        A sentence without a full stop, to which the caller may append.
    """
    if any(sign in path.name for sign in "*?["):
        return f"{what} {path} does not exist; patterns are not expanded here, give the folder"
    close = closest_matches(str(path), names, count=1)
    if close:
        return f"{what} {path} does not exist; did you mean {close[0]}?"
    folder = path.parent
    if not folder.is_dir():
        existing = next(parent for parent in path.absolute().parents if parent.is_dir())
        return f"{what} {path} does not exist, nor does its folder (only {existing} does)"
    present = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    close = closest_matches(path.name, present, count=3)
    if close:
        guesses = " or ".join(str(folder / name) for name in close)
        return f"{what} {path} does not exist; did you mean {guesses}?"
    shown = ", ".join(present[:6]) + (f", … ({len(present)} in all)" if present[6:] else "")
    holds = f"holds {shown}" if present else "is empty"
    return f"{what} {path} does not exist; {folder.absolute()} {holds}"
