"""The prediction that stands beside a measured step."""

from __future__ import annotations

import pytest

from megacore.pipeline import Costs, TimedAction, build_schedule
from megacore.train.results import make_timeline, measured_costs


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


def test_costs_are_means_per_stage_and_waits_do_not_count() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    events = [
        *(TimedAction(0, "0F0", 0.0, 2.0), TimedAction(0, "0F1", 2.0, 6.0)),
        *(TimedAction(1, "1RECV_F0", 0.0, 99.0), TimedAction(1, "1F0", 0.0, 5.0)),
        *(TimedAction(0, "0B0", 0.0, 10.0), TimedAction(1, "1B0", 0.0, 20.0)),
    ]
    costs = measured_costs(schedule, events)
    assert costs == Costs(
        forward=[3.0, 5.0], backward_input=[10.0, 20.0], backward_weight=[0.0, 0.0]
    )
