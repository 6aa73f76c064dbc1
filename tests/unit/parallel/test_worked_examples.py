"""The groups that the source document derives by hand for 16 ranks on two nodes of eight."""

from __future__ import annotations

import pytest

from megacore.parallel import RankGenerator, Topology

DENSE = Topology(world_size=16, tp=4, pp=2)
MOE = Topology(world_size=16, tp=4, pp=2, ep=4, etp=1)

PAIRS_FOUR_APART = [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
PAIRS_EIGHT_APART = [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]
FOURS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_what_the_sizes_leave_over_is_data_parallel() -> None:
    assert (DENSE.dp, MOE.dp, MOE.expert_dp) == (2, 2, 2)


@pytest.mark.parametrize("topology", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize(
    ("token", "groups"),
    [
        ("dp", PAIRS_FOUR_APART),
        ("tp", FOURS),
        ("pp", PAIRS_EIGHT_APART),
        ("cp", [[rank] for rank in range(16)]),
        ("tp-pp", [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        ("dp-cp", PAIRS_FOUR_APART),
        ("tp-dp", [list(range(8)), list(range(8, 16))]),
    ],
)
def test_dense_groups(topology: Topology, token: str, groups: list[list[int]]) -> None:
    assert topology.dense.get_ranks(token) == groups


@pytest.mark.parametrize(
    ("token", "groups"),
    [
        ("ep", FOURS),
        ("edp", PAIRS_FOUR_APART),
        ("pp", PAIRS_EIGHT_APART),
        ("etp", [[rank] for rank in range(16)]),
        ("etp-ep", FOURS),
        ("etp-ep-pp", [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
    ],
)
def test_expert_groups(token: str, groups: list[list[int]]) -> None:
    assert MOE.expert.get_ranks(token) == groups


def test_global_rank_formulas() -> None:
    topology = Topology(world_size=96, tp=2, cp=2, pp=3, ep=4, etp=2)
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        assert rank == at["tp"] + 2 * at["cp"] + 4 * at["dp"] + 4 * topology.dp * at["pp"]
        at = topology.expert_coordinates(rank)
        assert rank == at["etp"] + 2 * at["ep"] + 8 * at["edp"] + 8 * topology.expert_dp * at["pp"]


def test_middle_axis_of_three() -> None:
    groups = RankGenerator(tp=2, dp=3, pp=4).get_ranks("dp")
    assert groups[:3] == [[0, 2, 4], [1, 3, 5], [6, 8, 10]]
    assert groups[-1] == [19, 21, 23]


def test_reversed_order_turns_the_layout_around() -> None:
    ranks = RankGenerator(tp=4, dp=2, pp=2, order="pp-dp-tp")
    assert ranks.get_ranks("pp") == [[2 * i, 2 * i + 1] for i in range(8)]
    assert ranks.get_ranks("tp") == [[i, i + 4, i + 8, i + 12] for i in range(4)]


def test_folding_lets_expert_parallel_exceed_data_parallel() -> None:
    topology = Topology(world_size=256, tp=4, cp=2, pp=4, ep=64, etp=1)
    assert (topology.dp, topology.expert_dp) == (8, 1)
    assert topology.expert_group_of(0, "ep") == list(range(64))


def test_context_and_expert_parallel_share_eight_ranks() -> None:
    topology = Topology(world_size=8, cp=8, ep=8)
    assert topology.group_of(3, "cp") == topology.expert_group_of(3, "ep") == list(range(8))
