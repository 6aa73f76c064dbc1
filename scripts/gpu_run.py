"""Steps of gpu_check.py: commands with time limits, and the record of what they said."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_TELLING = ("FAILED", "ERROR", "SKIPPED")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command with a time limit.

    Attributes:
        name: What the record calls it.
        command: Program and arguments, run in the root of the sources.
        limit_s: Seconds after which it is stopped.
        env: Added to the environment.
        results: A folder whose JSON files become part of the record.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    results: Path | None = None


class Record:
    """What is known so far, on disk after every step.

    Args:
        folder: Where the two files go.
        about: Facts of the machine; ``device`` and ``date`` name the files.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower().replace("nvidia", "")).strip(
            "-"
        )
        name = f"{device}-{about['date']}"
        taken = {path.stem for path in folder.glob(f"{name}*.json")}
        if name in taken:
            name = next(f"{name}-{n}" for n in range(2, 1000) if f"{name}-{n}" not in taken)
        self.json, self.text = folder / f"{name}.json", folder / f"{name}.txt"
        self.events = folder / f"{name}.jsonl"
        self.text.write_text("")
        self.events.write_text("")
        self._data: dict[str, Any] = {**about, "steps": [], "benchmarks": {}, "tests": {}}
        self._lock = threading.RLock()  # a signal may come while it is held
        self._places = _places(folder)
        self.write()

    def set(self, **facts: Any) -> None:
        """Add facts."""
        with self._lock:
            self._data.update(facts)
        self.write()

    def say(self, line: str) -> None:
        """Print a line and keep it, without what only this machine knows."""
        line = scrub(line, self._places)
        with self._lock:
            print(line, flush=True)
            with self.text.open("a") as log:
                log.write(line + "\n")

    def event(self, step: str, event: dict[str, Any]) -> None:
        """Append a line for an event of a step; outcomes of tests go into the record too."""
        line = scrub(json.dumps({"step": step, **event}), self._places)
        with self._lock:
            with self.events.open("a") as file:
                file.write(line + "\n")
            if event.get("event") == "end":
                self._data["tests"][event["test"]] = event["outcome"]

    def failed_tests(self) -> list[str]:
        """Return the tests whose latest outcome is not good, in the order of their first run."""
        with self._lock:
            outcomes = self._data["tests"].items()
            return [test for test, outcome in outcomes if outcome not in ("passed", "skipped")]

    def add(self, step: dict[str, Any], results: Path | None = None) -> None:
        """Keep the outcome of a step and the JSON files it wrote."""
        found = {}
        for path in sorted(results.glob("*.json")) if results else ():
            try:
                found[path.stem] = json.loads(scrub(path.read_text(), self._places))
            except ValueError as error:  # cut off while it was written
                found[path.stem] = f"not readable: {error}"
        with self._lock:
            self._data["steps"].append(json.loads(scrub(json.dumps(step), self._places)))
            self._data["benchmarks"].update(found)
        self.write()

    def write(self) -> None:
        """Replace the file, so that a reader never sees half of it."""
        with self._lock:
            new = self.json.with_suffix(".json.new")
            new.write_text(json.dumps(self._data, indent=2) + "\n")
            new.replace(self.json)

    @property
    def is_good(self) -> bool:
        """Whether no step failed or was left out for lack of time, and no test failed at last."""
        tried = ("wheel", "import")  # compiled instead, if need be
        steps = [
            step
            for step in self._data["steps"]
            if not step.get("tests") and step["name"] not in tried
        ]
        good = all(step["outcome"] in ("ok", "skipped") for step in steps)
        return good and not self.failed_tests()


def scrub(text: str, places: Mapping[str, str]) -> str:
    """The text without paths of the machine.

    Example:
        >>> scrub("/home/me/src/a.py:3", {"/home/me/src/": "", "/home/me": "~"})
        'a.py:3'
    """
    for place, name in places.items():
        end = "" if place.endswith("/") else r"(?![\w-])"  # /tmp, but not the start of /tmpfs
        text = re.sub(re.escape(place) + end, name, text)
    return text


def _places(out: Path) -> dict[str, str]:
    """Folders of this machine and what they are called instead, the longest first."""
    known = {
        str(out.resolve()): "OUT",
        f"{ROOT}/": "",
        str(ROOT): ".",
        **{path: "<packages>" for path in sys.path if path.endswith("-packages")},
        sysconfig.get_paths()["stdlib"]: "<python>",
        sys.prefix: "<prefix>",
        sys.base_prefix: "<prefix>",
        tempfile.gettempdir(): "<tmp>",
        str(Path.home()): "~",
    }
    for name in ("CUTLASS_ROOT", "WHEELS", "CUDA_HOME"):
        if os.environ.get(name):
            known[str(Path(os.environ[name]).resolve())] = name
    names = {place: name for place, name in known.items() if len(place.strip("/")) > 1}
    return dict(sorted(names.items(), key=lambda item: -len(item[0])))


class Runner:
    """Runs steps, each until its own limit and none beyond the deadline.

    After a step that did not go well the device is probed. If it does not answer twice, nothing
    else is started.

    Args:
        record: Keeps what they say.
        budget_s: Seconds for all of them.
        probe: Command that succeeds if the device works; ``None`` where there is no device.
    """

    def __init__(self, record: Record, budget_s: float, probe: Sequence[str] | None = None) -> None:
        self.record = record
        self._probe = probe
        self._probing = threading.Lock()
        self._clock_samples = ClockSampler()
        self._deadline = time.monotonic() + budget_s
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._events: dict[str, list[dict[str, Any]]] = {}

    def run(self, step: Step, *, prefix: str = "") -> bool:
        """Run a step; returns whether it went well. ``prefix`` marks its lines."""
        record, start = self.record, time.monotonic()
        left = self._deadline - start
        limit = min(step.limit_s, left)
        if left < 5.0:
            record.say(f"== {step.name}: left out, the time is used up")
            record.add({"name": step.name, "outcome": "left out"})
            return False
        record.say(f"== {step.name}")
        code, lines, events, is_late = self._execute(step, limit, prefix)
        self._report_open_test(step.name, events, is_late)
        seconds = round(time.monotonic() - start, 1)
        outcome = "stopped" if is_late else "ok" if code == 0 else "failed"
        record.say(f"== {step.name}: {outcome} after {seconds} s")
        record.add(
            {
                "name": step.name,
                "outcome": outcome,
                "exit_code": code,
                "seconds": seconds,
                "limit_s": round(limit, 1),
                "last_line": next((line for line in reversed(lines) if line.strip()), ""),
                "told": [line for line in lines if line.startswith(_TELLING)][:50],
                "tests": sum(event.get("event") == "end" for event in events),
            },
            step.results,
        )
        if outcome != "ok":
            self._require_device()
        return outcome == "ok"

    def run_tests(self, step: Step, tests: Sequence[str], *, prefix: str = "") -> None:
        """Run a file of tests; after a fault or a hang, the rest of it in a new process.

        Args:
            step: The command without tests.
            tests: A file, or the tests of it that are to run.
            prefix: Marks the lines.
        """
        start, rest, name = time.monotonic(), list(tests), step.name
        for attempt in range(1, 1000):
            left = step.limit_s - (time.monotonic() - start)
            events = self.events_of(
                replace(step, name=name, command=[*step.command, *rest], limit_s=left), prefix
            )
            collected = next((e["tests"] for e in events if e.get("event") == "collected"), [])
            ended = {e["test"] for e in events if e.get("event") == "end"}
            rest = [test for test in collected if test not in ended]
            if not rest or not ended or self.is_over:
                break
            name = f"{step.name} ({attempt + 1})"
        if rest and collected:
            self.record.add({"name": f"{step.name}: rest", "outcome": "left out", "left": rest})

    def events_of(self, step: Step, prefix: str = "") -> list[dict[str, Any]]:
        """Run a step and return its events."""
        self._events[step.name] = []
        self.run(step, prefix=prefix)
        return self._events[step.name]

    @property
    def is_over(self) -> bool:
        """Whether nothing else can be started."""
        return self._deadline - time.monotonic() < 5.0

    def _report_open_test(self, name: str, events: list[dict[str, Any]], is_late: bool) -> None:
        """Report the end of a test that took its process with it."""
        started = [event["test"] for event in events if event.get("event") == "start"]
        ended = {event["test"] for event in events if event.get("event") == "end"}
        if started and started[-1] not in ended:
            outcome = "hung" if is_late else "crashed"
            event = {"event": "end", "test": started[-1], "outcome": outcome}
            events.append(event)
            self.record.event(name, event)
        self._events[name] = events

    def _require_device(self) -> None:
        """Probe the device twice; start nothing else if it does not answer."""
        with self._probing:
            if self._probe is None or self.is_over:
                return
            for _ in range(2):
                step = Step(name="probe", command=self._probe, limit_s=30.0)
                code, lines, _, is_late = self._execute(step, 30.0, "probe: ")
                if code == 0 and not is_late:
                    return
            self._deadline = time.monotonic()
            self.record.say("== the device does not answer any more")
            details = output_of("nvidia-smi", "-q") + output_of("dmesg")[-4000:]
            self.record.say(details)
            self.record.add({"name": "probe", "outcome": "failed", "last_line": lines[-1:]})

    def stop(self) -> None:
        """End everything that runs."""
        self._clock_samples.stop()
        for process in list(self._running.values()):
            _end(process, patience_s=0.0)

    def _execute(
        self, step: Step, limit_s: float, prefix: str
    ) -> tuple[int, list[str], list[dict[str, Any]], bool]:
        """Exit code, lines, events, and whether it had to be stopped."""
        lines: list[str] = []
        events: list[dict[str, Any]] = []
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **step.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._running[process.pid] = process

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                event = event_of(line)
                if event is None:
                    lines.append(line.rstrip("\n"))
                    self.record.say(prefix + lines[-1])
                    continue
                if event.get("event") == "row":  # clocks since the row before
                    event["clocks"] = self._clock_samples.take()
                events.append(event)
                self.record.event(step.name, event)

        # A daemon: what a stopped step left behind may keep the pipe open.
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            process.wait(limit_s)
            is_late = False
        except subprocess.TimeoutExpired:
            is_late = True
            _end(process, patience_s=5.0)
        reader.join(5.0)
        if not reader.is_alive():
            assert process.stdout is not None
            process.stdout.close()
        del self._running[process.pid]
        return process.poll() or 0, lines, events, is_late


def event_of(line: str) -> dict[str, Any] | None:
    """Return the event that a line of a step holds, or ``None``; pytest may write a dot before it.

    Example:
        >>> event_of('.@json {"event": "start"}')
        {'event': 'start'}
    """
    _, mark, text = line.partition("@json ")
    if not mark:
        return None
    try:
        event = json.loads(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


class ClockSampler:
    """Clock and power of the first GPU, sampled while benchmarks run."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        command = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms=200"]
        if program := shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(
                [program, "-i", "0", *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            threading.Thread(target=self._read, daemon=True).start()

    def take(self) -> dict[str, float]:
        """Return the medians since the last call; empty without samples."""
        samples, self._samples = self._samples, []
        if not samples:
            return {}
        middle = [sorted(values)[len(samples) // 2] for values in zip(*samples, strict=True)]
        return {"sm_mhz": middle[0], "watts": middle[1]}

    def stop(self) -> None:
        """End the sampling process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _read(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        for line in process.stdout:
            try:
                clock, power = (float(value) for value in line.split(","))
            except ValueError:
                continue
            self._samples.append((clock, power))


def _end(process: subprocess.Popen[str], *, patience_s: float) -> None:
    """End a process and everything it started, after ``patience_s`` without mercy."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(patience_s)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(5.0)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def output_of(*command: str) -> str:
    """What a command prints, stripped; nothing if it is missing or fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
