"""Every named schedule: golden text, laws over many sizes and costs, closed forms, bounds."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from megacore.pipeline import (
    SCHEDULE_NAMES,
    Action,
    ActionKind,
    Costs,
    Schedule,
    ScheduleInfo,
    best_group_size,
    build_schedule,
    schedule_catalog,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "schedules"
CATALOG = {info.name: info for info in schedule_catalog()}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule of the catalog that can be built for the drawn sizes."""
    info = CATALOG[draw(st.sampled_from(SCHEDULE_NAMES))]
    p = 1 if info.name == "no_pipelining" else draw(st.integers(1, 7))
    many = info.num_chunks == 0
    try:
        return build_schedule(
            info.name,
            num_ranks=p,
            num_microbatches=draw(st.integers(1, 16)),
            num_chunks=draw(st.integers(1, 3)) if many else None,
            group_size=draw(st.none() | st.integers(1, 9)) if info.takes_group_size else None,
            warmup_multiplier=draw(st.sampled_from([None, 1, 2]))
            if info.takes_warmup_multiplier
            else None,
            pairs=draw(st.sampled_from([None, "whole", "split"])) if info.takes_pairs else None,
        )
    except ValueError as refusal:
        if not any(advice in str(refusal) for advice in ("Nearest legal", "needs", "use ")):
            raise AssertionError("the refusal does not say what would do") from refusal
        reject()


@st.composite
def costs_of(draw: st.DrawFn, num_stages: int) -> Costs:
    times = st.floats(0.1, 4.0) | st.just(0.0)
    per_stage = st.lists(times, min_size=num_stages, max_size=num_stages)
    return Costs(
        forward=draw(times | per_stage),
        backward_input=draw(times | per_stage),
        backward_weight=draw(times | per_stage),
        send=draw(st.sampled_from([0.0, 0.1, 2.0])),
    )


def microbatches_of(schedule: Schedule, stage: int) -> range:
    """The microbatches that flow through the chain of a stage."""
    chain = stage * schedule.num_chains // schedule.num_stages
    m, n = schedule.num_microbatches, schedule.num_chains
    return range(chain * m // n, (chain + 1) * m // n)


def kinds_of(info: ScheduleInfo) -> set[ActionKind]:
    split = {ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT}
    whole = {ActionKind.FORWARD, ActionKind.BACKWARD}
    if info.takes_pairs:
        return whole | split
    if not info.splits_backward:
        return whole
    # DualPipe runs whole backwards where they overlap with forwards.
    return whole | split if "dualpipe" in info.name else {ActionKind.FORWARD} | split


@given(schedules())
def test_every_stage_runs_each_of_its_microbatches_once_in_order(schedule: Schedule) -> None:
    for rank in range(schedule.num_ranks):
        actions = schedule.actions(rank)
        position = {action: i for i, action in enumerate(actions)}
        assert len(position) == len(actions)
        assert {action.kind for action in actions} <= kinds_of(CATALOG[schedule.name])
        for stage in schedule.stages(rank):
            for mb in microbatches_of(schedule, stage):
                forward = position.pop(Action(stage, ActionKind.FORWARD, mb))
                whole = position.pop(Action(stage, ActionKind.BACKWARD, mb), None)
                if whole is not None:
                    assert forward < whole
                    continue
                inputs = position.pop(Action(stage, ActionKind.BACKWARD_INPUT, mb))
                weights = position.pop(Action(stage, ActionKind.BACKWARD_WEIGHT, mb))
                assert forward < inputs < weights
        assert not position


@given(schedules())
def test_programs_are_proved_and_text_gives_the_schedule_back(schedule: Schedule) -> None:
    for receives in ("ahead", "in_order"):
        program = schedule.program(schedule.num_ranks - 1, receives=receives)  # type: ignore[arg-type]
        assert len(program) >= len(schedule.actions(schedule.num_ranks - 1))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    evaluation = schedule.forward_only()
    assert all(
        action.kind == ActionKind.FORWARD
        for rank in range(schedule.num_ranks)
        for action in evaluation.actions(rank)
    )


def naive_finish_times(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """Let every rank take its next action when its inputs are there, in rounds; no cleverness."""
    per_stage = {
        ActionKind.FORWARD: costs.forward,
        ActionKind.BACKWARD_INPUT: costs.backward_input,
        ActionKind.BACKWARD_WEIGHT: costs.backward_weight,
    }

    def duration(action: Action) -> float:
        if action.kind == ActionKind.BACKWARD:
            halves = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
            return sum(duration(Action(action.stage, half, 0)) for half in halves)
        cost = per_stage[action.kind]
        return cost if isinstance(cost, float) else cost[action.stage]

    owner = {s: rank for rank in range(schedule.num_ranks) for s in schedule.stages(rank)}
    chain_length = schedule.num_stages // schedule.num_chains
    output: dict[tuple[int, int], float] = {}
    gradient: dict[tuple[int, int], float] = {}
    end: dict[Action, float] = {}
    todo = {rank: schedule.actions(rank) for rank in range(schedule.num_ranks)}
    clock = dict.fromkeys(todo, 0.0)
    progress = True
    while progress:
        progress = False
        for rank, actions in todo.items():
            while actions:
                action = actions[0]
                stage, mb = action.stage, action.microbatch
                needed = []
                if action.kind == ActionKind.FORWARD and stage % chain_length > 0:
                    needed = [(output, stage - 1)]
                if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
                    needed = [(output, stage)]
                    if (stage + 1) % chain_length > 0:
                        needed.append((gradient, stage + 1))
                if action.kind == ActionKind.BACKWARD_WEIGHT:
                    needed = [(gradient, stage)]
                if any((source, mb) not in made for made, source in needed):
                    break
                arrivals = [
                    made[source, mb] + (costs.send if owner[source] != rank else 0.0)
                    for made, source in needed
                ]
                clock[rank] = end[action] = max([clock[rank], *arrivals]) + duration(action)
                if action.kind == ActionKind.FORWARD:
                    output[stage, mb] = clock[rank]
                elif action.kind != ActionKind.BACKWARD_WEIGHT:
                    gradient[stage, mb] = clock[rank]
                actions.pop(0)
                progress = True
    assert not any(todo.values())
    return end


@given(schedules(), st.data())
def test_simulation_agrees_with_a_naive_one(schedule: Schedule, data: st.DataObject) -> None:
    assume(not any(schedule.overlaps(rank) for rank in range(schedule.num_ranks)))
    costs = data.draw(costs_of(schedule.num_stages))
    end = naive_finish_times(schedule, costs)
    timeline = schedule.simulate(costs)
    for event in timeline.events:
        assert event.end == pytest.approx(end[event.action], rel=1e-12, abs=1e-12)
    assert timeline.makespan == pytest.approx(max(end.values()), rel=1e-12)


@given(schedules(), st.data())
def test_no_schedule_beats_the_bound(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(costs_of(schedule.num_stages))
    timeline = schedule.simulate(costs)
    bound = schedule.lower_bound(costs)
    assert bound.value <= timeline.makespan * (1 + 1e-12) + 1e-12
    assert bound.value == max(bound.by_reason.values()) == bound.by_reason[bound.reason]
    # More memory allows no less, but for the order of the sums.
    many = schedule.num_stages * schedule.num_microbatches
    assert schedule.lower_bound(costs, memory_limit=many).value <= bound.value * (1 + 1e-12)


# Makespan with F = I = W = 1, for m >= 2p; the second entry is the largest number of activations.
FORMS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "gpipe": lambda p, m: (3 * (m + p - 1), m),
    "1f1b": lambda p, m: (3 * (m + p - 1), min(p, m)),
    "zb_h1": lambda p, m: (3 * m + p - 1, p),
    "zb_h2": lambda p, m: (3 * m + p - 1, 2 * p - 1),
    "zb_v": lambda p, m: (6 * m + p - 1, 2 * p),
    "v_half": lambda p, m: (6 * m + 3 * p - (7 if p % 2 == 0 else 4), 2 * ((p + 2) // 2)),
    "v_min": lambda p, m: (6 * m + 4 * p - (7 if p % 3 == 0 else 5), 2 * ((p + 4) // 3)),
    "dualpipe_v": lambda p, m: (6 * m + 2 * (p - 1), 2 * p + 1),
}


@given(name=st.sampled_from(sorted(FORMS)), p=st.integers(3, 24), surplus=st.integers(0, 40))
def test_closed_forms_hold(name: str, p: int, surplus: int) -> None:
    m = 2 * p + surplus
    timeline = build_schedule(name, num_ranks=p, num_microbatches=m).simulate()
    makespan, peak = FORMS[name](p, m)
    assert (timeline.makespan, max(timeline.peak_in_flight)) == (makespan, peak)


@given(
    name=st.sampled_from(["interleaved_1f1b", "looped_bfs", "interleaved_zb"]),
    p=st.integers(1, 8),
    v=st.integers(1, 4),
    m=st.integers(1, 30),
)
def test_looped_schedules_reach_their_closed_form_for_any_number_of_microbatches(
    name: str, p: int, v: int, m: int
) -> None:
    assume(m >= p)
    schedule = build_schedule(name, num_ranks=p, num_chunks=v, num_microbatches=m)
    bubble = (p - 1) * (1 if name == "interleaved_zb" else 3)
    assert schedule.simulate().makespan == 3 * v * m + bubble
    assert schedule.lower_bound().value == 3 * v * m + bubble  # none with this memory is faster


@given(half=st.integers(1, 8), surplus=st.integers(0, 10))
def test_dualpipe_reaches_its_closed_form_and_overlap_pays(half: int, surplus: int) -> None:
    p, m = 2 * half, 4 * half + 2 * surplus
    schedule = build_schedule("dualpipe", num_ranks=p, num_microbatches=m)
    timeline = schedule.simulate()
    assert timeline.makespan == 3 * m + p - 2
    assert timeline.peak_in_flight == [p + 1] * p
    pairs = sum(len(schedule.overlaps(rank)) for rank in range(p))
    assert pairs > 0
    assert schedule.simulate(Costs(overlap=1.0)).makespan < timeline.makespan


@given(
    p=st.integers(1, 8),
    v=st.integers(1, 4),
    m=st.integers(1, 30),
    overlap=st.sampled_from([0.0, 0.25, 1.0]),
)
def test_pairs_of_interleaving_reach_their_closed_form(
    p: int, v: int, m: int, overlap: float
) -> None:
    assume(m >= p)
    sizes = {"num_ranks": p, "num_chunks": v, "num_microbatches": m}
    schedules = {
        pairs: build_schedule("interleaved_1f1b", pairs=pairs, **sizes)  # type: ignore[arg-type]
        for pairs in ("whole", "split")
    }
    before = (v - 1) * best_group_size(**sizes) + 1
    pairs_of_last = max(v * m - before, 0)
    makespan = {
        pairs: schedule.simulate(Costs(overlap=overlap)).makespan
        for pairs, schedule in schedules.items()
    }
    # F = I = W = 1: a pair hides `overlap` of its F.
    assert makespan["whole"] == 3 * v * m + 3 * (p - 1) - overlap * pairs_of_last
    if overlap == 0 or v == 1:
        assert makespan["split"] == 3 * v * m + 2 * (p - 1) - overlap * pairs_of_last
    for schedule in schedules.values():
        assert schedule.simulate().peak_in_flight == [
            min(2 * (p - 1 - rank) + before + 1, v * m) for rank in range(p)
        ]
        assert len(schedule.overlaps(p - 1)) == pairs_of_last


def golden_cases() -> dict[str, Schedule]:
    def small(name: str, p: int, m: int, v: int | None = None) -> Schedule:
        return build_schedule(name, num_ranks=p, num_microbatches=m, num_chunks=v)

    return {
        "no_pipelining_v2_m2": small("no_pipelining", 1, 2, 2),
        "looped_bfs_p2_v2_m3": small("looped_bfs", 2, 3, 2),
        "group_interleaved_p4_v2_m6": build_schedule(
            "group_interleaved", num_ranks=4, num_chunks=2, num_microbatches=6, group_size=3
        ),
        "interleaved_p4_v2_m8_w1": build_schedule(
            "interleaved_1f1b",
            num_ranks=4,
            num_chunks=2,
            num_microbatches=8,
            warmup_multiplier=1,
        ),
        "zb_h1_p4_m6": small("zb_h1", 4, 6),
        "zb_h2_p4_m8": small("zb_h2", 4, 8),
        "interleaved_zb_p2_v2_m4": small("interleaved_zb", 2, 4, 2),
        "zb_v_p4_m8": small("zb_v", 4, 8),
        "v_half_p4_m8": small("v_half", 4, 8),
        "v_min_p4_m8": small("v_min", 4, 8),
        "1f1b_v_p4_m6": small("1f1b_v", 4, 6),
        "interleaved_p4_v2_m8_pairs": build_schedule(
            "interleaved_1f1b", num_ranks=4, num_chunks=2, num_microbatches=8, pairs="whole"
        ),
        "interleaved_p2_v2_m4_split_pairs": build_schedule(
            "interleaved_1f1b", num_ranks=2, num_chunks=2, num_microbatches=4, pairs="split"
        ),
        "1f1b_p4_m8_pairs": build_schedule("1f1b", num_ranks=4, num_microbatches=8, pairs="whole"),
        "dualpipe_v_p2_m6": small("dualpipe_v", 2, 6),
        "dualpipe_p4_m8": small("dualpipe", 4, 8),
    }


@pytest.mark.parametrize("file", golden_cases())
def test_text_and_grid_are_the_golden_ones(file: str) -> None:
    schedule = golden_cases()[file]
    text = schedule.to_text() + "\n" + schedule.to_text(grid=True) + "\n"
    assert text == (GOLDEN / f"{file}.txt").read_text()


def test_the_pages_have_every_schedule() -> None:
    root = GOLDEN.parents[2]
    rows = re.findall(r"^\| `(\w+)` \|", (root / "docs" / "schedules.md").read_text(), re.MULTILINE)
    assert [name for name in rows if name in CATALOG] == list(CATALOG), (
        "the table of docs/schedules.md must have a row per schedule, in the order of the catalog"
    )
    counts = re.findall(r"(\d+)(?: pipeline)? schedules\]", (root / "README.md").read_text())
    assert set(counts) == {str(len(CATALOG))}, "README.md must count the schedules of the catalog"


def test_the_catalog_describes_every_schedule() -> None:
    assert tuple(CATALOG) == SCHEDULE_NAMES
    assert all(
        info.summary and info.placement in ("loop", "v", "bidirectional")
        for info in CATALOG.values()
    )
    assert {info.name for info in CATALOG.values() if info.takes_group_size} == {
        "interleaved_1f1b",
        "group_interleaved",
        "interleaved_zb",
    }
    assert [info.name for info in CATALOG.values() if info.takes_pairs] == [
        "1f1b",
        "interleaved_1f1b",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("zb_v", 2, 4, {"num_chunks": 3}),
            "num_chunks is 3; use num_chunks 2 with schedule 'zb_v'",
        ),
        (("zb_v", 2, 4, {"group_size": 2}), "has no groups; leave it out"),
        (("zb_h1", 2, 4, {"warmup_multiplier": 1}), "has a fixed warmup"),
        (("dualpipe_v", 4, 8, {"pairs": "whole"}), "choose one of 1f1b, interleaved_1f1b"),
        (("1f1b", 4, 8, {"pairs": "both"}), "pairs must be 'whole', 'split' or None, got 'both'"),
        (("auto", 4, 8, {"pairs": "split"}), "'auto' finds its own"),
        (("dualpipe_v", 4, 7, {}), "dualpipe_v needs at least 2 per rank: 8"),
        (("dualpipe", 3, 8, {}), "needs an even number, for example 4"),
        (("dualpipe", 4, 9, {}), "use 8 or 10"),
        (("no_pipelining", 2, 8, {}), "runs on 1 rank"),
        (("group_interleaved", 8, 16, {"group_size": 3}), "at least half of the 8 ranks: 4"),
        (("interleaved_1f1b", 2, 4, {"warmup_multiplier": 3}), "must be 1 or 2"),
        (("v_half", 0, 4, {}), "num_ranks must be at least 1, got 0"),
        (("gpipe", 100_000, 100_000, {}), "use fewer microbatches (at most 1342)"),
        (("gpipe", 200_000_000, 8, {}), "use fewer ranks (at most 16777216)"),
        (
            ("looped_bfs", 1, 8, {"num_chunks": 200_000_000}),
            "use fewer chunks (at most 16777216)",
        ),
        (
            ("looped_bfs", 1, 200_000_000, {"num_chunks": 200_000_000}),
            "the three sizes may multiply to at most 134217728",
        ),
        (("v_min", 100_000, 100_000, {}), "made for up to 4096 ranks"),
        (("v_min", 4_096, 100_000, {}), "use fewer microbatches (at most 10922)"),
        # With as few microbatches as there is room for, these ranks would be too many.
        (("dualpipe_v", 20_000, 40_000, {}), "use fewer ranks (at most 1118)"),
        (("dualpipe_v", 10_000_000, 8, {}), "use fewer ranks (at most 4)"),
        (("zbv", 2, 4, {}), "did you mean 'zb_v'"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_legal_ones(
    arguments: tuple[str, int, int, dict[str, int]], sentence: str
) -> None:
    name, p, m, options = arguments
    with pytest.raises(ValueError, match=re.escape(sentence)):
        build_schedule(name, num_ranks=p, num_microbatches=m, **options)


def test_bounds_refuse_what_makes_no_sense() -> None:
    schedule = build_schedule("zb_v", num_ranks=3, num_microbatches=6)
    with pytest.raises(ValueError, match="memory_limit has 2 entries; give one for all ranks or 3"):
        schedule.lower_bound(memory_limit=[4, 4])
    with pytest.raises(ValueError, match="a rank needs room for 1 activation"):
        schedule.lower_bound(memory_limit=0)
    with pytest.raises(ValueError, match="hold without overlap"):
        schedule.lower_bound(Costs(overlap=0.5))
    with pytest.raises(ValueError, match="forward-only"):
        schedule.forward_only().lower_bound()
    with pytest.raises(ValueError, match="'overlap' is 2"):
        schedule.simulate(Costs(overlap=2.0))
