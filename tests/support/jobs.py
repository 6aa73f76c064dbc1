"""Commands in the background whose output, exit code and leftovers a test looks at."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacore.calls.processes import process_state


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A finished job. A negative exit code is a signal."""

    code: int
    out: str
    err: str

    def complaints(self) -> list[str]:
        """The lines of megacore on standard error."""
        return [line for line in self.err.splitlines() if line.startswith("megacore: ")]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A process in a session of its own, so that a signal to its group reaches only its family."""

    pid: int
    folder: Path

    def finish(self, *, timeout_s: float = 30.0) -> Ended:
        """Wait for the end; a job that takes longer is killed and fails the test."""
        deadline = time.monotonic() + timeout_s
        while (ended := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"still running after {timeout_s} s; {self._text('err')}")
            time.sleep(0.01)
        code = os.waitstatus_to_exitcode(ended[1])
        return Ended(code=code, out=self._text("out"), err=self._text("err"))

    def _text(self, name: str) -> str:
        return (self.folder / f"{self.pid}.{name}").read_text()


def start_command(
    arguments: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None
) -> Job:
    """Start a program."""

    def replace() -> int:
        os.execvpe(arguments[0], arguments, {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})})

    return start_function(replace, folder)


def start_function(function: Callable[[], int], folder: Path) -> Job:
    """Fork this process, which has imported torch already, and call ``function`` there."""
    pid = os.fork()
    if pid:
        return Job(pid=pid, folder=folder)
    code = 111
    try:
        os.setsid()
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(folder / f"{os.getpid()}.{name}", os.O_CREAT | os.O_WRONLY)
            os.dup2(file, number)
        # pytest's handler would write to a duplicate of its own stderr.
        faulthandler.disable()
        # pytest has put its own objects in their place.
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        code = function()
    except Exception:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def pids_in(folder: Path) -> list[int]:
    """Process ids of the ranks, in order of rank."""
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


def wait_for_ranks(folder: Path, num_ranks: int) -> list[int]:
    """Until every rank has spoken to the others; returns their process ids."""
    deadline = time.monotonic() + 30
    while len(list(folder.glob("*.ready"))) < num_ranks:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.01)
    return pids_in(folder)


def assert_gone(pids: Sequence[int], *, within_s: float = 2.0) -> None:
    """No process of ``pids`` runs any more."""
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} are left"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    state = process_state(pid)
    return state is not None and state.code not in "ZX"
