"""Groups of a world whose default group is bound to a device: one split per partition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacore.parallel import ProcessGroups, Topology, process_groups


@contextmanager
def world(size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Splits:
    """Stand-in for ``torch.distributed.split_group`` that records the rank lists."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[list[int]]] = []
        monkeypatch.setattr(process_groups, "_can_split", lambda _: True)
        monkeypatch.setattr(dist, "split_group", self)

    def __call__(self, *, split_ranks: list[list[int]], **_: Any) -> Any:
        self.calls.append(split_ranks)
        mine = [ranks for ranks in split_ranks if dist.get_rank() in ranks]
        return dist.new_group(mine[0]) if mine else None


def create(layout: Topology, rank: int, *, bound: bool, pp_channels: bool = True) -> ProcessGroups:
    with world(layout.world_size, rank):
        if bound:
            dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
        return ProcessGroups.create(layout, pp_channels=pp_channels)


@pytest.mark.parametrize("size", [8, 64, 2048])
def test_the_number_of_splits_does_not_grow_with_the_world(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    splits = Splits(monkeypatch)
    layout = Topology(world_size=size, tp=2, pp=2, ep=2)
    create(layout, size // 2 + 1, bound=True, pp_channels=False)
    assert len(splits.calls) <= 11
    for lists in splits.calls:  # disjoint, as torch wants them
        flat = [rank for ranks in lists for rank in ranks]
        assert len(flat) == len(set(flat))


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_groups_are_those_without_splits_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, pp: int
) -> None:
    splits = Splits(monkeypatch)
    layout = Topology(world_size=4 * pp, tp=2, pp=pp)
    first: list[list[list[int]]] = []
    for rank in range(layout.world_size):
        splits.calls.clear()
        split = create(layout, rank, bound=True)
        first = first or list(splits.calls)
        assert splits.calls == first  # a collective of all ranks
        plain = create(layout, rank, bound=False)
        for name in ("tp", "dp", "pp", "dp_cp", "expert_dp", "holders", "embedding"):
            one, other = getattr(split, name), getattr(plain, name)
            assert (one.ranks, one.position) == (other.ranks, other.position)
        assert split.pp_channels is not None
        assert plain.pp_channels is not None
        assert set(split.pp_channels) == set(plain.pp_channels)


@pytest.mark.parametrize("pp", [2, 3, 4, 5])
def test_a_rank_has_a_channel_to_and_from_each_neighbour(pp: int) -> None:
    layout = Topology(world_size=2 * pp, pp=pp)
    for rank in range(layout.world_size):
        groups = create(layout, rank, bound=False)
        mine = groups.pp.position
        neighbours = {(mine + 1) % pp, (mine - 1) % pp}
        expected = {(mine, other) for other in neighbours} | {(other, mine) for other in neighbours}
        assert groups.pp_channels is not None
        assert set(groups.pp_channels) == expected
        for pair, group in groups.pp_channels.items():
            assert set(group.ranks) == {groups.pp.ranks[position] for position in pair}
            assert group.rank == rank
