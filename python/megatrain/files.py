"""Output folders, reading ahead, and unpickling of files of unknown origin."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

_Result = TypeVar("_Result")

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


def read_ahead(actions: Iterable[Callable[[], _Result]]) -> Iterator[_Result]:
    """Yield the results of actions; each runs in a thread while the result before it is used.

    Two actions never run at once, and the action after the next one starts when the caller asks
    for the next result. So two memories suffice for results.

    Example:
        >>> list(read_ahead([lambda: 1, lambda: 2]))
        [1, 2]
    """
    with ThreadPoolExecutor(1) as pool:
        pending: Future[_Result] | None = None
        for action in actions:
            following = pool.submit(action)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


@contextlib.contextmanager
def filled_folder(folder: Path) -> Iterator[None]:
    """Create a folder, or use an empty one; undo that if an exception or SIGTERM ends the context.

    Folders above it are removed again, too, if they were missing.

    Raises:
        OSError: If it cannot be created or holds files.
    """
    missing = list(itertools.takewhile(lambda each: not each.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(0, "it holds files already", str(folder))
        with _termination_as_exit():
            try:
                yield
            except BaseException:  # an interrupt too
                _empty(folder)
                raise
    except BaseException:
        for each in missing:
            with contextlib.suppress(OSError):  # not made, or another program has files there
                each.rmdir()
        raise


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Turn SIGTERM into ``SystemExit`` in the context, unless the caller handles the signal.

    Only the main thread can; elsewhere, SIGTERM ends the process as before.
    """

    def leave(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would end the cleaning
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
