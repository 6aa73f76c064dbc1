"""Early write check for output folders, and unpickling of files of unknown origin."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

# They allocate memory by a number in the file.
_REFUSED_OPCODES = (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)


class PlainUnpickler(pickle._Unpickler):
    """Unpickler of plain values; a subclass may accept names in ``find_class``.

    It is the one in Python: the one in C allocates its memo for the largest index in the file, up
    to 64 GiB.
    """

    dispatch = {  # noqa: RUF012
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code not in {opcode[0] for opcode in _REFUSED_OPCODES}
    }

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every name."""
        raise pickle.UnpicklingError(f"it refers to {module!r}.{name!r}")


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
