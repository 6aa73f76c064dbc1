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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("build", "tests", "sanitizer", "benchmarks")
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
# What a benchmark takes at most, in seconds.
BENCHMARK_LIMITS = {"bench_gpu_grouped_gemm": 140.0}
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
        self.text.write_text("")
        self._data: dict[str, Any] = {**about, "steps": [], "benchmarks": {}}
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
        """Whether no step failed or was left out for lack of time."""
        return all(step["outcome"] in ("ok", "skipped") for step in self._data["steps"])


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

    Args:
        record: Keeps what they say.
        budget_s: Seconds for all of them.
    """

    def __init__(self, record: Record, budget_s: float) -> None:
        self.record = record
        self._deadline = time.monotonic() + budget_s
        self._running: dict[int, subprocess.Popen[str]] = {}

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
        code, lines, is_late = self._execute(step, limit, prefix)
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
            },
            step.results,
        )
        return outcome == "ok"

    def stop(self) -> None:
        """End everything that runs."""
        for process in list(self._running.values()):
            _end(process, patience_s=0.0)

    def _execute(self, step: Step, limit_s: float, prefix: str) -> tuple[int, list[str], bool]:
        """Exit code, lines, and whether it had to be stopped."""
        lines: list[str] = []
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
                lines.append(line.rstrip("\n"))
                self.record.say(prefix + lines[-1])

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
        return process.poll() or 0, lines, is_late


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


def build_steps(capability: Sequence[int], limit_s: float) -> list[Step]:
    """Install what is missing, then this."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
    steps = []
    if wheels := os.environ.get("WHEELS"):
        command = [*pip, "--find-links", str(Path(wheels).resolve()), *REQUIREMENTS]
        steps.append(Step(name="requirements", command=command, limit_s=60.0))
    settings = ["MEGACORE_CUDA=ON"]
    if arch := {"9.0": "90a", "10.0": "100a"}.get(".".join(map(str, capability))):
        settings.append(f"MEGACORE_CUDA_ARCHS={arch}")
    defines = [f"--config-settings=cmake.define.{setting}" for setting in settings]
    env = {}
    if root := os.environ.get("CUTLASS_ROOT"):  # the build runs elsewhere
        env["CUTLASS_ROOT"] = str(Path(root).resolve())
    command = [*pip, "--no-deps", "--no-build-isolation", *defines, "."]
    return [*steps, Step(name="build", command=command, limit_s=limit_s, env=env)]


def test_steps() -> list[Step]:
    """One step per file of tests, so that one that hangs costs no more than its limit."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    return [
        Step(
            name=file.stem,
            command=[*_pytest(str(file.relative_to(ROOT))), "-o", "faulthandler_timeout=70"],
            limit_s=90.0,
        )
        for file in files
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
    """The benchmarks; each leaves its numbers in a folder."""
    steps = []
    files = (ROOT / "benchmarks").glob("bench_gpu_*.py")
    for file in [*sorted(files), ROOT / "benchmarks" / "bench_graphs.py"]:
        folder = results / file.stem
        folder.mkdir()
        command = [sys.executable, str(file.relative_to(ROOT)), "--out", str(folder)]
        limit = BENCHMARK_LIMITS.get(file.stem, 75.0)
        steps.append(Step(name=file.stem, command=command, limit_s=limit, results=folder))
    return steps


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
        "commit": os.environ.get("COMMIT") or output_of("git", "rev-parse", "HEAD") or "unknown",
        "python": sys.version.split()[0],
        "nvcc": release[1] if release else None,
        "cores": os.cpu_count(),
        **asked,
    }


# ---- all of it ----------------------------------------------------------------------------------


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Builds, tests, measures.")
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--sanitize", action="store_true", help="small cases, compute-sanitizer")
    parser.add_argument("--phases", default="build,tests,benchmarks", help="what to do, in order")
    parser.add_argument("--budget-s", type=float, default=520.0, help="seconds for all of it")
    parser.add_argument("--build-s", type=float, default=300.0, help="of them for the build")
    parser.add_argument("--jobs", type=int, default=4, help="files of tests at a time")
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
    record = Record(args.out, about)
    runner = Runner(record, args.budget_s)

    def stop(number: int, _frame: Any) -> None:
        record.say(f"== stopped by signal {number}")
        runner.stop()
        os._exit(1)  # what is known lies on the disk already

    signal.signal(signal.SIGTERM, stop)
    record.say(json.dumps(about))
    is_built = True
    with tempfile.TemporaryDirectory() as scratch:
        for phase in args.phases:
            record.set(**{f"clocks_before_{phase}": clocks()})
            if phase == "build":
                is_built = all(map(runner.run, build_steps(about["capability"], args.build_s)))
            elif is_built:
                _run_phase(phase, runner, args.jobs, Path(scratch))
            else:
                record.say(f"== {phase}: left out, there is no build")
                record.add({"name": phase, "outcome": "left out"})
    if about["device"] == "none":  # tests skip themselves then, which is no success
        record.add({"name": "device", "outcome": "failed", "why": "torch sees no GPU here"})
    record.set(clocks_at_the_end=clocks())
    record.say(f"== {'all went well' if record.is_good else 'not all went well'}")
    return 0 if record.is_good else 1


def _run_phase(phase: str, runner: Runner, jobs: int, scratch: Path) -> None:
    if phase == "tests":
        # Several at a time; they share the GPU, but none of them measures anything.
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda step: runner.run(step, prefix=f"{step.name}: "), test_steps()))
    elif phase == "benchmarks":
        for step in benchmark_steps(scratch):
            runner.run(step)
    elif (program := find_sanitizer()) is not None:
        for step in sanitizer_steps(program):
            runner.run(step)
    else:
        runner.record.say(f"== sanitizer: skipped, {NO_SANITIZER}")
        runner.record.add({"name": "sanitizer", "outcome": "skipped", "why": NO_SANITIZER})


if __name__ == "__main__":
    raise SystemExit(check(arguments()))
