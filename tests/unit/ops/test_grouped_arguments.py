"""What a grouped product on a GPU is told of each group, compared with plain Python arithmetic."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megacore import _core
from megacore.ops import cuda_kernels, has_cuda_kernels
from megacore.ops.gemm_cuda import launch_grouped
from tests.support.grouped_arguments import Arguments, Problem, expected_arguments, read_arguments

ROOT = Path(__file__).parents[3]
needs_cuda_build = pytest.mark.skipif(
    not has_cuda_kernels(), reason="this installation has no CUDA kernels"
)


def filled(problem: Problem) -> Arguments:
    counts = torch.tensor(problem.m_splits)
    mask = None if problem.mask is None else torch.tensor(problem.mask)
    first_row = None if problem.first_row is None else torch.tensor(problem.first_row)
    num_bytes = _core.grouped_arguments_bytes(num_experts=len(counts))
    memory = torch.full((num_bytes + 256,), 0xEE, dtype=torch.uint8)
    offset = -memory.data_ptr() % 256
    _core.fill_grouped_arguments(
        product=problem.product,
        m_splits=counts.data_ptr(),
        accumulate_mask=0 if mask is None else mask.data_ptr(),
        accumulate=problem.accumulate,
        num_rows=problem.num_rows,
        num_experts=len(counts),
        out_features=problem.out_features,
        in_features=problem.in_features,
        operand_bytes=problem.operand_bytes,
        result_bytes=problem.result_bytes,
        a=problem.a,
        b=problem.b,
        d=problem.d,
        arguments=memory.data_ptr() + offset,
        first_row=0 if first_row is None else first_row.data_ptr(),
        a_scale=problem.a_scale,
        b_scale=problem.b_scale,
    )
    return read_arguments(memory[offset : offset + num_bytes], len(counts), problem.operand_bytes)


def random_problem(rng: random.Random) -> Problem:
    num_experts = rng.choice([1, 2, 3, 8, 31, 64, 255, 256])
    kind = rng.choice(["ragged", "empty", "one", "equal", "wrong"])
    counts = [rng.choice([0, 0, 1, 7, rng.randrange(5000)]) for _ in range(num_experts)]
    if kind == "empty":
        counts = [0] * num_experts
    elif kind == "one":
        counts = [0] * num_experts
        counts[rng.randrange(num_experts)] = 4096
    elif kind == "equal":
        counts = [128] * num_experts
    num_rows = sum(counts) + rng.choice([0, 0, 1, 1000])
    if kind == "wrong":
        counts[rng.randrange(num_experts)] = rng.choice([-1, -(10**12), 2**62])
        num_rows = rng.randrange(2000)
    operand_bytes = rng.choice([1, 2])
    return Problem(
        product=rng.randrange(3) if operand_bytes == 2 else rng.choice([0, 2]),
        m_splits=counts,
        num_rows=num_rows,
        out_features=8 * rng.randrange(1, 1000),
        in_features=8 * rng.randrange(1, 1000),
        operand_bytes=operand_bytes,
        result_bytes=rng.choice([2, 4]),
        accumulate=rng.random() < 0.5,
        mask=[rng.random() < 0.5 for _ in counts] if rng.random() < 0.3 else None,
        a=rng.randrange(1 << 40) * 16,
        b=rng.randrange(1 << 40) * 16,
        d=rng.randrange(1 << 40) * 16,
        first_row=rng.choice([None, None, 0, 3, 1000, -1, 2**62]),
        a_scale=rng.randrange(1 << 40) * 4,
        b_scale=rng.randrange(1 << 40) * 4,
    )


@pytest.mark.parametrize("seed", range(8))
def test_arguments_equal_plain_arithmetic(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        problem = random_problem(rng)
        assert filled(problem) == expected_arguments(problem), problem


def test_weight_gradients_go_from_long_to_short_and_empty_experts_have_no_rows() -> None:
    problem = Problem(
        product=2,
        m_splits=[3, 0, 9, 3],
        num_rows=15,
        out_features=8,
        in_features=16,
        operand_bytes=2,
        result_bytes=4,
        accumulate=False,
        mask=[True, False, False, True],
        a=0,
        b=1 << 20,
        d=1 << 30,
    )
    found = filled(problem)
    assert found.shapes == [(8, 16, 9), (8, 16, 3), (8, 16, 3), (0, 16, 0)]
    assert found.a == [3 * 8 * 2, 0, 12 * 8 * 2, 3 * 8 * 2]
    assert [d - (1 << 30) for d in found.d] == [2 * 512, 0, 3 * 512, 512]
    assert found.beta == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("num_experts", [0, 1025])
def test_the_number_of_experts_is_checked(num_experts: int) -> None:
    with pytest.raises(ValueError, match=f"num_experts is {num_experts}; one launch takes 1 to 10"):
        _core.fill_grouped_arguments(
            product=0, m_splits=0, accumulate_mask=0, accumulate=False, num_rows=0,
            num_experts=num_experts, out_features=8, in_features=8, operand_bytes=2,
            result_bytes=2, a=0, b=0, d=0, arguments=0,
        )  # fmt: skip


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
