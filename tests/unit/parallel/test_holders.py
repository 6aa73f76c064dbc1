"""Who holds the same parameters, with one and two copies of the model in a pipeline."""

from __future__ import annotations

import pytest

from megacore.errors import ConfigError
from megacore.parallel import Topology
from megacore.parallel.replicas import embedding_groups, holder_groups

ORDERS = ("tp-cp-ep-dp-pp", "tp-ep-cp-dp-pp", "pp-tp-cp-ep-dp")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize("pp", [2, 4, 6])
def test_holders_differ_in_data_parallelism_and_by_a_mirrored_position_only(
    order: str, expert: bool, pp: int
) -> None:
    topology = Topology(world_size=8 * pp, tp=2, pp=pp, ep=2, etp=1, order=order)
    groups = holder_groups(topology, expert=expert, copies=2)
    view = topology.expert if expert else topology.dense
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(8 * pp))
    for ranks in groups:
        assert ranks == sorted(ranks)
        assert len(ranks) == 2 * (topology.expert_dp if expert else topology.dp)
        places = [view.coordinates(rank) for rank in ranks]
        positions = {place["pp"] for place in places}
        assert len(positions) == 2
        assert sum(positions) == pp - 1
        rest = {tuple(v for k, v in p.items() if k not in ("pp", "dp", "edp")) for p in places}
        assert len(rest) == 1, places


def test_one_copy_is_held_by_data_and_context_parallel_ranks() -> None:
    topology = Topology(world_size=16, tp=2, cp=2, pp=2)
    assert holder_groups(topology, expert=False) == topology.dense.get_ranks("dp-cp")
    assert holder_groups(topology, expert=True) == topology.expert.get_ranks("edp")


@pytest.mark.parametrize(("pp", "copies"), [(3, 2), (1, 2), (4, 3)])
def test_copies_that_do_not_lie_on_pairs_are_refused(pp: int, copies: int) -> None:
    topology = Topology(world_size=12, pp=pp)
    with pytest.raises(ConfigError, match=r"one, or two on an even number of ranks"):
        holder_groups(topology, expert=False, copies=copies)


def test_the_second_copy_shares_its_embedding_between_the_mirrored_ends() -> None:
    topology = Topology(world_size=8, tp=2, pp=4)
    assert embedding_groups(topology, (0, -1)) == [[0, 6], [1, 7]]
    expected = [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert embedding_groups(topology, (0, 1), copies=2) == expected
    assert embedding_groups(topology, (0, 0), copies=2) == []
