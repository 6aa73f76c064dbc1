"""The script for machines with a GPU, without one: what it records of steps, and when."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ABOUT = {"device": "NVIDIA H200", "date": "2030-01-02", "capability": [9, 0]}


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    path = ROOT / "scripts" / "gpu_check.py"
    sys.path.insert(0, str(path.parent))  # as for a script, whose folder it is
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def step(gpu_check: ModuleType, code: str, **changes: Any) -> Any:
    settings = {"name": "a", "command": [sys.executable, "-c", code], "limit_s": 60.0, **changes}
    return gpu_check.gpu_run.Step(**settings)


def read(record: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(record.json.read_text())
    return found


def test_a_step_is_on_disk_when_it_ends(gpu_check: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "numbers"
    results.mkdir()
    record = gpu_check.gpu_run.Record(tmp_path / "out", ABOUT)
    runner = gpu_check.gpu_run.Runner(record, 1000.0)
    code = (
        f"import pathlib; pathlib.Path({str(results)!r}, 'bench.json').write_text('[1.5]');"
        f"print('in', {str(ROOT / 'benchmarks')!r}); print('FAILED one'); print('1 passed')"
    )
    assert runner.run(step(gpu_check, code, results=results))
    found = read(record)
    assert record.json.name == "h200-2030-01-02.json"
    (told,) = found["steps"]
    assert told["outcome"] == "ok"
    assert told["last_line"] == "1 passed"
    assert told["told"] == ["FAILED one"]
    assert found["benchmarks"] == {"bench": [1.5]}
    text = record.text.read_text()
    assert "in benchmarks" in text
    assert str(ROOT) not in text + record.json.read_text()
    assert not runner.run(step(gpu_check, "raise SystemExit(3)"))
    assert [each["exit_code"] for each in read(record)["steps"]] == [0, 3]
    assert not record.is_good


def test_results_of_a_day_are_not_overwritten(gpu_check: ModuleType, tmp_path: Path) -> None:
    names = [gpu_check.gpu_run.Record(tmp_path, ABOUT).json.stem for _ in range(3)]
    assert names == ["h200-2030-01-02", "h200-2030-01-02-2", "h200-2030-01-02-3"]


def test_a_step_that_hangs_is_stopped(gpu_check: ModuleType, tmp_path: Path) -> None:
    record = gpu_check.gpu_run.Record(tmp_path, ABOUT)
    runner = gpu_check.gpu_run.Runner(record, 1000.0)
    assert not runner.run(step(gpu_check, "import time; time.sleep(600)", limit_s=0.2))
    (told,) = read(record)["steps"]
    assert told["outcome"] == "stopped"
    assert told["exit_code"] == -signal.SIGTERM


def test_what_a_step_started_ends_with_it(gpu_check: ModuleType, tmp_path: Path) -> None:
    record = gpu_check.gpu_run.Record(tmp_path, ABOUT)
    runner = gpu_check.gpu_run.Runner(record, 1000.0)
    # It does not listen to a polite word, and neither does its child. Each line is one write: two
    # processes that write at once do not mix theirs.
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = os.fork(); os.write(1, b'child %d\\n' % (child or os.getpid())); time.sleep(600)"
    )
    thread = threading.Thread(target=runner.run, args=[step(gpu_check, code)])
    thread.start()
    assert _comes_true(lambda: record.text.read_text().count("child ") == 2)
    runner.stop()
    thread.join(60.0)
    (told,) = read(record)["steps"]
    assert told["exit_code"] == -signal.SIGKILL
    child = int(record.text.read_text().partition("child ")[2].split()[0])
    assert _comes_true(lambda: _is_gone(child))


def _comes_true(is_so: Callable[[], bool]) -> bool:
    for _ in range(1200):
        if is_so():
            return True
        time.sleep(0.05)
    return False


def _is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def test_what_does_not_fit_the_budget_is_left_out(gpu_check: ModuleType, tmp_path: Path) -> None:
    record = gpu_check.gpu_run.Record(tmp_path, ABOUT)
    assert not gpu_check.gpu_run.Runner(record, 0.0).run(step(gpu_check, "raise SystemExit(9)"))
    assert read(record)["steps"] == [{"name": "a", "outcome": "left out"}]
    assert not record.is_good


def test_numbers_that_were_cut_off_are_told(gpu_check: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "numbers"
    results.mkdir()
    (results / "bench.json").write_text('{"half": [1,')
    record = gpu_check.gpu_run.Record(tmp_path / "out", ABOUT)
    gpu_check.gpu_run.Runner(record, 1000.0).run(step(gpu_check, "", results=results))
    assert read(record)["benchmarks"]["bench"].startswith("not readable")


def test_without_the_sanitizer_its_phase_is_skipped(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.gpu_steps, "find_sanitizer", lambda: None)
    monkeypatch.setattr(gpu_check, "facts", lambda: ABOUT)
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = gpu_check.check(gpu_check.arguments(["--phases=sanitizer", str(tmp_path)]))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 0
    (told,) = json.loads((tmp_path / "h200-2030-01-02.json").read_text())["steps"]
    assert told["outcome"] == "skipped"
    assert "nvidia-cuda-sanitizer-api" in told["why"]


def test_every_file_of_tests_and_every_benchmark_has_a_step(
    gpu_check: ModuleType, tmp_path: Path
) -> None:
    tests = {each.name for each in gpu_check.gpu_steps.test_steps()}
    assert tests == {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    benchmarks = {each.name for each in gpu_check.gpu_steps.benchmark_steps(tmp_path)}
    files = (ROOT / "benchmarks").glob("bench_gpu_*.py")
    assert benchmarks == {"bench_graphs", *(path.stem for path in files)}
    for each in gpu_check.gpu_steps.sanitizer_steps("compute-sanitizer"):
        assert (ROOT / gpu_check.gpu_steps.SMALL_CASES).is_file()
        assert gpu_check.gpu_steps.SMALL_CASES in each.command


def test_the_build_is_for_the_device_and_offline(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTLASS_ROOT", "relative")
    (build,) = gpu_check.gpu_steps.build_steps([9, 0], 300.0)
    assert "--no-index" in build.command
    assert any("MEGACORE_CUDA_ARCHS=90a" in word for word in build.command)
    assert build.env == {"CUTLASS_ROOT": str(Path("relative").resolve())}
    for capability, arch in (([8, 0], "80"), ([8, 9], "89"), ([10, 3], "103a"), ([12, 0], "120a")):
        (build,) = gpu_check.gpu_steps.build_steps(capability, 300.0)
        assert any(word.endswith(f"MEGACORE_CUDA_ARCHS={arch}") for word in build.command)
        (kernels,) = gpu_check.gpu_steps.kernel_steps(capability)
        assert kernels.command[-2:] == ["compiled_archs", arch]
    (kernels,) = gpu_check.gpu_steps.kernel_steps([9, 0])
    assert kernels.command[-2:] == ["grouped_gemm_archs", "90a"]
    assert gpu_check.gpu_steps.kernel_steps([]) == []


@pytest.mark.parametrize("imports", [True, False])
def test_a_wheel_is_built_anew_only_if_it_does_not_import(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, imports: bool
) -> None:
    (tmp_path / "megacore-1-cp312-cp312-linux_x86_64.whl").touch()
    monkeypatch.setenv("WHEELS", str(tmp_path))
    ran = []

    class Fake(gpu_check.gpu_run.Runner):  # type: ignore[name-defined, misc]
        def run(self, step: Any, **_: Any) -> bool:
            ran.append(step.name)
            return imports or step.name != "import"

    args = gpu_check.arguments(["--phases=build", str(tmp_path / "out")])
    runner = Fake(gpu_check.gpu_run.Record(args.out, ABOUT), 1000.0)
    gpu_check._Check(args, [9, 0], runner).run()
    built = [] if imports else ["build"]
    assert ran == ["requirements", "wheel", "import", *built, "kernels"]


def test_a_build_without_grouped_products_fails(gpu_check: ModuleType) -> None:
    command = gpu_check.gpu_steps.kernel_steps([9, 0])[0].command
    done = subprocess.run([*command[:-1], "123"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no grouped products for sm_123" in done.stderr


FAULTY = """
import os, time
import pytest

@pytest.mark.gpu
def test_good(): pass

@pytest.mark.gpu
def test_crash(): os._exit(7)

@pytest.mark.gpu
def test_sticky(): raise RuntimeError("CUDA error: an illegal memory access was encountered")

@pytest.mark.gpu
def test_wrong(): assert 1 == 2

@pytest.mark.gpu
def test_hang(): time.sleep(600)

@pytest.mark.gpu
def test_last(): pytest.skip("no reason")
"""


def test_a_file_goes_on_in_a_new_process_after_a_fault(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_faulty.py"
    file.write_text(FAULTY)
    monkeypatch.setattr(gpu_check.gpu_run, "ROOT", tmp_path)
    record = gpu_check.gpu_run.Record(tmp_path / "out", ABOUT)
    runner = gpu_check.gpu_run.Runner(record, 1000.0)
    options = ["-o", "markers=gpu", "-c", os.devnull, "--rootdir", str(tmp_path)]
    tests = gpu_check.gpu_run.Step(
        name="test_faulty",
        command=[*gpu_check.gpu_steps._tests_command(), *options],
        limit_s=60.0,
        env={"PYTHONPATH": str(ROOT)},
    )
    runner.run_tests(tests, [file.name, "--deselect", "test_faulty.py::test_hang"])
    found = {test.partition("::")[2]: said for test, said in read(record)["tests"].items()}
    assert found == {
        "test_good": "passed",
        "test_crash": "crashed",
        "test_sticky": "failed",
        "test_wrong": "failed",
        "test_last": "skipped",
    }
    events = [json.loads(line) for line in record.events.read_text().splitlines()]
    said = [e["text"] for e in events if e.get("test", "").endswith("test_wrong") and "text" in e]
    assert "assert 1 == 2" in said[0]
    assert not record.is_good
    # A hang is reported as that of its test.
    short = gpu_check.gpu_run.Step(**{**vars(tests), "name": "hanging", "limit_s": 8.0})
    runner.run_tests(short, [f"{file.name}::test_hang"])
    assert read(record)["tests"]["test_faulty.py::test_hang"] == "hung"


def test_a_device_that_does_not_answer_ends_the_run(gpu_check: ModuleType, tmp_path: Path) -> None:
    for answers in (True, False):
        record = gpu_check.gpu_run.Record(tmp_path, ABOUT)
        probe = [sys.executable, "-c", f"raise SystemExit({0 if answers else 1})"]
        runner = gpu_check.gpu_run.Runner(record, 1000.0, probe)
        assert not runner.run(step(gpu_check, "raise SystemExit(3)"))
        assert runner.run(step(gpu_check, "")) is answers
        assert ("does not answer" in record.text.read_text()) is not answers


def test_rows_of_benchmarks_are_kept_as_they_come(gpu_check: ModuleType, tmp_path: Path) -> None:
    record = gpu_check.gpu_run.Record(tmp_path, ABOUT)
    runner = gpu_check.gpu_run.Runner(record, 1000.0)
    code = (
        "import sys, time; sys.path.insert(0, 'benchmarks'); from _common import row;"
        "row('plans', us={'wide': 1.5}); time.sleep(600)"
    )
    late = step(gpu_check, code, env={"MEGACORE_ROWS": "1"}, limit_s=8.0)
    assert not runner.run(late)
    (line,) = record.events.read_text().splitlines()
    assert json.loads(line) == {
        **{"step": "a", "event": "row", "table": "plans", "us": {"wide": 1.5}, "clocks": {}}
    }


@pytest.mark.campaign
def test_every_step_runs_on_a_fake_device(gpu_check: ModuleType, tmp_path: Path) -> None:
    command = [ROOT / "scripts" / "gpu_check.sh", "--fake-device", "--budget-s=900"]
    done = subprocess.run(
        [*command, "--phases=build,tests,benchmarks,again,curves", tmp_path],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    record = json.loads((tmp_path / next(tmp_path.glob("*.json")).name).read_text())
    steps = [each["name"] for each in record["steps"]]
    tests = {each.name for each in gpu_check.gpu_steps.test_steps()}
    benchmarks = {each.name for each in gpu_check.gpu_steps.benchmark_steps(tmp_path / "none")}
    trials = ["qualification", "kernels_in_training"]
    assert {name.partition(" ")[0] for name in steps} == tests | benchmarks | {"curves", *trials}
    assert steps[:3] == ["test_small_cases", *trials]
    assert {*steps[3:5]} == {"test_training", "test_moe_layer"}
    assert {"qualification", "kernels_in_training"} <= record["benchmarks"].keys()
    assert steps.index("bench_gpu_grouped_gemm") < steps.index("test_peer_kernels")
    assert {each["outcome"] for each in record["steps"]} == {"ok"}
    assert {test.partition("::")[0] for test in record["tests"]} == {
        f"tests/gpu/{name}.py" for name in tests
    }


def test_a_second_call_runs_what_failed_and_what_is_missing(
    gpu_check: ModuleType, tmp_path: Path
) -> None:
    before = {
        "tests": {"tests/gpu/a.py::one": "passed", "tests/gpu/test_adamw.py::two": "hung"},
        "steps": [
            {"name": "bench_graphs", "outcome": "ok"},
            {"name": "bench_gpu_tokens", "outcome": "stopped"},
        ],
    }
    (tmp_path / "first.json").write_text(json.dumps(before))
    ran = []

    class Fake(gpu_check.gpu_run.Runner):  # type: ignore[name-defined, misc]
        def run(self, step: Any, **_: Any) -> bool:
            ran.append(step.name)
            return True

        def run_tests(self, _step: Any, tests: Any, **_: Any) -> None:
            ran.extend(tests)

    out = tmp_path / "out"
    again = f"--again={tmp_path / 'first.json'}"
    args = gpu_check.arguments(["--phases=tests,benchmarks", again, str(out)])
    gpu_check._Check(args, [9, 0], Fake(gpu_check.gpu_run.Record(out, ABOUT), 1000.0)).run()
    assert ran[0] == "tests/gpu/test_adamw.py::two"
    assert "bench_gpu_tokens" in ran
    assert "bench_graphs" not in ran
    assert "tests/gpu/test_adamw.py" not in ran
    assert "tests/gpu/test_moe_layer.py" in ran


def test_only_whole_names_of_folders_are_replaced(gpu_check: ModuleType) -> None:
    places = {"/home/me/": "", "/home/me": ".", "/tmp": "<tmp>"}
    text = "/home/me/a.py in /home/me, /tmp/tmp12/x and /tmpfs"
    assert gpu_check.gpu_run.scrub(text, places) == "a.py in ., <tmp>/tmp12/x and /tmpfs"


def test_without_a_gpu_nothing_is_called_good(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.gpu_steps, "find_sanitizer", lambda: None)
    monkeypatch.setattr(gpu_check, "facts", lambda: {**ABOUT, "device": "none"})
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert gpu_check.check(gpu_check.arguments(["--phases=sanitizer", str(tmp_path)])) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_unknown_phases_are_refused(
    gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_check.arguments(["--phases=build,lunch"])
    assert "use some of build, tests, benchmarks, again, sanitizer" in capsys.readouterr().err


def test_a_run_that_is_ended_leaves_what_it_had(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    hanging = tmp_path / "bin" / "compute-sanitizer"
    hanging.write_text("#!/bin/sh\necho at work\nexec sleep 600\n")
    hanging.chmod(0o755)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [ROOT / "scripts" / "gpu_check.sh", "--phases=sanitizer", out],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any("at work" in line for line in process.stdout)
    process.terminate()
    assert process.wait(60) == 1
    process.stdout.close()
    (text,) = out.glob("*.txt")
    assert "at work" in text.read_text()
    assert "stopped by signal 15" in text.read_text()
    (found,) = out.glob("*.json")
    assert json.loads(found.read_text())["steps"] == []
