"""Lowered programs seen from Python: levels, slots, transports, limits; and closed forms."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.pipeline import (
    Costs,
    Lowering,
    Recompute,
    Schedule,
    build_schedule,
    schedule_catalog,
    validate_programs,
)

TRANSPORTS = ["per_channel", "per_pair", "per_direction", "per_rank"]


def test_a_program_has_three_levels_of_text() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    program = schedule.lower(Lowering(recompute=Recompute()))[1]
    assert program.to_text("compute") == "1F0 1B0 1F1 1B1"
    assert program.to_text() == (
        "1GATHER_PARAMS 1RECV_F0 1F0 1RECV_F1 1RECOMPUTE0 1B0 1SEND_B0 1RELEASE0 1F1 1RECOMPUTE1 "
        "1B1 1SEND_B1 1RELEASE1 1REDUCE_GRADS"
    )
    assert program.to_text("resources").startswith(
        "1GATHER_PARAMS 1RECV_F0<-0#0[0] 1F0[0,dropped] 1RECV_F1<-0#1[0] 1RECOMPUTE0[0] 1B0[0]"
    )
    assert [str(program.actions[i]) for i in program.dropped] == ["1F0", "1F1"]
    assert program.slot_counts().activations == [1]
    assert max(program.slots) == 0
    assert max(program.sequences) == 1
    with pytest.raises(ValueError, match="level is 'all'; it must be one of 'compute', 'data', "):
        program.to_text("all")


def test_slots_do_not_grow_with_the_microbatches() -> None:
    counts = []
    for m in (16, 64):
        schedule = build_schedule(
            "interleaved_1f1b", num_ranks=4, num_chunks=2, num_microbatches=m, group_size=4
        )
        rings = schedule.lower()[0].slot_counts()
        shared = schedule.lower(Lowering(slots="shared"))[0].slot_counts()
        counts.append((rings.activations, rings.graph_pairs, shared.activations))
    assert counts == [([8, 4], 12, [11])] * 2


@pytest.mark.parametrize(
    ("lowering", "message"),
    [
        (Lowering(batches=True), "batches need receives='in_order'"),
        (Lowering(ahead=-1), "ahead is -1"),
        (Lowering(recompute=Recompute(keep=-1)), "keep is -1"),
        (Lowering(recompute=Recompute(window=0)), "window is 0; it must be at least 1"),
        (Lowering(receives="late"), "receives is 'late'"),  # type: ignore[arg-type]
        (Lowering(slots="all"), "slots is 'all'"),  # type: ignore[arg-type]
    ],
)
def test_options_that_make_no_sense_are_refused(lowering: Lowering, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule("1f1b", num_ranks=2, num_microbatches=2).lower(lowering)


def test_validation_asks_for_the_transport() -> None:
    programs = build_schedule("1f1b", num_ranks=2, num_microbatches=4).lower()
    validate_programs(programs, "per_channel")
    with pytest.raises(ValueError, match=r"one queue per rank \(per_rank\)"):
        validate_programs(programs, transport="per_rank")
    with pytest.raises(ValueError, match="transport is 'tcp'; it must be one of 'per_channel'"):
        validate_programs(programs, transport="tcp")


def test_a_report_names_every_transport() -> None:
    schedule = build_schedule("zb_v", num_ranks=4, num_microbatches=8)
    assert list(schedule.transport_report()) == TRANSPORTS
    in_order = schedule.transport_report(Lowering(receives="in_order", batches=True))
    assert in_order == dict.fromkeys(TRANSPORTS)


@pytest.mark.parametrize("pairs", ["whole", "split"])
def test_pairs_of_1f1b_run_on_every_transport_with_as_many_slots_as_activations(
    pairs: Literal["whole", "split"],
) -> None:
    for name, chunks in (("1f1b", 1), ("interleaved_1f1b", 3)):
        schedule = build_schedule(
            name, num_ranks=3, num_chunks=chunks, num_microbatches=7, pairs=pairs
        )
        in_order = Lowering(receives="in_order", batches=True, recompute=Recompute(keep=1))
        assert schedule.transport_report(in_order) == dict.fromkeys(TRANSPORTS)
        schedule.lower(in_order)
        programs = schedule.lower(Lowering(slots="shared"))
        slots = [program.slot_counts().activations for program in programs]
        assert slots == [[peak] for peak in schedule.simulate().peak_in_flight]


def test_a_memory_limit_names_the_forward_that_exceeds_it() -> None:
    schedule = build_schedule("1f1b", num_ranks=4, num_microbatches=8)
    schedule.validate(memory_limit=4)
    schedule.validate(memory_limit=[4, 3, 2, 1])
    with pytest.raises(ValueError, match="does not fit") as caught:
        schedule.validate(memory_limit=3)
    assert (
        "rank 0 holds up to 4 activations, its limit is 3; the first too many is that of 0F3"
        in (str(caught.value))
    )
    assert ">0F3<" in str(caught.value)
    with pytest.raises(ValueError, match="memory_limit has 2 entries; give one for all ranks or 4"):
        schedule.validate(memory_limit=[4, 4])


def test_the_timeline_tells_what_decides() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    timeline = schedule.simulate(Costs(send=0.25))
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    assert [str(event.action) for event in path] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    assert timeline.exposed == [0.5, 0.25]


@st.composite
def named_schedules(draw: st.DrawFn) -> Schedule:
    info = draw(st.sampled_from([i for i in schedule_catalog() if i.name != "no_pipelining"]))
    p = 2 * draw(st.integers(1, 3))
    chunks = draw(st.integers(1, 3)) if info.num_chunks == 0 else None
    m = 2 * p + 2 * draw(st.integers(0, 6))
    return build_schedule(info.name, num_ranks=p, num_microbatches=m, num_chunks=chunks)


@settings(max_examples=60)
@given(named_schedules(), st.sampled_from(["ahead", "in_order"]), st.integers(0, 3))
def test_slots_are_as_many_as_the_simulation_holds(
    schedule: Schedule, receives: str, keep: int
) -> None:
    peaks = schedule.simulate().peak_in_flight
    schedule.validate(memory_limit=peaks)
    lowering = Lowering(
        receives=receives,  # type: ignore[arg-type]
        recompute=Recompute(keep=keep),
        batches=receives == "in_order",
        slots="shared",
    )
    for program, peak in zip(schedule.lower(lowering), peaks, strict=True):
        assert program.slot_counts().activations == [peak]
        rank_keeps = [a for i, a in enumerate(program.actions) if i not in program.dropped]
        assert len(rank_keeps) < len(program.actions) or keep >= peak
