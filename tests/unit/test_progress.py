"""`scripts/progress.py`: what people see of a build while it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "progress.py"


def run(log: Path, shell: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "Compiling", str(log), "sh", "-c", shell]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_build_is_counted_and_logged(tmp_path: Path) -> None:
    lines = "".join(f"echo '[{n}/10] Building CXX object {n}.o';" for n in range(1, 11))
    log = tmp_path / "logs" / "build.log"
    done = run(log, f"echo '-- CUDA kernels left out: no GPU';{lines}")
    assert done.returncode == 0
    shown = done.stdout.splitlines()
    assert shown[:3] == ["Compiling ...", "  2 of 10", "  4 of 10"]
    assert shown[-2].startswith("Compiling: ")
    assert shown[-2].endswith(" s, 10 steps")
    assert shown[-1] == "  CUDA kernels left out: no GPU"
    assert "Building CXX object 3.o" in log.read_text()
    assert "object" not in done.stdout


def test_a_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    done = run(tmp_path / "build.log", "seq 1 200; echo 'error: no such header' >&2; exit 3")
    assert done.returncode == 3
    assert "failed with status 3" in done.stdout
    assert "error: no such header" in done.stdout
    assert "\n200\n" in done.stdout
    assert "\n100\n" not in done.stdout
