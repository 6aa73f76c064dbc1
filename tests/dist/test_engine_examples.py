"""Examples of the engine alone: losses of any layout, without the trainer and what it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megacore

EXAMPLES = Path(__file__).parents[2] / "examples" / "engine"
# What the trainer needs and the engine must not.
ABSENT = ("megatrain", "pydantic", "rich", "safetensors", "tomli_w")
# Fails each import of these packages, as where they are not installed.
BLOCKER = f"""
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
"""


def run_alone(command: list[str], folder: Path, *, num_ranks: int) -> str:
    """Output of a command in an environment with the engine, torch and numpy alone."""
    (folder / "sitecustomize.py").write_text(BLOCKER)
    source = str(Path(megacore.__file__).parents[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}{os.pathsep}{source}"}
    launcher = [sys.executable]
    if num_ranks > 1:
        nproc = f"--nproc-per-node={num_ranks}"
        launcher += ["-m", "torch.distributed.run", "--standalone", nproc]
    ended = subprocess.run(
        [*launcher, *command], capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r" loss (\S+)", output)]


@pytest.mark.parametrize("name", ["pipeline.py", "zero1.py", "moe_echo.py"])
def test_an_example_has_the_losses_of_one_process(name: str, tmp_path: Path) -> None:
    command = [str(EXAMPLES / name), "--steps=3"]
    output = run_alone(command, tmp_path, num_ranks=4)
    alone = losses(run_alone(command, tmp_path, num_ranks=1))
    assert len(alone) == 3
    assert losses(output) == pytest.approx(alone, rel=1e-5)
    if name == "moe_echo.py":
        loads = re.findall(r"mean (\d\.\d\d) -> (\d\.\d\d)", output)
        assert len(loads) == 3
        assert all(float(before) > 1.5 and float(after) < 1.05 for before, after in loads)


def test_the_trainer_is_absent_in_this_environment(tmp_path: Path) -> None:
    code = """
import megacore.moe, megacore.graphs
try:
    import megatrain
except ModuleNotFoundError:
    print("absent")
"""
    assert run_alone(["-c", code], tmp_path, num_ranks=1) == "absent\n"
