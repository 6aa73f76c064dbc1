"""Laws of rank layouts, for random sizes, orders and tokens."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megacore.parallel import RankGenerator, Topology

AXES = ("tp", "cp", "ep", "dp", "pp")


@st.composite
def generators(draw: st.DrawFn) -> RankGenerator:
    sizes = {axis: draw(st.integers(1, 4)) for axis in AXES}
    order = "-".join(draw(st.permutations(AXES)))
    return RankGenerator(**sizes, order=order, rank_offset=draw(st.integers(0, 50)))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    tp, cp, pp, ep, etp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(5))
    world_size = int(np.lcm(tp * cp * pp, etp * ep * pp)) * draw(st.integers(1, 3))
    first = draw(st.permutations(AXES[:-1]))
    order = [*first, "pp"] if draw(st.booleans()) else ["pp", *first]
    return Topology(
        world_size=world_size, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order="-".join(order)
    )


axis_sets = st.sets(st.sampled_from(AXES), min_size=1)


def nested_loop_groups(ranks: RankGenerator, axes: set[str]) -> list[list[int]]:
    """What the rule says, as loops: fix the other axes, vary these, the layout's first fastest."""
    sizes = ranks.sizes
    strides = {
        axis: int(np.prod([sizes[before] for before in ranks.axes[:i]]))
        for i, axis in enumerate(ranks.axes)
    }
    varying = [axis for axis in reversed(ranks.axes) if axis in axes]
    fixed = [axis for axis in reversed(ranks.axes) if axis not in axes]
    groups = []
    for outer in itertools.product(*(range(sizes[axis]) for axis in fixed)):
        start = sum(strides[axis] * at for axis, at in zip(fixed, outer, strict=True))
        group = [
            ranks.rank_offset
            + start
            + sum(strides[axis] * at for axis, at in zip(varying, inner, strict=True))
            for inner in itertools.product(*(range(sizes[axis]) for axis in varying))
        ]
        groups.append(group)
    return groups


@given(generators(), axis_sets)
def test_groups_partition_the_world(ranks: RankGenerator, axes: set[str]) -> None:
    groups = ranks.groups("-".join(axes))
    first = ranks.rank_offset
    assert sorted(groups.ravel().tolist()) == list(range(first, first + ranks.world_size))
    assert groups.shape == (ranks.world_size // groups.shape[1], ranks.group_size("-".join(axes)))
    assert groups.dtype == np.int32


@given(generators(), axis_sets)
def test_groups_equal_nested_loops(ranks: RankGenerator, axes: set[str]) -> None:
    assert ranks.get_ranks("-".join(axes)) == nested_loop_groups(ranks, axes)


@given(generators(), axis_sets)
def test_group_and_complement_meet_in_one_rank(ranks: RankGenerator, axes: set[str]) -> None:
    others = set(AXES) - axes
    for rank in range(ranks.rank_offset, ranks.rank_offset + ranks.world_size):
        group = set(ranks.group_of(rank, "-".join(axes)))
        other = set(ranks.group_of(rank, "-".join(others))) if others else {rank}
        assert group & other == {rank}


@given(generators(), axis_sets, st.randoms(use_true_random=False))
def test_order_inside_a_token_does_not_matter(
    ranks: RankGenerator, axes: set[str], random: object
) -> None:
    shuffled = sorted(axes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ranks.get_ranks("-".join(shuffled)) == ranks.get_ranks("-".join(sorted(axes)))


@given(generators())
def test_coordinates_round_trip(ranks: RankGenerator) -> None:
    for rank in range(ranks.rank_offset, ranks.rank_offset + ranks.world_size):
        assert ranks.rank(**ranks.coordinates(rank)) == rank


@given(generators(), axis_sets)
def test_members_of_a_group_differ_only_on_its_axes(ranks: RankGenerator, axes: set[str]) -> None:
    for group in ranks.get_ranks("-".join(axes)):
        fixed = [
            tuple(at for axis, at in ranks.coordinates(rank).items() if axis not in axes)
            for rank in group
        ]
        assert len(set(fixed)) == 1


@given(topologies())
def test_both_views_cover_the_world_with_equal_pipelines(topology: Topology) -> None:
    assert topology.dense.world_size == topology.expert.world_size == topology.world_size
    assert topology.dense.get_ranks("pp") == topology.expert.get_ranks("pp")
    assert topology.tp * topology.cp * topology.dp * topology.pp == topology.world_size
    assert topology.etp * topology.ep * topology.expert_dp * topology.pp == topology.world_size


@given(topologies())
def test_holders_of_one_parameter_are_on_one_stage(topology: Topology) -> None:
    for rank in range(topology.world_size):
        for token in ("dp-cp", "tp"):
            stages = {topology.coordinates(r)["pp"] for r in topology.group_of(rank, token)}
            assert len(stages) == 1
        stages = {
            topology.expert_coordinates(r)["pp"] for r in topology.expert_group_of(rank, "edp")
        }
        assert stages == {topology.coordinates(rank)["pp"]}
