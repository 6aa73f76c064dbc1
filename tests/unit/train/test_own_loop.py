"""A training loop without ``megacore train``, as the documentation shows it."""

from __future__ import annotations

import doctest
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.parallel import ProcessGroups

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "own_loop.py"


def test_the_loop_in_the_documentation_runs() -> None:
    page = ROOT / "docs" / "buffers.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 20
    assert result.failed == 0


def test_the_example_has_the_same_losses_on_two_ranks_and_goes_on_alone(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(EXAMPLE), f"--dir={tmp_path}", "--steps=3"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    on_two = [float(loss) for loss in re.findall(r"loss (\S+)", ended.stdout)]
    example = runpy.run_path(str(EXAMPLE))
    alone = example["Loop"](ProcessGroups.single())
    losses = [alone.step(step, lr=0.01) for step in range(5)]
    assert losses[-1] < losses[0]
    assert on_two == pytest.approx(losses[:3], abs=1e-5)
    goes_on = example["Loop"](ProcessGroups.single())
    assert goes_on.load(tmp_path) == 3
    assert [goes_on.step(step, lr=0.01) for step in (3, 4)] == pytest.approx(losses[3:], abs=1e-5)
