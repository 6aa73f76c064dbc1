"""The trace: what viewers require of it, and that it shows the schedule."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import pytest

from megacore.pipeline import Costs, Schedule, TimedAction, build_schedule, schedule_catalog
from megatrain.view import measured_trace, simulated_trace

Trace = dict[str, Any]


def check_trace(trace: Trace) -> None:
    """The rules of the Trace Event Format that viewers rely on."""
    json.dumps(trace, allow_nan=False)
    events = trace["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    timed = [event for event in events if event["ph"] != "M"]
    assert {event["ph"] for event in timed} <= {"X", "C", "s", "f"}
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    assert all((e["pid"], e["tid"]) in named for e in timed)
    rows = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(row)):
            assert start >= end - 1e-6, "two slices of a row overlap without nesting"
    check_arrows(timed, rows)
    counters = defaultdict(list)
    for event in timed:
        if event["ph"] == "C":
            counters[event["pid"], event["name"]].append(event["args"]["activations"])
    for values in counters.values():
        assert min(values) >= 0
        assert values[-1] == 0


def check_arrows(
    timed: list[Trace], rows: dict[tuple[int, int], list[tuple[float, float]]]
) -> None:
    """Every arrow has one begin and one end, each inside a slice of its row that has a length."""
    begins = {event["id"]: event for event in timed if event["ph"] == "s"}
    ends = {event["id"]: event for event in timed if event["ph"] == "f"}
    assert len(begins) + len(ends) == sum(event["ph"] in "sf" for event in timed)
    assert begins.keys() == ends.keys()
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] <= end["ts"]
        assert end["bp"] == "e"
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        for event in (begin, end):
            row = rows[event["pid"], event["tid"]]
            assert any(start <= event["ts"] < stop for start, stop in row)


def any_schedule(name: str) -> Schedule:
    return build_schedule(
        name, num_ranks=1 if name == "no_pipelining" else 4, num_microbatches=8, num_chunks=None
    )


@pytest.mark.parametrize("name", [info.name for info in schedule_catalog()])
@pytest.mark.parametrize("send", [0.0, 0.3, 2.5])
def test_every_schedule_gives_a_trace_that_viewers_accept(name: str, send: float) -> None:
    schedule = any_schedule(name)
    costs = Costs(send=send, backward_weight=0.5, overlap=0.5 if "dualpipe" in name else 0.0)
    trace = simulated_trace(schedule, costs=costs)
    check_trace(trace)
    timeline = schedule.simulate(costs)
    events = trace["traceEvents"]
    shown = {(e["pid"], e["name"]): e for e in events if e["ph"] == "X" and e["tid"] == 0}
    assert len(shown) == len(timeline.events)
    for rank, action, start, end in timeline.events:
        event = shown[rank, str(action)]
        assert event["ts"] == pytest.approx(start * 1e3)
        assert event["dur"] == pytest.approx((end - start) * 1e3)
    for rank in range(schedule.num_ranks):
        held = [e["args"]["activations"] for e in events if e["ph"] == "C" and e["pid"] == rank]
        assert max(held) == timeline.peak_in_flight[rank]


def test_messages_stand_in_the_rows_of_their_streams() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=1)
    events = simulated_trace(schedule, costs=Costs(send=0.5))["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [
        (e["pid"], rows[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    ]
    assert slices == [
        (0, "compute", "0F0", 0, 1000),
        (0, "send", "0SEND_F0", 1000, 500),
        (1, "receive", "1RECV_F0", 1000, 500),
        (1, "compute", "1F0", 1500, 1000),
        (1, "compute", "1B0", 2500, 2000),
        (1, "send", "1SEND_B0", 4500, 500),
        (0, "receive", "0RECV_B0", 4500, 500),
        (0, "compute", "0B0", 5000, 2000),
    ]


def test_messages_that_overlap_get_a_row_each() -> None:
    schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=4)
    trace = simulated_trace(schedule, costs=Costs(send=2.5))
    check_trace(trace)
    rows = {
        e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == 0
    }
    assert rows == {"compute", "send", "send 2", "send 3", "receive", "receive 2"}


def test_forward_only_frees_at_once() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=3, forward_only=True)
    check_trace(simulated_trace(schedule))


def test_a_measured_step_of_two_pipelines() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    pipelines = [[0, 2], [1, 3]]
    events = []
    for ranks in pipelines:
        for rank, action, start, end in schedule.simulate(Costs(send=1.0)).events:
            at = 5e6 + 100 * start
            events.append(TimedAction(ranks[rank], str(action), at, 5e6 + 100 * end))
    events.append(TimedAction(2, "1RECV_F0", 5e6, 5e6 + 200))
    trace = measured_trace(schedule, events, pipelines=pipelines)
    check_trace(trace)
    arrows = {
        (e["pid"], e["args"]["to"])
        for e in trace["traceEvents"]
        if e["ph"] == "X" and "SEND" in e["name"]
    }
    assert arrows == {(0, 2), (2, 0), (1, 3), (3, 1)}
    [wait] = [e for e in trace["traceEvents"] if e["name"].startswith("wait")]
    assert (wait["name"], wait["tid"], wait["ts"]) == ("wait for 1RECV_F0", 0, 0)
    starts = [e["ts"] for e in trace["traceEvents"] if e["ph"] != "M"]
    assert min(starts) == 0


def test_two_passes_in_turns_have_a_row_each() -> None:
    schedule = build_schedule("1f1b", num_ranks=1, num_microbatches=2, pairs="whole")
    spans = {"0F0": (0, 10), "0F1": (10, 30), "0B0": (12, 35), "0B1": (35, 45)}
    events = [
        TimedAction(0, name, float(start), float(end)) for name, (start, end) in spans.items()
    ]
    trace = measured_trace(schedule, events, pipelines=[[0]])
    check_trace(trace)
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    slices = {e["name"]: rows[e["tid"]] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert slices == {"0F0": "compute", "0F1": "compute", "0B0": "compute 2", "0B1": "compute"}


def test_a_step_of_which_a_rank_recorded_nothing_still_makes_a_trace() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=1)
    only = [TimedAction(0, "0F0", 10.0, 20.0), TimedAction(0, "0B0", 30.0, 40.0)]
    check_trace(measured_trace(schedule, only, pipelines=[[0, 1]]))
    check_trace(measured_trace(schedule, [], pipelines=[[0, 1]]))
