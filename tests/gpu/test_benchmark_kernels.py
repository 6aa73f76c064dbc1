"""What the benchmarks of GPU kernels compare gives the same result, on little data."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.ops import has_cuda_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_cuda_kernels(), reason="built without CUDA kernels"),
]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = (40, 4, 64, 16, 48)  # tokens, choices, features, experts, inner width


@pytest.fixture
def benchmark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module(request.param)
    for name in (request.param, "_common"):
        sys.modules.pop(name, None)


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [x for x in result if isinstance(x, Tensor)]


@pytest.mark.parametrize("benchmark", ["bench_gpu_tokens"], indirect=True)
def test_kernels_on_tokens_are_compared_with_their_like(benchmark: Any) -> None:
    torch.manual_seed(0)
    pairs = {**benchmark.moving_kernels(SHAPE), **benchmark.small_kernels(SHAPE)}
    assert {"permute", "unpermute", "row dots", "swiglu backward", "top-k", "sort"} <= pairs.keys()
    for name, (ours, theirs, *_) in pairs.items():
        for found, expected in zip(tensors(ours()), tensors(theirs()), strict=False):
            torch.testing.assert_close(
                found.float(), expected.float(), rtol=2e-2, atol=2e-2, msg=lambda m, n=name: n + m
            )
    for ours, theirs, num_bytes in benchmark.peer_kernels(SHAPE).values():
        ours()
        theirs()
        assert num_bytes > 0


@pytest.mark.parametrize("benchmark", ["bench_gpu_adamw"], indirect=True)
@pytest.mark.parametrize("copy_out", [None, torch.bfloat16])
def test_steps_of_adamw_run(benchmark: Any, copy_out: torch.dtype | None) -> None:
    benchmark.ours(1030, copy_out=copy_out)()
    benchmark.theirs(1030, fused=False, copy_out=copy_out)()
