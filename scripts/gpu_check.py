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
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_run
import gpu_steps
from gpu_run import ROOT, Runner, Step, output_of

PHASES = ("build", "tests", "benchmarks", "again", "sanitizer", "curves")
_ASK_TORCH = """
import json, torch
gpu = torch.cuda.is_available()
print(json.dumps({
    "device": torch.cuda.get_device_name() if gpu else "none",
    "capability": list(torch.cuda.get_device_capability()) if gpu else [],
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": list(torch.cuda.nccl.version()) if gpu else None,
}))
"""
_PROBE = """
import torch
a = torch.ones(256, 256, device="cuda")
assert float((a @ a).sum()) == 256.0**3
"""
_CLOCKS = (
    "driver_version",
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("power.draw", "power.limit", "temperature.gpu"),
)


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
        "topology": output_of("nvidia-smi", "topo", "-m").splitlines(),
        "cores": os.cpu_count(),
        **asked,
    }


def _commit() -> str:
    named = ROOT / "COMMIT"  # in a bundle
    if os.environ.get("COMMIT") or not named.exists():
        return os.environ.get("COMMIT") or output_of("git", "rev-parse", "HEAD") or "unknown"
    return named.read_text().strip()


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
    record = gpu_run.Record(args.out, about)
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
    """Phases of a run, by value: see gpu_steps.ORDER.

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
            for step in gpu_steps.curve_steps(self.results):
                self.runner.run(self._shown(step, ("--device", "cpu", "--steps", "2")))

    def _build(self) -> bool:
        if self.args.fake_device:  # nothing is installed
            return True
        run = self.runner.run
        if not all(map(run, gpu_steps.requirement_steps())):
            return False
        wheel = gpu_steps.wheel_steps()
        has_wheel = bool(wheel) and all(map(run, wheel))
        if not has_wheel and not all(
            map(run, gpu_steps.build_steps(self.capability, self.args.build_s))
        ):
            return False
        return all(map(run, gpu_steps.kernel_steps(self.capability)))

    def _in_order(self, phases: Sequence[str]) -> None:
        tests = {step.name: step for step in gpu_steps.test_steps()}
        benchmarks = {step.name: step for step in gpu_steps.benchmark_steps(self.results)}
        trials = {step.name: step for step in gpu_steps.trial_steps(self.results)}
        named = {name for _, names in gpu_steps.ORDER for name in names}
        for phase, names in gpu_steps.ORDER:
            if ("tests" if phase == "trials" else phase) not in phases:
                continue
            if phase == "tests":
                self._test([tests[n] for n in names or tests.keys() - named if n in tests])
                continue
            for name in names:
                if self.steps_before.get(name) == "ok":
                    continue
                if phase == "trials":
                    fewer = ("--steps", "2") if name == "kernels_in_training" else ()
                    self.runner.run(self._shown(trials[name], ("--device", "cpu", *fewer)))
                else:
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
        for step, test in gpu_steps.again_steps(tests):
            self.runner.run_tests(step, [test])

    def _sanitize(self) -> None:
        record = self.runner.record
        if (program := gpu_steps.find_sanitizer()) is not None:
            for step in gpu_steps.sanitizer_steps(program):
                self.runner.run(step)
        else:
            record.say(f"== sanitizer: skipped, {gpu_steps.NO_SANITIZER}")
            record.add({"name": "sanitizer", "outcome": "skipped", "why": gpu_steps.NO_SANITIZER})

    def _shown(self, step: Step, more: Sequence[str]) -> Step:
        """A step as it runs without a GPU: its options are read, and what it imports is there."""
        return replace(step, command=[*step.command, *more]) if self.args.fake_device else step


if __name__ == "__main__":
    raise SystemExit(check(arguments()))
