"""plan_offload_on_device where there is no GPU: the same plan, the same errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megacore.moe import plan_offload, plan_offload_on_device
from megacore.moe.echo import device_plan
from megacore.ops.cuda_module import DeviceFacts, assume_device


@pytest.mark.parametrize("planner", ["balanced", "echo"])
def test_the_plan_of_a_cpu_tensor_is_that_of_the_cpu(planner: Any) -> None:
    counts = torch.randint(0, 500, (4, 8), generator=torch.Generator().manual_seed(0))
    plan = plan_offload_on_device(counts, num_spare_slots=2, planner=planner)
    assert plan.to_host() == plan_offload(counts, num_spare_slots=2, planner=planner)
    assert plan.rerouted.shape == (4, 4, 2)


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        (torch.zeros(2, 4), {}, "int64"),
        (torch.zeros(4, dtype=torch.int64), {}, "int64"),
        (torch.zeros(2, 3, dtype=torch.int64), {}, "divide"),
        (
            torch.zeros(2, 4, dtype=torch.int64),
            {"num_spare_slots": -1},
            "num_spare_slots must be .*, got -1",
        ),
        (torch.zeros(2, 4, dtype=torch.int64), {"tolerance": 2.0}, "tolerance is 2.0"),
        (torch.zeros(2, 4, dtype=torch.int64), {"planner": "best"}, "best"),
        (
            torch.zeros(2, 4, dtype=torch.int64),
            {"planner": "echo", "domain_size": 2},
            "domain_size",
        ),
        (torch.full((2, 4), -1), {}, "-1"),
    ],
)
def test_bad_input_is_an_error(counts: torch.Tensor, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_offload_on_device(counts, **{"num_spare_slots": 1, **options})


@pytest.mark.parametrize(("shared_kib", "fits"), [(227, True), (163, False), (None, True)])
def test_a_plan_that_a_block_has_no_memory_for_is_made_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, shared_kib: int | None, fits: bool
) -> None:
    # 64 ranks, 512 experts and 8 slots take this much.
    module = SimpleNamespace(plan_offload_bytes=lambda **_: 193 * 1024)
    monkeypatch.setattr(device_plan, "cuda_kernels", lambda: module)
    shared = None if shared_kib is None else shared_kib * 1024
    facts = DeviceFacts(capability=(8, 0), shared_bytes=shared)
    with assume_device(facts), FakeTensorMode():
        counts = torch.empty(64, 512, dtype=torch.int64, device="cuda")
        assert device_plan._cuda_fits(counts, 8, True, 0, 10**6, 0) == fits
