"""Values, texts and mistakes of ``RankGenerator`` and ``Topology``."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time

import numpy as np
import pytest

from megacore.errors import ConfigError
from megacore.parallel import RankGenerator, Topology
from megacore.parallel.topology import groups_text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"world_size": 12, "tp": 2, "pp": 4},
            "world_size 12 is not divisible by tp 2 x cp 1 x pp 4 = 8 (dense layers); nearest "
            "legal settings: world_size 8 or 16, or tp 1 or 3, or pp 3",
        ),
        (
            {"world_size": 4, "tp": 8},
            "world_size 4 is not divisible by tp 8 x cp 1 x pp 1 = 8 (dense layers); nearest legal "
            "settings: world_size 8, or tp 4",
        ),
        (
            {"world_size": 16, "tp": 4, "pp": 2, "ep": 4},
            "etp 4 x ep 4 x pp 2 = 32 (expert layers; etp defaults to tp)",
        ),
        ({"world_size": 8, "tp": 0}, "tp is 0; an axis size must be at least 1"),
        ({"world_size": 0}, "world_size must be between 1 and 2147483647, got 0"),
        ({"world_size": 8, "tp": 2.5}, "tp must be a whole number, got 2.5"),
        ({"world_size": 8, "pp": "2"}, "pp must be a whole number, got '2'"),
        ({"world_size": 2**70}, "it must fit 64 bits"),
        (
            {"world_size": 8, "tp": 2, "pp": 2, "order": "tp-dp"},
            'order "tp-dp" lacks pp, but pp has size 2; add it, as in "tp-dp-pp", or set pp to 1',
        ),
        (
            {"world_size": 8, "etp": 2, "order": "dp-pp"},
            'order "dp-pp" lacks tp, but etp has size 2',
        ),
        ({"world_size": 8, "order": "tp-xp-dp"}, 'unknown axis "xp"; the axes are tp, cp, ep, dp'),
        ({"world_size": 8, "order": "TP-dp"}, 'did you mean "tp"?'),
        ({"world_size": 8, "order": "tp-dp-tp"}, "names axis tp twice"),
        ({"world_size": 8, "order": "tp--dp"}, "has an empty piece"),
        (
            {
                "world_size": 16,
                "tp": 2,
                "cp": 2,
                "pp": 2,
                "ep": 2,
                "etp": 1,
                "order": "tp-cp-pp-ep-dp",
            },
            "stages are tp 2 x cp 2 = 4 ranks apart in the dense view but 1 in the expert view; "
            'put pp last ("tp-cp-ep-dp-pp"); nearest legal settings: pp 1, or etp 4',
        ),
    ],
)
def test_a_mistake_shows_the_values_and_the_fix(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Topology(**settings)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize("world_size", [6, 10, 12, 18, 30, 96])
@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 2, "pp": 4}, {"cp": 5, "ep": 4, "etp": 1}])
def test_suggested_settings_are_legal(world_size: int, layout: dict[str, int]) -> None:
    try:
        Topology(world_size=world_size, **layout)
    except ConfigError as error:
        suggestions = str(error).partition("nearest legal settings: ")[2].split(", or ")
        for suggestion in suggestions:
            name, _, values = suggestion.partition(" ")
            for value in values.split(" or "):
                Topology(**{"world_size": world_size, **layout, name: int(value)})
        assert suggestions != [""]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.dense.groups("ep"), 'unknown axis "ep"; the axes are tp, cp, dp, pp'),
        (lambda t: t.expert.groups("cp"), 'unknown axis "cp"; the axes are etp, ep, edp, pp'),
        (lambda t: t.dense.groups("tp-tp"), "names axis tp twice"),
        (lambda t: t.dense.groups(""), "has an empty piece"),
        (lambda t: t.expert.groups("etp-tp"), "names axis etp twice, once by its dense name"),
        (lambda t: t.coordinates(16), "rank 16 is outside this layout, which has ranks 0 to 15"),
        (lambda t: t.group_of(-1, "tp"), "rank -1 is outside this layout"),
        (lambda t: t.dense.rank(tp=4, dp=0, pp=0), "tp coordinate 4 is outside [0, 4)"),
        (lambda t: t.dense.rank(tp=0, pp=0), "the coordinate of axis dp (size 2) is missing"),
        (lambda t: t.dense.rank(tp=0, dp=0, pp=0, ep=0), "unknown axis 'ep'"),
    ],
)
def test_a_wrong_question_is_answered_with_the_legal_ones(call: object, message: str) -> None:
    topology = Topology(world_size=16, tp=4, pp=2, ep=4, etp=1)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call(topology)  # type: ignore[operator]
    assert message in str(caught.value)


def test_the_expert_view_understands_dense_names() -> None:
    expert = Topology(world_size=16, tp=4, pp=2, ep=4, etp=1).expert
    assert expert.get_ranks("dp") == expert.get_ranks("edp")
    assert expert.get_ranks("tp-ep") == expert.get_ranks("etp-ep")


def test_axes_of_size_one_may_be_left_out_of_order_and_coordinates() -> None:
    ranks = RankGenerator(tp=2, dp=3, order="dp-tp")
    assert ranks.sizes == {"dp": 3, "tp": 2, "cp": 1, "ep": 1, "pp": 1}
    assert ranks.rank(tp=1, dp=2) == 5
    assert ranks.get_ranks("pp") == [[rank] for rank in range(6)]


def test_rank_offset_shifts_everything() -> None:
    ranks = RankGenerator(tp=2, dp=2, rank_offset=8)
    assert ranks.get_ranks("dp") == [[8, 10], [9, 11]]
    assert ranks.coordinates(11)["dp"] == 1


def test_layouts_are_values() -> None:
    topology = Topology(world_size=16, tp=4, pp=2, ep=4, etp=1)
    same = Topology(world_size=16, tp=4, pp=2, ep=4, etp=1)
    assert topology == same
    assert hash(topology) == hash(same)
    assert topology != Topology(world_size=16, tp=4, pp=2)
    assert topology.dense != topology.expert
    for value in (topology, topology.dense, topology.expert, RankGenerator(tp=2, rank_offset=3)):
        assert pickle.loads(pickle.dumps(value)) == value
    assert eval(repr(topology)) == topology


def test_layouts_cannot_be_changed() -> None:
    topology = Topology(world_size=4, tp=2)
    with pytest.raises(AttributeError):
        topology.tp = 4  # type: ignore[misc]


def test_describe_names_every_axis_of_both_views() -> None:
    text = Topology(world_size=16, tp=4, pp=2, ep=4, etp=1).describe()
    assert "dense layers: tp 4 x cp 1 x dp 2 x pp 2" in text
    assert "expert layers: etp 1 x ep 4 x edp 2 x pp 2" in text
    assert "  edp      2       4  [0, 4] [1, 5] [2, 6] [3, 7] ... 4 more" in text


def test_long_groups_are_counted_not_shown() -> None:
    groups = np.arange(2_000_000, dtype=np.int32).reshape(2, -1)
    assert groups_text(groups, max_groups=1, max_ranks=2) == [
        "[0, 1, ... 999,998 more]",
        "... 1 more",
    ]


def test_a_million_ranks_and_every_token_take_well_under_a_second() -> None:
    topology = Topology(world_size=1 << 20, tp=8, cp=2, pp=16, ep=8)
    start = time.perf_counter()
    for token in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp", "tp-dp", "tp-dp-cp"):
        assert topology.dense.groups(token).size == 1 << 20
    for token in ("etp", "ep", "edp", "etp-ep", "etp-ep-pp"):
        assert topology.expert.groups(token).size == 1 << 20
    assert time.perf_counter() - start < 0.5


def test_groups_outlive_the_layout_they_came_from() -> None:
    groups = RankGenerator(tp=2, dp=2).groups("dp")
    assert groups.tolist() == [[0, 2], [1, 3]]
    groups[0, 0] = 7
    assert RankGenerator(tp=2, dp=2).groups("dp")[0, 0] == 0


def test_layouts_need_no_torch() -> None:
    code = "import sys, megacore.parallel; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
