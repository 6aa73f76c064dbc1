"""Builds, tests and measures on a machine with a GPU; gpu_check.sh says what and how.

Only Python's own library is used: what is missing on a machine is found out by a step, not here.
"""

from __future__ import annotations

import argparse
import datetime
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("build", "tests", "benchmarks", "again", "sanitizer", "curves")
REQUIREMENTS = (
    *("scikit-build-core", "pybind11", "ninja", "cmake", "numpy", "pydantic", "rich"),
    *("safetensors", "tomli-w", "pytest", "hypothesis"),
)
SMALL_CASES = "tests/gpu/test_small_cases.py"
NO_SANITIZER = (
    "compute-sanitizer is not installed here; it is part of the CUDA toolkit and of the wheel "
    "nvidia-cuda-sanitizer-api"
)
_TELLING = ("FAILED", "ERROR", "SKIPPED")
FOUND_ERRORS = 9  # exit code of compute-sanitizer, unlike any of pytest's
# Seconds for files of tests and for benchmarks, where it is not the usual limit.
LIMITS = {
    **{"bench_gpu_grouped_gemm": 110.0, "bench_gpu_tokens": 60.0, "bench_gpu_adamw": 25.0},
    **{"test_shared_gpu": 120.0, "test_graph_training": 150.0, "test_training": 120.0},
}
# Tests and benchmarks by value per second; those of a group run at a time. Files of tests that are
# not named run in the last group. Peers and clones run alone: they wait for one another.
ORDER = (
    ("tests", ("test_small_cases",)),
    (
        "tests",
        ("test_grouped_gemm", "test_token_kernels", "test_layer_kernels", "test_plan_kernel"),
    ),
    ("benchmarks", ("bench_gpu_grouped_gemm",)),
    ("benchmarks", ("bench_gpu_tokens",)),
    ("tests", ("test_peer_kernels",)),
    ("tests", ("test_clone_kernels",)),
    ("tests", ("test_shared_gpu",)),
    ("tests", ()),
    ("benchmarks", ("bench_graphs",)),
    ("benchmarks", ("bench_gpu_adamw",)),
)
# The shape that published figures are for: E=256, N=4096, K=6144.
ARGUMENTS = {
    "bench_gpu_grouped_gemm": ("--anchor", "--seconds", "100"),
    "bench_gpu_adamw": ("--numel", "100e6"),
}
_ASK_TORCH = """
import json, torch
gpu = torch.cuda.is_available()
print(json.dumps({
    "device": torch.cuda.get_device_name() if gpu else "none",
    "capability": list(torch.cuda.get_device_capability()) if gpu else [],
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
}))
"""
_PROBE = """
import torch
a = torch.ones(256, 256, device="cuda")
assert float((a @ a).sum()) == 256.0**3
"""
_HAS_KERNELS = """
import sys
from megacore.ops import cuda_kernels, has_cuda_kernels
archs = cuda_kernels().grouped_gemm_archs() if has_cuda_kernels() else []
sys.exit(0 if sys.argv[1] in archs else
         f"no grouped products for sm_{sys.argv[1]} in this build, which has {archs}: "
         "set CUTLASS_ROOT and build again")
"""
_ARCHS = {"9.0": "90a", "10.0": "100a"}
_PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index")
_CLOCKS = (
    "driver_version",
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("power.draw", "power.limit", "temperature.gpu"),
)


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


# ---- what there is to do ------------------------------------------------------------------------


def requirement_steps() -> list[Step]:
    """Install what is missing from the folder of wheels, if there is one."""
    wheels = wheel_folder()
    if wheels is None:
        return []
    command = [*_PIP, "--find-links", str(wheels), *REQUIREMENTS]
    return [Step(name="requirements", command=command, limit_s=60.0)]


def wheel_folder() -> Path | None:
    """The folder WHEELS, or the one of the bundle (``make gpu-bundle``)."""
    folder = Path(os.environ.get("WHEELS") or ROOT / "wheels").resolve()
    return folder if folder.is_dir() else None


def wheel_steps() -> list[Step]:
    """Install the wheel that was carried along and import it; empty without one."""
    folder = wheel_folder()
    wheels = sorted(folder.glob("megacore-*.whl")) if folder else []
    if not wheels:
        return []
    command = [*_PIP, "--no-deps", "--force-reinstall", str(wheels[-1])]
    imports = "import megacore._core, megacore._cuda"
    return [
        Step(name="wheel", command=command, limit_s=60.0),
        Step(name="import", command=[sys.executable, "-c", imports], limit_s=60.0),
    ]


def build_steps(capability: Sequence[int], limit_s: float) -> list[Step]:
    """Compile and install this."""
    settings = ["MEGACORE_CUDA=ON"]
    if arch := _arch(capability):
        settings.append(f"MEGACORE_CUDA_ARCHS={arch}")
    defines = [f"--config-settings=cmake.define.{setting}" for setting in settings]
    env = {}
    carried = ROOT / "cutlass"
    root = os.environ.get("CUTLASS_ROOT") or (str(carried) if carried.is_dir() else "")
    if root:  # the build runs elsewhere
        env["CUTLASS_ROOT"] = str(Path(root).resolve())
    command = [*_PIP, "--no-deps", "--no-build-isolation", *defines, "."]
    return [Step(name="build", command=command, limit_s=limit_s, env=env)]


def kernel_steps(capability: Sequence[int]) -> list[Step]:
    """Fail where the build has no grouped products for the device, though it could."""
    arch = _arch(capability)
    command = [sys.executable, "-c", _HAS_KERNELS, arch]
    return [Step(name="kernels", command=command, limit_s=60.0)] if arch else []


def _arch(capability: Sequence[int]) -> str:
    return _ARCHS.get(".".join(map(str, capability)), "")


def test_steps() -> list[Step]:
    """One step per file of tests, without the file; see `Runner.run_tests`."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    return [
        Step(name=file.stem, command=_tests_command(), limit_s=LIMITS.get(file.stem, 90.0))
        for file in files
    ]


def _tests_command() -> list[str]:
    plugin = ["-p", "scripts.gpu_outcomes", "-o", "faulthandler_timeout=70"]
    return [*_pytest(), *plugin]


def again_steps(tests: Sequence[str]) -> list[tuple[Step, str]]:
    """One process per test; warnings of another version of torch are no reason to fail then."""
    command = [*_tests_command(), "-W", "default"]
    return [
        (Step(name=f"again {number}", command=command, limit_s=60.0), test)
        for number, test in enumerate(tests, 1)
    ]


def _pytest(*arguments: str) -> list[str]:
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--durations=3"]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def find_sanitizer() -> str | None:
    """compute-sanitizer, from the path, a CUDA toolkit or the wheel nvidia-cuda-sanitizer-api."""
    if found := shutil.which("compute-sanitizer"):
        return found
    folders = [Path(path) for path in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if path]
    candidates = [folder / "bin" / "compute-sanitizer" for folder in folders]
    for path in dict.fromkeys(sys.path):
        candidates += sorted(Path(path or ".").glob("nvidia/*/bin/compute-sanitizer"))
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), None)


def sanitizer_steps(program: str) -> list[Step]:
    """Small cases of all kernels.

    racecheck looks at shared memory. It is no judge of CUTLASS's kernels, whose loads into shared
    memory are ordered by barriers in it.
    """
    steps = []
    for tool, selected in (("memcheck", "small"), ("racecheck", "small and not grouped")):
        options = ["--tool", tool, "--error-exitcode", str(FOUND_ERRORS), "--print-limit", "20"]
        steps.append(
            Step(
                name=tool,
                command=[program, *options, *_pytest(SMALL_CASES, "-k", selected)],
                limit_s=150.0,
                # Each tensor is memory of its own, so that a step over its end is seen.
                env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            )
        )
    return steps


def benchmark_steps(results: Path) -> list[Step]:
    """The benchmarks; each leaves its numbers in a folder as they come."""
    steps = []
    files = (ROOT / "benchmarks").glob("bench_gpu_*.py")
    for file in [*sorted(files), ROOT / "benchmarks" / "bench_graphs.py"]:
        folder = results / file.stem
        words = [str(file.relative_to(ROOT)), *ARGUMENTS.get(file.stem, ()), "--out", str(folder)]
        limit = LIMITS.get(file.stem, 75.0)
        command = [sys.executable, *words]
        env = {"MEGACORE_ROWS": "1"}
        steps.append(Step(name=file.stem, command=command, limit_s=limit, results=folder, env=env))
    return steps


def curve_steps(results: Path) -> list[Step]:
    """Losses of trainings in bf16 on the GPU: graphs against eager, and against the CPU."""
    folder = results / "curves"
    command = [sys.executable, "scripts/gpu_curves.py", "--out", str(folder)]
    return [Step(name="curves", command=command, limit_s=480.0, results=folder)]


# ---- facts --------------------------------------------------------------------------------------


def output_of(*command: str) -> str:
    """What a command prints, stripped; nothing if it is missing or fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def clocks() -> dict[str, str]:
    """Clocks, power and driver of the first GPU."""
    query = f"--query-gpu={','.join(_CLOCKS)}"
    line = output_of("nvidia-smi", query, "--format=csv,noheader").partition("\n")[0]
    values = [value.strip() for value in line.split(",")]
    return dict(zip(_CLOCKS, values, strict=True)) if len(values) == len(_CLOCKS) else {}


def facts() -> dict[str, Any]:
    """What a reader needs to judge the results."""
    try:
        asked = json.loads(output_of(sys.executable, "-c", _ASK_TORCH))
    except ValueError:
        asked = {"device": "none", "capability": [], "torch": None, "cuda": None}
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    release = re.search(r"release [\d.]+, V([\d.]+)", output_of(nvcc, "--version"))
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "python": sys.version.split()[0],
        "nvcc": release[1] if release else None,
        "cores": os.cpu_count(),
        **asked,
    }


def _commit() -> str:
    named = ROOT / "COMMIT"  # in a bundle
    if os.environ.get("COMMIT") or not named.exists():
        return os.environ.get("COMMIT") or output_of("git", "rev-parse", "HEAD") or "unknown"
    return named.read_text().strip()


# ---- all of it ----------------------------------------------------------------------------------


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Builds, tests, measures.")
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--sanitize", action="store_true", help="small cases, compute-sanitizer")
    parser.add_argument("--phases", default="build,tests,benchmarks,again", help="what to do")
    parser.add_argument("--again", type=Path, help="only what failed or was left out in a .json")
    parser.add_argument("--budget-s", type=float, default=520.0, help="seconds for all of it")
    parser.add_argument("--build-s", type=float, default=300.0, help="of them for the build")
    parser.add_argument("--jobs", type=int, default=4, help="files of tests at a time")
    parser.add_argument(
        "--fake-device", action="store_true", help="walk through all steps without a GPU"
    )
    args = parser.parse_args(given)
    args.phases = args.phases.split(",")
    if args.sanitize and "sanitizer" not in args.phases:
        args.phases.append("sanitizer")
    for phase in args.phases:
        if phase not in PHASES:
            parser.error(f"phase {phase!r} is unknown; use some of {', '.join(PHASES)}")
    return args


def check(args: argparse.Namespace) -> int:
    """Do what was asked for; 0 if all of it went well."""
    about = facts()
    if args.fake_device:
        about |= {"device": "fake device", "capability": [9, 0]}
    has_device = about["device"] != "none" and not args.fake_device
    record = Record(args.out, about)
    probe = [sys.executable, "-c", _PROBE] if has_device else None
    runner = Runner(record, args.budget_s, probe)

    def stop(number: int, _frame: Any) -> None:
        record.say(f"== stopped by signal {number}")
        runner.stop()
        os._exit(1)  # what is known lies on the disk already

    signal.signal(signal.SIGTERM, stop)
    record.say(json.dumps(about))
    record.set(clocks_at_the_start=clocks())
    _Check(args, about["capability"], runner).run()
    runner.stop()
    if about["device"] == "none":  # tests skip themselves then, which is no success
        record.add({"name": "device", "outcome": "failed", "why": "torch sees no GPU here"})
    record.set(clocks_at_the_end=clocks())
    record.say(f"== {'all went well' if record.is_good else 'not all went well'}")
    return 0 if record.is_good else 1


class _Check:
    """Phases of a run, by value: see ORDER.

    Args:
        args: The command line.
        capability: Of the device.
        runner: Runs the steps.
    """

    def __init__(self, args: argparse.Namespace, capability: Sequence[int], runner: Runner) -> None:
        self.args = args
        self.capability = capability
        self.runner = runner
        self.results = runner.record.json.with_suffix("")  # beside the record, in case of a kill
        before = json.loads(args.again.read_text()) if args.again else None
        self.tests_before = dict(before["tests"]) if before else None
        self.steps_before = (
            {step["name"]: step["outcome"] for step in before["steps"]} if before else {}
        )

    def run(self) -> None:
        """Run all phases that were asked for."""
        phases = self.args.phases
        record = self.runner.record
        if "build" in phases and not self._build():
            for phase in phases[phases.index("build") + 1 :]:
                record.say(f"== {phase}: left out, there is no build")
                record.add({"name": phase, "outcome": "left out"})
            return
        if self.tests_before is not None:
            bad = [
                t
                for t, outcome in self.tests_before.items()
                if outcome not in ("passed", "skipped")
            ]
            self._each_alone(bad)
        self._in_order(phases)
        if "sanitizer" in phases:
            self._sanitize()
        if "again" in phases:
            self._each_alone(record.failed_tests())
        if "curves" in phases:
            for step in curve_steps(self.results):
                self.runner.run(self._shown(step, ("--device", "cpu", "--steps", "2")))

    def _build(self) -> bool:
        if self.args.fake_device:  # nothing is installed
            return True
        run = self.runner.run
        if not all(map(run, requirement_steps())):
            return False
        wheel = wheel_steps()
        has_wheel = bool(wheel) and all(map(run, wheel))
        if not has_wheel and not all(map(run, build_steps(self.capability, self.args.build_s))):
            return False
        return all(map(run, kernel_steps(self.capability)))

    def _in_order(self, phases: Sequence[str]) -> None:
        tests = {step.name: step for step in test_steps()}
        benchmarks = {step.name: step for step in benchmark_steps(self.results)}
        named = {name for _, names in ORDER for name in names}
        for phase, names in ORDER:
            if phase not in phases:
                continue
            if phase == "tests":
                self._test([tests[n] for n in names or tests.keys() - named if n in tests])
                continue
            for name in names:
                if self.steps_before.get(name) != "ok":
                    self.runner.run(self._shown(benchmarks[name], ("--help",)))

    def _test(self, steps: Sequence[Step]) -> None:
        """Run files at a time; they share the GPU, but none of them measures anything."""
        if self.tests_before is not None:
            ran = {test.partition("::")[0] for test in self.tests_before}
            steps = [step for step in steps if f"tests/gpu/{step.name}.py" not in ran]

        def run(step: Step) -> None:
            self.runner.run_tests(step, [f"tests/gpu/{step.name}.py"], prefix=f"{step.name}: ")

        with ThreadPoolExecutor(self.args.jobs) as pool:
            list(pool.map(run, sorted(steps, key=lambda step: step.name)))

    def _each_alone(self, tests: Sequence[str]) -> None:
        for step, test in again_steps(tests):
            self.runner.run_tests(step, [test])

    def _sanitize(self) -> None:
        record = self.runner.record
        if (program := find_sanitizer()) is not None:
            for step in sanitizer_steps(program):
                self.runner.run(step)
        else:
            record.say(f"== sanitizer: skipped, {NO_SANITIZER}")
            record.add({"name": "sanitizer", "outcome": "skipped", "why": NO_SANITIZER})

    def _shown(self, step: Step, more: Sequence[str]) -> Step:
        """A step as it runs without a GPU: its options are read, and what it imports is there."""
        return replace(step, command=[*step.command, *more]) if self.args.fake_device else step


if __name__ == "__main__":
    raise SystemExit(check(arguments()))
