"""Process groups on real gloo ranks: membership, sharing, mistakes found before a collective."""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacore.errors import ConfigError
from megacore.parallel import Group, ProcessGroups, Topology
from megacore.parallel.process_groups import _GroupMaker
from tests.support.distributed import run_ranks

DENSE_FIELDS = {"tp": "tp", "cp": "cp", "dp": "dp", "dp_cp": "dp-cp", "pp": "pp"}
EXPERT_FIELDS = {"ep": "ep", "etp": "etp", "expert_dp": "edp"}
ALL_FIELDS = (*DENSE_FIELDS, *EXPERT_FIELDS, "world", "embedding")

LAYOUTS = [
    {},
    {"tp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "order": "pp-tp-cp-ep-dp"},
    {"tp": 2, "ep": 4, "etp": 1},
    {"cp": 2, "ep": 2, "etp": 2},
    {"cp": 4, "ep": 2},
    {"pp": 4},
    {"tp": 4},
]


def sums_over_groups(rank: int, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make the groups of each layout in turn and add up the ranks over each group."""
    found = []
    for layout in layouts:
        groups = ProcessGroups.create(Topology(world_size=dist.get_world_size(), **layout))
        seen = {}
        for name in ALL_FIELDS:
            group: Group = getattr(groups, name)
            total = torch.tensor([float(rank)])
            if group.handle is not None:
                dist.all_reduce(total, group=group.handle)
            assert group.ranks[group.position] == group.rank == groups.rank == rank
            seen[name] = (group.ranks, group.handle is not None, total.item())
        found.append(seen)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("lazy", ["0", "1"])
def test_every_group_has_the_ranks_of_the_topology_and_works(lazy: str) -> None:
    results = run_ranks(4, with_gloo_connecting, lazy, LAYOUTS)
    for rank, layouts in enumerate(results):
        for layout, seen in zip(LAYOUTS, layouts, strict=True):
            topology = Topology(world_size=4, **layout)
            expected = {n: topology.group_of(rank, t) for n, t in DENSE_FIELDS.items()}
            expected |= {n: topology.expert_group_of(rank, t) for n, t in EXPERT_FIELDS.items()}
            expected["world"] = [0, 1, 2, 3]
            pipeline = topology.group_of(rank, "pp")
            ends = sorted({pipeline[0], pipeline[-1]})
            expected["embedding"] = ends if rank in ends else [rank]
            for name in ALL_FIELDS:
                ranks, has_handle, total = seen[name]
                assert list(ranks) == expected[name], (layout, name)
                assert has_handle == (len(ranks) > 1)
                assert total == sum(ranks)


COPIES: list[dict[str, Any]] = [
    {"pp": 4},
    {"pp": 2},
    {"pp": 2, "ep": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "order": "pp-tp-cp-ep-dp"},
]
HOLDERS: list[tuple[list[list[int]], list[list[int]]]] = [
    ([[0, 3], [1, 2]], [[0, 3], [1, 2]]),
    ([[0, 1, 2, 3]], [[0, 1, 2, 3]]),
    ([[0, 1, 2, 3]], [[0, 2], [1, 3]]),
    ([[0, 2], [1, 3]], [[0, 2], [1, 3]]),
    ([[0, 1, 2, 3]], [[0, 1, 2, 3]]),
]


@pytest.mark.dist
def test_both_copies_of_a_model_in_a_pipeline_have_one_group_of_holders() -> None:
    for rank, layouts in enumerate(run_ranks(4, sums_over_holders)):
        for expected, seen in zip(HOLDERS, layouts, strict=True):
            for partition, (ranks, total) in zip(expected, seen, strict=True):
                assert list(ranks) == next(part for part in partition if rank in part)
                assert total == sum(ranks)


def sums_over_holders(rank: int) -> list[Any]:
    found = []
    for layout in COPIES:
        topology = Topology(world_size=4, **layout)
        groups = ProcessGroups.create(topology, pp_copies=2, pp_ends=(0, 0))
        assert groups.copies == 2
        assert ("holders: " in groups.describe()) == (groups.holders.size > 1)
        seen = []
        for group in (groups.holders, groups.expert_holders):
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group.handle)
            seen.append((group.ranks, total.item()))
        found.append(seen)
    single = ProcessGroups.create(Topology(world_size=4, tp=2))
    assert single.copies == 1
    assert single.holders.handle is single.dp_cp.handle
    assert single.expert_holders.handle is single.expert_dp.handle
    assert "holders" not in single.describe()
    return found


def with_gloo_connecting(rank: int, lazy: str, layouts: list[dict[str, Any]]) -> Any:
    os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
    return sums_over_groups(rank, layouts)


@pytest.mark.dist
def test_equal_rank_lists_share_one_group() -> None:
    assert all(run_ranks(4, shares_handles))


def shares_handles(_rank: int) -> bool:
    groups = ProcessGroups.create(Topology(world_size=4, tp=2))
    assert groups.tp.handle is groups.etp.handle
    assert groups.dp.handle is groups.dp_cp.handle is groups.expert_dp.handle
    assert groups.tp.handle is not groups.dp.handle
    assert groups.world.handle is dist.group.WORLD
    whole = ProcessGroups.create(Topology(world_size=4, ep=4))
    assert whole.ep.handle is whole.dp.handle is dist.group.WORLD
    return True


@pytest.mark.dist
def test_all_ranks_may_take_part_in_every_group() -> None:
    """What a default group bound to a device needs, tried on gloo."""
    assert run_ranks(4, sums_with_all_ranks_taking_part) == [3.0, 3.0, 3.0, 3.0]


def sums_with_all_ranks_taking_part(rank: int) -> float:
    maker = _GroupMaker(timeout=timedelta(seconds=20), backend=None)
    maker._members_only = False
    maker.make("first and last", [[0, 3]])
    group = maker.make("pairs", [[0, 3], [1, 2]])
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group.handle)
    return total.item()


@pytest.mark.dist
def test_a_wrong_number_of_processes_is_told_with_the_fix() -> None:
    messages = run_ranks(2, message_of_create, [{"world_size": 4, "tp": 2, "pp": 2}] * 2)
    for message in messages:
        assert "tp 2 x cp 1 x dp 1 x pp 2 = 4 is for 4 processes, but 2 are running" in message
        assert "start 4 processes (--nproc 4)" in message
        assert "world_size 2 is not divisible by tp 2 x cp 1 x pp 2 = 4" in message
    messages = run_ranks(2, message_of_create, [{"world_size": 8, "tp": 2}] * 2)
    assert "or make the topology with world_size=2, which gives dp 1" in messages[0]


@pytest.mark.dist
def test_ranks_that_disagree_are_told_before_any_collective() -> None:
    messages = run_ranks(2, message_of_create, [{"world_size": 2, "tp": 2}, {"world_size": 2}])
    # The rank that came first learns it while it waits for the other.
    for message in messages:
        assert "tp=2" in message
        assert "tp=1" in message
        assert "give every rank the same settings" in message


@pytest.mark.dist
def test_groups_made_before_on_one_rank_alone_are_told() -> None:
    for message in run_ranks(2, message_after_a_group_of_rank_0):
        assert "after 1 other groups" in message
        assert "after 2 other groups" in message


def message_of_create(rank: int, settings: list[dict[str, int]]) -> str:
    try:
        ProcessGroups.create(Topology(**settings[rank]))
    except ConfigError as error:
        return str(error)
    return ""


def message_after_a_group_of_rank_0(rank: int) -> str:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    return message_of_create(rank, [{"world_size": 2, "tp": 2}] * 2)


@pytest.mark.dist
def test_one_rank_of_thousands_makes_only_its_own_groups() -> None:
    # tp and ep, dp and expert_dp share their groups; rank 1234 is in the middle of its pipeline.
    assert run_ranks(1, number_of_groups_in_a_fake_world) == [(8, 3)]


def number_of_groups_in_a_fake_world(_rank: int) -> tuple[int, int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=4096)
    groups = ProcessGroups.create(Topology(world_size=4096, tp=8, pp=16, ep=8, etp=1))
    handles = {id(getattr(groups, name).handle) for name in ALL_FIELDS if name != "world"}
    handles -= {id(None)}
    return groups.tp.size, len(handles)


def test_uninitialised_ranks_are_told_how_to_start() -> None:
    with pytest.raises(ConfigError, match="which is not initialised; start the ranks with"):
        ProcessGroups.create(Topology(world_size=4, tp=2))


def test_one_process_needs_no_torch_distributed() -> None:
    for groups in (ProcessGroups.single(), ProcessGroups.create(Topology(world_size=1))):
        assert all(getattr(groups, name).size == 1 for name in ALL_FIELDS)
        assert groups.world.handle is None


def test_groups_are_frozen() -> None:
    groups = ProcessGroups.single()
    with pytest.raises(dataclasses.FrozenInstanceError):
        groups.tp = Group.solo()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        groups.tp.position = 1  # type: ignore[misc]


def test_a_group_checks_itself() -> None:
    with pytest.raises(ValueError, match="no position 2"):
        Group("tp", (0, 1), 2, None)
    with pytest.raises(ValueError, match="2 ranks but no handle"):
        Group("tp", (0, 1), 0, None)
