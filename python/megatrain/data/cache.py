"""Folders that are built once per machine and then only read: prepared sources and indices."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megacore.errors import DataError
from megatrain.files import describe_os_error, probe_folder

# Version of the rules that make each kind of folder. Raise it with any change of their results:
# folders of other versions are not used.
RULES = MappingProxyType({"tokens": 1, "samples": 1, "blend": 1, "packing": 1})
# Read at the head, in the middle and at the end of a file, to identify its content.
_READ_BYTES = 1 << 16


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
        kind: A kind of `RULES`; beginning of the folder's name.
        facts: Everything that the contents depend on besides the rules, as JSON values.
        build: Fills the given folder. After an interruption it gets the same folder again.

    Sync:
        Waits for a process that builds the same folder.
    """
    text = json.dumps({**facts, "rules": RULES[kind]}, sort_keys=True, default=str)
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
    """Return path, size, time of change and a checksum of parts of a file.

    They identify its content, also after a copy that keeps size and time. The inode is not used:
    copies of a file on several hosts share what is made of them.
    """
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        checksum = 0
        for start in (0, (stat.st_size - _READ_BYTES) // 2, stat.st_size - _READ_BYTES):
            checksum = zlib.crc32(os.pread(file.fileno(), _READ_BYTES, max(0, start)), checksum)
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns, checksum]


def remove_partial(folder: Path) -> None:
    """Remove what an interrupted build left, for a build that cannot resume."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
