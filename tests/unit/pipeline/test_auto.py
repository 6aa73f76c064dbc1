"""The auto schedule: valid, within memory, never slower than what has a name, with a true bound."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.pipeline import Certificate, Costs, Schedule, build_schedule, schedule_catalog


def certificate_of(schedule: Schedule) -> Certificate:
    assert schedule.certificate is not None
    return schedule.certificate


def held_at_most(schedule: Schedule, sizes: list[int]) -> list[int]:
    """Recount memory from the actions: from F until B or W."""
    peaks = []
    for rank in range(schedule.num_ranks):
        held = peak = 0
        for action in schedule.actions(rank):
            kind = str(action).lstrip("0123456789")[0]
            held += sizes[action.stage] if kind == "F" else 0
            peak = max(peak, held)
            held -= sizes[action.stage] if kind in "BW" else 0
        assert held == 0
        peaks.append(peak)
    return peaks


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    placement = draw(st.sampled_from(["loop", "v"]))
    num_ranks = draw(st.integers(1, 5))
    num_chunks = 2 if placement == "v" else draw(st.integers(1, 3))
    num_stages = num_ranks * num_chunks
    eighths = st.integers(0, 24).map(lambda n: n / 8)
    times = st.one_of(eighths, st.lists(eighths, min_size=num_stages, max_size=num_stages))
    sizes = draw(st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages))
    stages = [
        [s for s in range(num_stages) if rank_of(s, placement, num_ranks) == rank]
        for rank in range(num_ranks)
    ]
    needs = [sum(sizes[s] for s in own) for own in stages]
    limit = draw(
        st.one_of(
            st.none(),
            st.integers(max(needs), 4 * max(needs)),
            st.tuples(*(st.integers(need, 4 * need) for need in needs)).map(list),
        )
    )
    return {
        "placement": placement,
        "num_ranks": num_ranks,
        "num_chunks": num_chunks,
        "num_microbatches": draw(st.integers(1, 11)),
        "split_backward": draw(st.booleans()),
        "memory_limit": limit,
        "activation_size": sizes,
        "costs": Costs(
            forward=draw(times),
            backward_input=draw(times),
            backward_weight=draw(times),
            send=draw(st.integers(0, 16)) / 16,
        ),
    }


def rank_of(stage: int, placement: str, num_ranks: int) -> int:
    if placement == "v" and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage
    return stage % num_ranks


@settings(max_examples=60, deadline=None)
@given(problems())
def test_random_problems_give_a_valid_schedule_within_memory_and_never_below_the_bound(
    problem: dict[str, Any],
) -> None:
    schedule = build_schedule("auto", effort="fast", **problem)
    certificate = certificate_of(schedule)
    schedule.validate()
    peaks = held_at_most(schedule, problem["activation_size"])
    assert peaks == certificate.peak_memory
    limit = problem["memory_limit"]
    if limit is not None:
        limits = [limit] * problem["num_ranks"] if isinstance(limit, int) else limit
        assert all(peak <= room for peak, room in zip(peaks, limits, strict=True))
    assert schedule.simulate(problem["costs"]).makespan == pytest.approx(certificate.makespan)
    assert certificate.bound.value <= certificate.makespan + 1e-9
    assert certificate.is_optimal or certificate.gap > 0
    assert all(certificate.makespan <= makespan + 1e-9 for makespan in certificate.named.values())


def fitting_named_schedules(problem: dict[str, Any]) -> dict[str, float]:
    """Build every named schedule for the same problem here, and time those that fit."""
    makespans = {}
    for info in schedule_catalog():
        if info.placement != problem["placement"]:
            continue
        if info.splits_backward != problem["split_backward"]:
            continue
        try:
            schedule = build_schedule(
                info.name,
                num_ranks=problem["num_ranks"],
                num_chunks=problem["num_chunks"],
                num_microbatches=problem["num_microbatches"],
            )
        except ValueError:
            continue
        sizes, limit = problem["activation_size"], problem["memory_limit"]
        if limit is not None:
            limits = [limit] * problem["num_ranks"] if isinstance(limit, int) else limit
            peaks = held_at_most(schedule, sizes)
            if any(peak > room for peak, room in zip(peaks, limits, strict=True)):
                continue
        makespans[info.name] = schedule.simulate(problem["costs"]).makespan
    return makespans


@settings(max_examples=40, deadline=None)
@given(problems())
def test_no_named_schedule_that_fits_is_faster(problem: dict[str, Any]) -> None:
    certificate = certificate_of(build_schedule("auto", effort="fast", **problem))
    named = fitting_named_schedules(problem)
    assert all(certificate.makespan <= makespan + 1e-9 for makespan in named.values())
    assert named.keys() <= certificate.named.keys()
    for name, makespan in named.items():
        assert certificate.named[name] == pytest.approx(makespan)


@settings(max_examples=10, deadline=None)
@given(problems(), st.sampled_from(["fast", "thorough"]))
def test_the_same_problem_gives_the_same_result_twice(problem: dict[str, Any], effort: str) -> None:
    first = build_schedule("auto", effort=effort, **problem)
    second = build_schedule("auto", effort=effort, **problem)
    assert first == second
    assert certificate_of(first).winner == certificate_of(second).winner
    assert certificate_of(first).makespan == certificate_of(second).makespan


def test_a_limit_below_one_microbatch_is_refused_with_the_smallest_that_works() -> None:
    problem: dict[str, Any] = {"num_ranks": 4, "num_microbatches": 8, "placement": "v"}
    with pytest.raises(ValueError, match=r"memory_limit is 1, .* the smallest limit .* is 2"):
        build_schedule("auto", memory_limit=1, **problem)
    assert certificate_of(build_schedule("auto", memory_limit=2, **problem)).peak_memory == [2] * 4
    sizes = [5, 1, 1, 1, 1, 1, 1, 3]
    with pytest.raises(ValueError, match="holds 8 on rank 0; the smallest limit"):
        build_schedule("auto", memory_limit=7, activation_size=sizes, **problem)
    build_schedule("auto", memory_limit=8, activation_size=sizes, **problem)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "ring"}, "placement must be 'loop' or 'v', got 'ring'"),
        ({"placement": "v", "num_chunks": 3}, "num_chunks is 3; a V has 2 stages per rank"),
        ({"effort": "much"}, "effort must be 'fast' or 'thorough', got 'much'"),
        ({"placement": ""}, "placement must be 'loop' or 'v', got ''"),
        ({"num_chunks": 0}, "num_chunks must be at least 1, got 0"),
        ({"memory_limit": [4, 4]}, "memory_limit has 2 entries"),
        ({"memory_limit": []}, "memory_limit has no entries; give one, or one per rank"),
        ({"memory_limit": 0}, "memory_limit is 0"),
        ({"activation_size": [1, 1]}, "activation_size has 2 entries"),
        ({"activation_size": 0}, "activation_size must be at least 1, got 0"),
        ({"activation_size": 2**62}, "activation_size is .* so choose a larger unit"),
        (
            {"costs": Costs(forward=-1.0)},
            "cost 'forward' must be a finite number of at least 0, got -1",
        ),
        ({"costs": Costs(overlap=0.5)}, "cost 'overlap' is 0.5"),
        ({"group_size": 4}, "group_size is 4, but 'auto' finds its own; leave it out"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, got 0"),
        ({"num_microbatches": 2**31 - 1}, "with 4 stages 'auto' searches with up to 1398101: choo"),
        ({"num_chunks": 2**31 - 1}, "4 ranks x 2147483647 chunks are 8589934588 stages; 'auto' "),
        ({"costs": Costs(forward=1e308)}, "the costs add up to more than a number can hold"),
        ({"costs": Costs(send=1e308)}, "the costs add up to more than a number can hold"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule("auto", **{"num_ranks": 4, "num_microbatches": 8, **options})


def test_named_schedules_refuse_the_options_of_auto() -> None:
    with pytest.raises(ValueError, match="memory_limit is for schedule 'auto' only"):
        build_schedule("1f1b", num_ranks=2, num_microbatches=2, memory_limit=4)


def test_a_certificate_reads_like_a_verdict_and_survives_pickling() -> None:
    schedule = build_schedule(
        "auto", num_ranks=4, num_microbatches=8, placement="v", memory_limit=8
    )
    text = str(certificate_of(schedule))
    assert text.startswith("makespan 51: no order of actions is faster")
    assert "the best named schedule that fits is zb_v with 51" in text
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert build_schedule("1f1b", num_ranks=2, num_microbatches=2).certificate is None


@pytest.mark.parametrize(
    ("placement", "num_ranks", "num_microbatches", "memory_limit", "send", "split", "gap"),
    [
        ("v", 8, 64, 24, 0.1, False, 0.01),
        ("v", 8, 32, 32, 0.05, False, 0.01),
        ("v", 8, 8, 16, 0.1, True, 0.023),
        ("v", 16, 16, 32, 0.1, True, 0.027),
        ("loop", 4, 16, 8, 0.05, False, 0.016),
    ],
)
def test_cells_that_are_hard_to_fill_come_near_their_bound(
    placement: str,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: int,
    send: float,
    split: bool,
    gap: float,
) -> None:
    schedule = build_schedule(
        "auto",
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=2,
        placement=placement,
        memory_limit=memory_limit,
        costs=Costs(send=send),
        split_backward=split,
    )
    certificate = certificate_of(schedule)
    assert certificate.gap <= gap
    assert schedule.simulate(Costs(send=send)).makespan == pytest.approx(certificate.makespan)
    schedule.validate(memory_limit=memory_limit)


def test_evaluation_has_the_order_of_every_schedule() -> None:
    schedule = build_schedule("auto", num_ranks=2, num_microbatches=4, memory_limit=2)
    forward = build_schedule(
        "auto", num_ranks=2, num_microbatches=4, memory_limit=2, forward_only=True
    )
    assert forward.is_forward_only
    assert forward == schedule.forward_only()
