"""Lowered programs and timelines seen from Python: text, recomputation, limits."""

from __future__ import annotations

import subprocess
import sys
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
)
from megacore.pipeline.lowering import Receives

RECEIVES: tuple[Receives, ...] = ("ahead", "in_order")


def test_a_program_has_a_text() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    program = schedule.lower(Lowering(recompute=Recompute()))[1]
    assert program.to_text() == (
        "1RECV_F0 1F0 1RECV_F1 1RECOMPUTE0 1B0 1SEND_B0 1F1 1RECOMPUTE1 1B1 1SEND_B1"
    )
    assert [str(program.actions[i]) for i in program.dropped] == ["1F0", "1F1"]


@pytest.mark.parametrize(
    ("lowering", "message"),
    [
        (Lowering(ahead=-1), "ahead is -1"),
        (Lowering(recompute=Recompute(keep=-1)), "keep is -1"),
        (Lowering(recompute=Recompute(window=0)), "window must be at least 1, or None"),
        (Lowering(receives="late"), "receives must be 'ahead' or 'in_order', got 'late'"),  # type: ignore[arg-type]
    ],
)
def test_options_that_make_no_sense_are_refused(lowering: Lowering, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule("1f1b", num_ranks=2, num_microbatches=2).lower(lowering)


@pytest.mark.parametrize("receives", RECEIVES)
@pytest.mark.parametrize("recompute", [None, Recompute(keep=1)])
def test_the_program_of_one_rank_is_that_of_all_ranks(
    receives: Receives, recompute: Recompute | None
) -> None:
    for info in schedule_catalog():
        if info.name == "no_pipelining":
            continue
        schedule = build_schedule(info.name, num_ranks=4, num_microbatches=8)
        of_all = schedule.lower(Lowering(receives=receives, recompute=recompute))
        for rank in (2, 0, 3, 1):  # the first proves those of all
            assert schedule.program(rank, receives=receives, recompute=recompute) == of_all[rank]


# Its own process. `ru_maxrss` would start with the peak of the process that starts it.
_PEAK = """
import re
from megacore import _core
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
before = peak()
sizes = dict(num_ranks=64, num_microbatches=4096, num_chunks=None)
options = dict(group_size=None, warmup_multiplier=None, pairs=None)
schedule = _core.build_schedule("zb_v", **sizes, **options)
schedule.validate()
_core.lower_rank(schedule, 31, in_order=False, ahead=1, recompute=None, prove=True)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_the_proof_does_not_hold_the_programs_of_all_ranks() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) <= 80  # MiB; 108 with the programs of all ranks


@pytest.mark.parametrize("pairs", ["whole", "split"])
def test_pairs_of_1f1b_run_with_receives_ahead_and_in_order(
    pairs: Literal["whole", "split"],
) -> None:
    for name, chunks in (("1f1b", 1), ("interleaved_1f1b", 3)):
        schedule = build_schedule(
            name, num_ranks=3, num_chunks=chunks, num_microbatches=7, pairs=pairs
        )
        for receives in RECEIVES:
            schedule.lower(Lowering(receives=receives, recompute=Recompute(keep=1)))


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
@given(named_schedules(), st.sampled_from(RECEIVES), st.integers(0, 3))
def test_ranks_recompute_unless_they_keep_all_that_the_simulation_holds(
    schedule: Schedule, receives: Receives, keep: int
) -> None:
    peaks = schedule.simulate().peak_in_flight
    schedule.validate(memory_limit=peaks)
    lowering = Lowering(receives=receives, recompute=Recompute(keep=keep))
    for program, peak in zip(schedule.lower(lowering), peaks, strict=True):
        rank_keeps = [a for i, a in enumerate(program.actions) if i not in program.dropped]
        assert len(rank_keeps) < len(program.actions) or keep >= peak
