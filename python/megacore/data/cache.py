"""Folders that are built once per machine and then only read: prepared sources and indices."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megacore.errors import DataError
from megacore.files import describe_os_error, probe_folder


def cache_folder(setting: str | None) -> Path:
    """Return the folder for ``data.cache``, by default below the user's cache folder.

    Raises:
        DataError: If it cannot be written to.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megacore" / "data"
    folder = default if setting is None else Path(setting)
    try:
        probe_folder(folder)
    except OSError as error:
        raise DataError(
            f"the data cache {folder} cannot be written to: {describe_os_error(error)}; set "
            f"data.cache to a folder with room"
        ) from error
    return folder


def built_once(
    root: Path, kind: str, facts: Mapping[str, Any], build: Callable[[Path], None]
) -> Path:
    """Return the folder for ``facts``; the first process builds it while others wait.

    The lock is released by the system if the process dies, and another one continues. The folder
    has its final name only when it is complete.

    Args:
        root: The cache folder.
        kind: Beginning of the folder's name.
        facts: Everything that the contents depend on, as JSON values.
        build: Fills the given folder. After an interruption it gets the same folder again.

    Sync:
        Waits for a process that builds the same folder.
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    folder = root / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir(exist_ok=True)
        build(partial)
        (partial / "facts.json").write_text(text + "\n", encoding="utf-8")
        partial.rename(folder)
    return folder


def file_facts(path: Path) -> list[Any]:
    """Return path, size and time of change of a file, which identify its contents."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def remove_partial(folder: Path) -> None:
    """Remove what an interrupted build left, for a build that cannot resume."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
