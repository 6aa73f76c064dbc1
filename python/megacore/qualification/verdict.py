"""Verdicts on our kernels of a device: found in a child process once, then read from a file.

A verdict is valid for a device, its driver, torch, and a build of our kernels. Its file is
``$XDG_CACHE_HOME/megacore/kernels/<hash>.json``, by default in ``~/.cache``.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megacore import _ops
from megacore.calls.records import make_private
from megacore.ops.cuda_module import cuda_kernels, device_facts
from megacore.ops.kernel_choice import (
    MEASURED,
    PRODUCT_NAMES,
    linear_name,
    measured_for,
)
from megacore.qualification.cases import Sizes, linear_shape, operation_names
from megacore.qualification.child import Request
from megacore.qualification.compare import FASTER, SLOWER

# An operation that takes longer counts as one that does not end.
_LONGEST_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Faults of kernels, and times of kernels and of torch.

    Attributes:
        faults: Text by operation, as ``"differs at 7 x 8, heads of 4, bfloat16"``.
        times: Seconds by our kernel and by torch, by operation.
        label: Description of the sizes that were timed.
    """

    faults: Mapping[str, str]
    times: Mapping[str, tuple[float, float]]
    label: str = ""

    def slower(self) -> dict[str, str]:
        """Return the operations, with their reason, that torch computes in less time.

        Example:
            >>> name = "linear.float32.small.forward"
            >>> times = {"gelu": (3.0, 2.0), "swiglu": (2.1, 2.0), name: (2.0, 2.0)}
            >>> found = Verdict(faults={}, times=times, label="7 x 8").slower()
            >>> found["gelu"], found[name]
            ('1.5x slower at 7 x 8', '1.0x the time of torch')
        """
        found = {}
        for name, (ours, other) in self.times.items():
            if other == 0.0:
                continue
            if name in MEASURED:
                if ours > FASTER * other:
                    found[name] = f"{ours / other:.1f}x the time of torch"
            elif ours > SLOWER * other:
                found[name] = f"{ours / other:.1f}x slower at {self.label}"
        return found

    def narrow_factor(self, dtype: str, left: Collection[str] = ()) -> float:
        """Return the time of products of linear layers in a 16-bit dtype over that in float32.

        The passes of a layer count together, each by the faster of the two ways, but by torch for
        the names in ``left``, and of the sizes the one with the highest factor; products that are
        small or of few rows are left out. 0 if not measured.

        Example:
            >>> passes = "forward", "input_grad", "weight_grad"
            >>> times = {f"linear.float32.large.{name}": (1.0, 2.0) for name in passes}
            >>> times |= {f"linear.bfloat16.large.{name}": (0.25, 3.0) for name in passes}
            >>> verdict = Verdict(faults={}, times=times)
            >>> verdict.narrow_factor("bfloat16"), verdict.narrow_factor("bfloat16", times.keys())
            (1.0, 12.1)
        """
        factors = [0.0]
        for size in ("medium", "large"):
            wide = [linear_name("float32", size, product) for product in PRODUCT_NAMES]
            narrow = [linear_name(dtype, size, product) for product in PRODUCT_NAMES]
            if {*wide, *narrow} <= self.times.keys():
                seconds = sum(self.times[n][1] if n in left else min(self.times[n]) for n in narrow)
                work = (linear_shape(wide[0])[0] / linear_shape(narrow[0])[0]) ** 3
                factors.append(seconds * work / sum(min(self.times[name]) for name in wide))
        return round(max(factors), 1)


def find_verdict(
    device: torch.device,
    *,
    sizes: Sizes | None,
    dtype: torch.dtype,
    imports: Sequence[str] = (),
    folder: Path | None = None,
    again: bool = False,
) -> Verdict:
    """Return the verdict on the kernels of a device, from its file or by trying them.

    Processes of a host that need the same verdict find it one after another.

    Args:
        device: A CPU, for this number of threads, or a GPU that runs our kernels.
        sizes: Sizes of the run. On CPUs only products of linear layers and attention are timed, at
            sizes of their own.
        dtype: dtype of activations in the run.
        imports: As in `Request`.
        folder: Folder of the files. Default: in the user's cache, or a private one
            for temporary files.
        again: Try all, and replace the file.

    Raises:
        RuntimeError: If the child process does not start.

    Sync:
        Waits for a process that looks for the same verdict.
    """
    place = _Place.of(device, sizes, dtype, imports, folder)
    if not again and (found := place.read()) is not None:
        return found
    with _locked(place.path.with_suffix(".lock")):
        if not again and (found := place.read()) is not None:
            return found
        known = {"faults": {}, "times": {}} if again else _read(place.path)
        faults: dict[str, str] = known.get("faults", {})
        request = Request(
            device=str(device),
            threads=torch.get_num_threads(),
            dtype=str(dtype).removeprefix("torch."),
            sizes=sizes if device.type == "cuda" else None,
            compared=() if known and not again else operation_names(device.type),
            timed=tuple(name for name in place.timed if name not in faults),
            left=tuple(faults),
            imports=tuple(imports),
        )
        found = _try(request)
        faults |= found.faults
        times = known.get("times", {}) | ({place.key: found.times} if place.key else {})
        _write(place.path, {"facts": place.facts, "faults": faults, "times": times})
    return replace(found, faults=faults, label=place.label)


def known_verdict(
    device: torch.device, *, sizes: Sizes | None = None, dtype: torch.dtype = torch.float32
) -> Verdict | None:
    """Return the verdict of the file that `find_verdict` keeps; ``None`` if there is none yet."""
    return _Place.of(device, sizes, dtype, (), None).read()


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Place of a verdict: a file, and the key of the times in it; no key without times.

    Attributes:
        timed: Names of the operations that have times.
    """

    facts: Mapping[str, Any]
    path: Path
    key: str
    label: str
    timed: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        device: torch.device,
        sizes: Sizes | None,
        dtype: torch.dtype,
        imports: Sequence[str],
        folder: Path | None,
    ) -> _Place:
        facts = facts_of(device, imports)
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        path = (folder or _default_folder()) / f"{digest}.json"
        if device.type == "cpu":
            timed = measured_for(str(dtype).removeprefix("torch."))
            return cls(facts=facts, path=path, key=str(dtype), label="", timed=timed)
        if sizes is None:
            return cls(facts=facts, path=path, key="", label="")
        key = json.dumps([str(dtype), asdict(sizes)])
        timed = operation_names("cuda")
        return cls(facts=facts, path=path, key=key, label=sizes.text(), timed=timed)

    def read(self) -> Verdict | None:
        """Return the verdict, if the file has all of it."""
        known = _read(self.path)
        if not known or (self.key and self.key not in known["times"]):
            return None
        times = {name: (a, b) for name, (a, b) in known["times"].get(self.key, {}).items()}
        if not {*self.timed} <= times.keys() | known["faults"].keys():
            return None  # of another version
        return Verdict(faults=known["faults"], times=times, label=self.label)


def facts_of(device: torch.device, imports: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a verdict depends on."""
    facts: dict[str, Any] = {"torch": torch.__version__, "imports": list(imports)}
    if device.type == "cpu":
        return facts | {
            "device": _processor(),
            "threads": torch.get_num_threads(),
            "build": _digest(_ops.__file__),
        }
    properties, kernels = torch.cuda.get_device_properties(device), cuda_kernels()
    return facts | {
        "device": properties.name,
        "capability": list(device_facts(device).capability),
        "processors": properties.multi_processor_count,
        "driver": kernels.driver_version(),
        "cuda": kernels.runtime_version(),
        "build": _digest(str(kernels.__file__)),
    }


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


@functools.cache
def _processor() -> str:
    """Return name and model of the processor, with the instructions that torch uses."""
    wanted = ("model name", "cpu family", "model", "stepping", "CPU implementer", "CPU part")
    parts = [platform.machine()]
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
        rows = (line.partition(":") for line in first.splitlines())
        parts += [value.strip() for key, _, value in rows if key.strip() in wanted]
    return ", ".join([*parts, torch.backends.cpu.get_cpu_capability()])


# ---- the file ------------------------------------------------------------------------------------


def _default_folder() -> Path:
    """Return the user's cache, or a folder beside those of other users that none of them can use.

    Without either, the cache in which nothing can be kept.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = root / "megacore" / "kernels"
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
    shared = Path(tempfile.gettempdir()) / f"megacore-kernels-{os.geteuid()}"
    with suppress(OSError):
        make_private(shared)
        return shared
    return cache


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if {"faults", "times"} <= found.keys() else {}
    except (OSError, ValueError, AttributeError):
        return {}  # there is none, or it is damaged: it is made again


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file; without room for it, the next process tries again."""
    new = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock of the host inside ``with``; the system releases that of a process that dies."""
    try:
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- the child process ---------------------------------------------------------------------------


class _Trial:
    """What child processes have said about the operations of a request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._compared: set[str] = set()
        self._running = ""
        self.faults: dict[str, str] = {}
        self.times: dict[str, tuple[float, float]] = {}

    def note(self, event: Sequence[Any]) -> None:
        """Take an event of the child process."""
        kind, name, *values = event
        self._running = name if kind == "start" else ""
        if kind == "times":
            self.times[name] = (values[0], values[1])
        elif kind == "fault":
            self._compared.add(name)
            if values[0] is not None:
                self.faults[name] = values[0]

    def end(self, reason: str | None) -> None:
        """Blame the operation that was running for the end of a child process.

        Raises:
            RuntimeError: If none was, and the end was none.
        """
        if self._running:
            self.faults[self._running] = reason or "ends its process"
            self._running = ""
        elif reason is not None:
            raise RuntimeError(reason)

    def rest(self) -> Request:
        """Return the request for what was neither tried nor has ended a process."""
        return replace(
            self._request,
            compared=self._left_of(self._request.compared, self._compared),
            timed=self._left_of(self._request.timed, self.times.keys()),
            left=(*self._request.left, *self.faults),
        )

    def _left_of(self, names: Sequence[str], done: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in done and name not in self.faults)


def _try(request: Request) -> Verdict:
    """Run child processes until each operation was tried or has ended one."""
    trial = _Trial(request)
    while (rest := trial.rest()).compared or rest.timed:
        trial.end(_run_child(rest, trial.note))
        if trial.rest() == rest:
            raise RuntimeError("the process that tries kernels has said nothing")
    return Verdict(faults=trial.faults, times=trial.times)


def _run_child(request: Request, note: Callable[[Sequence[Any]], None]) -> str | None:
    """Run one child process; returns how it ended if not as it should."""
    command = [sys.executable, "-c", "from megacore.qualification.child import main; main()"]
    with (
        tempfile.TemporaryFile() as complaint,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaint
        ) as child,
    ):
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.write(request.to_json().encode())
            child.stdin.close()
        if not _read_events(child, note):
            child.kill()
            return f"does not end within {_LONGEST_S:g} s"
        code = child.wait()
        if code == 0:
            return None
        complaint.seek(0)
        lines = complaint.read().decode(errors="replace").strip().splitlines()
        if code < 0:
            return f"ends its process with signal {-code}"
        return f"ends its process ({lines[-1] if lines else f'exit code {code}'})"


def _read_events(child: subprocess.Popen[bytes], note: Callable[[Sequence[Any]], None]) -> bool:
    """Pass the events of a child on until it ends; returns whether it did in time."""
    assert child.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        deadline = time.monotonic() + _LONGEST_S
        while selector.select(max(0.0, deadline - time.monotonic())):
            read = os.read(child.stdout.fileno(), 1 << 16)
            if not read:
                return True
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                note(json.loads(line))
                deadline = time.monotonic() + _LONGEST_S
    return False
