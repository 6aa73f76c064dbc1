"""The prediction that stands beside a measured step."""

from __future__ import annotations

from typing import Any

import pytest

from megacore.pipeline import Action, ActionKind, Costs, Schedule, TimedAction, build_schedule
from megacore.pipeline.prediction import mean_times, predict
from megacore.pipeline.timeline import Event
from megatrain.train.results import make_timeline


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "dualpipe_v", "interleaved_zb"])
def test_a_step_that_ran_as_simulated_is_predicted_exactly(name: str) -> None:
    chunks = 2 if name == "interleaved_zb" else None
    schedule = build_schedule(name, num_ranks=3, num_microbatches=6, num_chunks=chunks)
    stages = range(schedule.num_stages)
    costs = Costs(
        forward=[10.0 + s for s in stages],
        backward_input=[7.0 + s for s in stages],
        backward_weight=[5.0 + s for s in stages],
    )
    simulated = schedule.simulate(costs)
    events = [
        TimedAction(rank, str(action), 1e9 + start, 1e9 + end)
        for rank, action, start, end in simulated.events
    ]
    timeline = make_timeline(schedule, events, step=2)
    assert len(timeline.predicted) == len(events)
    for predicted, measured in zip(timeline.predicted, timeline.measured, strict=True):
        assert (predicted.rank, predicted.action) == (measured.rank, measured.action)
        assert predicted.start_us == pytest.approx(measured.start_us, abs=1e-3)
        assert predicted.end_us == pytest.approx(measured.end_us, abs=1e-3)


def test_the_time_of_two_passes_in_turns_counts_once() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=4, pairs="whole")
    costs = Costs(forward=11.0, backward_input=7.0, backward_weight=4.0)
    spans = {
        str(action): TimedAction(rank, str(action), start, end)
        for rank, action, start, end in schedule.simulate(costs).events
    }
    in_turns = dict(spans)
    num_pairs = 0
    for rank in range(2):
        actions = [str(action) for action in schedule.actions(rank)]
        for at in schedule.overlaps(rank):
            first, second = spans[actions[at]], spans[actions[at + 1]]
            # Both last as long as the pair does, but for 2 us.
            in_turns[first.action] = first._replace(end_us=second.end_us - 2.0)
            in_turns[second.action] = second._replace(start_us=first.start_us + 2.0)
            num_pairs += 1
    assert num_pairs == 4
    timeline = make_timeline(schedule, list(in_turns.values()), step=0)
    assert {one.action: (one.start_us, one.end_us) for one in timeline.measured} == {
        name: (span.start_us, span.end_us) for name, span in spans.items()
    }
    assert timeline.predicted == timeline.measured


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_a_whole_backward_takes_its_own_mean_beside_halves(name: str) -> None:
    """Both kinds run on a stage, and a B takes less than I and W do."""
    schedule = build_schedule(name, num_ranks=2, num_microbatches=6)
    kinds = (
        (ActionKind.FORWARD, 10.0),
        (ActionKind.BACKWARD, 15.0),
        (ActionKind.BACKWARD_INPUT, 9.0),
        (ActionKind.BACKWARD_WEIGHT, 8.0),
    )
    times = {(s, kind): time + s for s in range(schedule.num_stages) for kind, time in kinds}
    ran = predict(schedule, times)
    assert {event.action.kind for event in ran} == {kind for kind, _ in kinds}
    timeline = make_timeline(schedule, [timed(event) for event in ran], step=0)
    assert timeline.predicted == timeline.measured
    for event in timeline.predicted:
        action = Action.parse(event.action)
        assert event.end_us - event.start_us == times[action.stage, action.kind]


def timed(event: Event) -> TimedAction:
    return TimedAction(event.rank, str(event.action), event.start, event.end)


SCHEDULES = [
    *((name, {}) for name in ("gpipe", "zb_h2", "zb_v", "v_min", "dualpipe", "dualpipe_v")),
    *((name, {"num_chunks": 3}) for name in ("interleaved_1f1b", "interleaved_zb", "looped_bfs")),
    *(("1f1b", {"pairs": pairs}) for pairs in ("whole", "split")),
]


@pytest.mark.parametrize(("name", "options"), SCHEDULES)
def test_a_prediction_is_the_simulation_where_halves_make_a_whole(
    name: str, options: dict[str, Any]
) -> None:
    schedule = build_schedule(name, num_ranks=4, num_microbatches=8, **options)
    check_against_simulation(schedule)
    check_against_simulation(schedule.forward_only())


def check_against_simulation(schedule: Schedule) -> None:
    stages = range(schedule.num_stages)
    forward, first, second = ([at + s * s % 5 for s in stages] for at in (10.0, 7.0, 5.0))
    costs = Costs(forward=forward, backward_input=first, backward_weight=second)
    times = {(s, ActionKind.FORWARD): forward[s] for s in stages}
    times |= {(s, ActionKind.BACKWARD): first[s] + second[s] for s in stages}
    times |= {(s, ActionKind.BACKWARD_INPUT): first[s] for s in stages}
    times |= {(s, ActionKind.BACKWARD_WEIGHT): second[s] for s in stages}
    assert predict(schedule, times) == schedule.simulate(costs).events


def test_times_are_means_per_stage_and_kind() -> None:
    events = [
        *(TimedAction(0, "0F0", 0.0, 2.0), TimedAction(0, "0F1", 2.0, 6.0)),
        *(TimedAction(1, "1RECV_F0", 0.0, 99.0), TimedAction(1, "1F0", 0.0, 5.0)),
        *(TimedAction(0, "0B0", 0.0, 10.0), TimedAction(1, "1B0", 0.0, 20.0)),
        *(TimedAction(1, "1B1", 0.0, 30.0), TimedAction(1, "1I2", 0.0, 7.0)),
    ]
    assert mean_times(events) == {
        (0, ActionKind.FORWARD): 3.0,
        (1, ActionKind.RECV_FORWARD): 99.0,
        (1, ActionKind.FORWARD): 5.0,
        (0, ActionKind.BACKWARD): 10.0,
        (1, ActionKind.BACKWARD): 25.0,
        (1, ActionKind.BACKWARD_INPUT): 7.0,
    }
