"""Two and four processes on one GPU: rows of peers, clones, and a layer in a graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megacore.ops import has_cuda_kernels

ROOT = Path(__file__).parents[2]
CASES = ("dispatch", "clones", "captured")


def run(case: str, num_ranks: int, device: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.shared_gpu", case, str(num_ranks), device],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=75,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda_kernels(), reason="built without CUDA kernels")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_ranks", [2, 4])  # all cases of two first
def test_processes_share_a_gpu(case: str, num_ranks: int) -> None:
    run(case, num_ranks, "cuda")


@pytest.mark.parametrize("case", CASES)
def test_the_cases_hold_on_the_cpu(case: str) -> None:
    run(case, 2, "cpu")
