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
from tests.support.offload_parts import numbers_of, part_of_rank


@pytest.mark.parametrize("planner", ["balanced", "echo"])
@pytest.mark.parametrize(
    ("num_ranks", "local", "most"), [(1, 3, 9), (4, 2, 500), (7, 3, 40), (4, 8, 1 << 28)]
)
def test_the_plan_of_each_rank_is_its_part_of_the_whole_plan(
    num_ranks: int, local: int, most: int, planner: Any
) -> None:
    random = torch.Generator().manual_seed(num_ranks)
    heat = torch.rand(num_ranks * local, generator=random).double() ** 3
    draws = torch.rand(num_ranks, num_ranks * local, generator=random).double()
    counts = (draws * heat * most).long()
    for num_spare_slots in range(4):
        options = {"num_spare_slots": num_spare_slots, "planner": planner, "tolerance": 0.0}
        whole = plan_offload(counts, **options)
        assert (whole.num_clones > 0) == (num_ranks > 1 and num_spare_slots > 0)
        for rank in range(num_ranks):
            found = plan_offload_on_device(counts, rank=rank, **options)
            assert numbers_of(found) == part_of_rank(whole, counts, rank)
            assert found.read_slots().tolist() == whole.slot_expert.tolist()


def test_a_rank_needs_numbers_in_proportion_to_the_ranks() -> None:
    sizes = []
    for num_ranks in (16, 32):
        counts = torch.ones(num_ranks, 4 * num_ranks, dtype=torch.int64)
        plan = plan_offload_on_device(counts, rank=0, num_spare_slots=2)
        sizes.append(sum(each.numel() for each in vars(plan).values() if torch.is_tensor(each)))
    assert sizes[1] < 2 * sizes[0]


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
        (torch.zeros(2, 4, dtype=torch.int64), {"rank": 2}, r"rank must be in \[0, 2\), got 2"),
        (torch.zeros(2, 4, dtype=torch.int64), {"rank": -1}, r"rank must be in .*, got -1"),
    ],
)
def test_bad_input_is_an_error(counts: torch.Tensor, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_offload_on_device(counts, **{"rank": 0, "num_spare_slots": 1, **options})


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
        assert device_plan._cuda_fits(counts, 0, 8, True, 0, 10**6, 0) == fits
