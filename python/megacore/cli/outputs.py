"""Files that commands write where an option says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from megacore.errors import ConfigError


def require_folder(file: str | None) -> None:
    """Refuse a file that cannot be written, before the work whose result it gets.

    Args:
        file: What the option says; ``None`` if it was not given.

    Raises:
        ConfigError: If its folder does not exist, or the file is a folder itself.
    """
    if file is None:
        return
    path = Path(file)
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {file}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"cannot write {file}: it is a folder; name a file in it")


def write_output(file: str | None, write: Callable[[Path], object]) -> None:
    """Let ``write`` make the file, if there is one to make, and say so.

    Raises:
        ConfigError: If it cannot be written.
    """
    if file is None:
        return
    try:
        write(Path(file))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    print(f"wrote {file}", file=sys.stderr)
