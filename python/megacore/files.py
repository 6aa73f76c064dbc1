"""Early write check for output folders."""

from __future__ import annotations

import tempfile
from pathlib import Path


def probe_folder(folder: Path) -> None:
    """Create ``folder`` if it is missing, and check that a small temporary file can be written.

    Raises:
        OSError: If either fails. :func:`describe_os_error` formats the reason.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(0, "it is a file, not a folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe_") as file:
        file.write(b"x")
        file.flush()


def describe_os_error(error: OSError) -> str:
    """Format the reason of an ``OSError``, without numbers and file names.

    Example:
        >>> describe_os_error(OSError(28, "No space left on device", "x"))
        'No space left on device'
    """
    return error.strerror or str(error) or type(error).__name__
