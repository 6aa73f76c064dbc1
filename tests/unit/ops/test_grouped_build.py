"""Plans and build of the grouped product on GPUs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megacore.ops import cuda_kernels, has_cuda_kernels
from megacore.ops.gemm_cuda import launch_grouped

ROOT = Path(__file__).parents[3]
needs_cuda_build = pytest.mark.skipif(
    not has_cuda_kernels(), reason="this installation has no CUDA kernels"
)


@pytest.mark.parametrize("plan", ["big", "auto-columns", "wide-rows", "wide-"])
def test_an_unknown_plan_is_refused(plan: str) -> None:
    x, w = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(1, 8, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"must be one of auto, wide.*, got '{plan}'"):
        launch_grouped("forward", x, w, torch.tensor([4]), x.clone(), plan=plan)


# ---- the build ----------------------------------------------------------------------------------

UNITS = sorted((ROOT / "cuda" / "kernels").glob("grouped_gemm_sm*_*.cu"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_refuse_to_become_stubs(unit: Path) -> None:
    """Compiled without the "a", CUTLASS's kernels would be empty, and nobody would notice."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc: it compiles the kernels for other architectures")
    number = re.search(r"_sm(\d+)_", unit.name)
    assert number is not None
    for target, refused in ((number[1], True), ("80", True), (f"{number[1]}a", False)):
        # Headers are not needed: the line comes before any of them is looked for.
        result = subprocess.run(
            [nvcc, f"-gencode=arch=compute_{target},code=sm_{target}", "-E", str(unit)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ("its kernels would be empty" in result.stderr) == refused, target


def test_there_are_units_for_both_architectures() -> None:
    assert {unit.name.split("_")[2] for unit in UNITS} == {"sm90", "sm100"}


@needs_cuda_build
def test_the_build_has_the_kernels_of_its_architectures() -> None:
    found = cuda_kernels().grouped_gemm_archs()
    if not found:
        pytest.skip("built without CUTLASS's headers, so it has no grouped product")
    wanted = [arch for arch in cuda_kernels().compiled_archs() if arch in ("90a", "100a")]
    assert sorted(found) == sorted(wanted)
