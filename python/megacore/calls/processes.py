"""Identity and liveness of processes of one machine."""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Unique identity of a rank's process.

    Attributes:
        rank: Global rank.
        pid: Process id.
        host: Display name of the machine.
        space: Machine and process-id namespace; ``pid`` is comparable only if it is equal.
        start: Start time of the process in clock ticks since boot, which distinguishes reused ids.
    """

    rank: int
    pid: int
    host: str
    space: str
    start: int

    @staticmethod
    def mine(rank: int) -> Identity:
        """Get the identity of the calling process."""
        pid = os.getpid()
        state = process_state(pid)
        return Identity(
            rank=rank,
            pid=pid,
            host=socket.gethostname(),
            space=_process_space(),
            start=state.start if state else 0,
        )

    def to_json(self) -> str:
        """Serialize to JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Identity:
        """Parse the result of `to_json`."""
        return Identity(**json.loads(text))

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on host {self.host})"


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """State of a process from ``/proc``.

    Attributes:
        code: ``R`` running, ``S`` sleeping, ``T`` stopped, ``Z`` dead but not yet reaped, ...
        cpu_ticks: CPU time used so far.
        start: Start time in clock ticks since boot.
    """

    code: str
    cpu_ticks: int
    start: int


def process_state(pid: int) -> ProcessState | None:
    """Read the state of a process of this machine; ``None`` if it has ended or is unreadable."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may contain spaces; fields are numbered from 1 in proc(5).
    fields = text.rpartition(")")[2].split()
    return ProcessState(
        code=fields[0], cpu_ticks=int(fields[11]) + int(fields[12]), start=int(fields[19])
    )


def is_dead(identity: Identity) -> bool:
    """Check if the process has certainly ended; always false for a process of another machine."""
    if identity.space != _process_space() or not Path("/proc/self/stat").exists():
        return False
    state = process_state(identity.pid)
    return state is None or state.code in "ZX" or state.start != identity.start


def local_state(identity: Identity) -> ProcessState | None:
    """Read the state of a process; ``None`` if it has ended or runs on another machine."""
    if identity.space != _process_space() or is_dead(identity):
        return None
    return process_state(identity.pid)


def _process_space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def describe_exit(exitcode: int) -> str:
    """Describe the exit code of a process.

    Example:
        >>> describe_exit(-9)
        'killed by signal 9 (SIGKILL: by hand, or by the system when memory ran out)'
        >>> describe_exit(3)
        'ended with exit code 3 and no message'
    """
    if exitcode >= 0:
        return f"ended with exit code {exitcode} and no message"
    number = -exitcode
    name = signal_name(number)
    remark = ": by hand, or by the system when memory ran out" if name == "SIGKILL" else ""
    if not name.startswith("SIG"):
        return f"killed by {name}"
    return f"killed by signal {number} ({name}{remark})"


def signal_name(number: int) -> str:
    """Return the name of a signal.

    Example:
        >>> signal_name(15)
        'SIGTERM'
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
