"""Predicted timeline of a step if each pass takes the mean time of its stage and kind.

``Schedule.simulate`` knows B only as I and W together. Measured, a whole backward takes less than
its two halves do, and stages of DualPipe run both.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from megacore.pipeline import Action, ActionKind, Schedule, TimedAction
from megacore.pipeline.timeline import Event

# By stage and kind of pass.
PassTimes = Mapping[tuple[int, ActionKind], float]
# Result of a pass: the output (F), the gradient of the input (B, also of I) or those of weights.
_Value = tuple[ActionKind, int, int]


def mean_times(events: Sequence[TimedAction]) -> dict[tuple[int, ActionKind], float]:
    """Compute the mean time of each stage's passes and message waits by kind, in microseconds.

    Example:
        >>> events = [TimedAction(0, "2F0", 0.0, 3.0), TimedAction(0, "2F1", 4.0, 9.0)]
        >>> mean_times(events)[2, ActionKind.FORWARD]
        4.0
    """
    times: defaultdict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for event in events:
        action = Action.parse(event.action)
        times[action.stage, action.kind].append(event.end_us - event.start_us)
    return {key: statistics.fmean(each) for key, each in times.items()}


def predict(schedule: Schedule, times: PassTimes) -> list[Event]:
    """Run a schedule on paper, every pass as early as its inputs and its rank allow.

    Messages take no time. A pair that overlaps starts with the inputs of both and gives the outputs
    of both at its end, as in ``Schedule.simulate``.

    Args:
        schedule: What ran.
        times: Time of a pass; one that is not in it takes none.

    Returns:
        All passes, rank after rank, in execution order.

    Example:
        >>> from megacore.pipeline import build_schedule
        >>> schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=1)
        >>> times = {(s, k): 1.0 for s in (0, 1) for k in (ActionKind.FORWARD, ActionKind.BACKWARD)}
        >>> [(str(e.action), e.start, e.end) for e in predict(schedule, times)]
        [('0F0', 0.0, 1.0), ('0B0', 3.0, 4.0), ('1F0', 1.0, 2.0), ('1B0', 2.0, 3.0)]
    """
    made: dict[_Value, float] = {}
    length = schedule.num_stages // schedule.num_chains
    rows = [_in_units(schedule, rank) for rank in range(schedule.num_ranks)]
    done: list[list[Event]] = [[] for _ in rows]
    waiting = [next(row, None) for row in rows]
    while any(waiting):
        before = len(made)
        for rank, row in enumerate(rows):
            while (unit := waiting[rank]) is not None:
                inputs = [made.get(value) for action in unit for value in _inputs(action, length)]
                if None in inputs:
                    break
                clock = done[rank][-1].end if done[rank] else 0.0
                end = max([clock, *(time for time in inputs if time is not None)])
                for action in unit:
                    start, end = end, end + times.get((action.stage, action.kind), 0.0)
                    done[rank].append(Event(rank, action, start, end))
                made.update((_output(action), end) for action in unit)
                waiting[rank] = next(row, None)
        if len(made) == before:
            raise RuntimeError("megacore bug: a valid schedule does not run")
    return [event for events in done for event in events]


def _in_units(schedule: Schedule, rank: int) -> Iterator[list[Action]]:
    """Yield the units that a rank starts at once: one pass, or a pair that overlaps."""
    actions, firsts = schedule.actions(rank), set(schedule.overlaps(rank))
    for position, action in enumerate(actions):
        if position in firsts:
            yield actions[position : position + 2]
        elif position - 1 not in firsts:
            yield [action]


def _output(action: Action) -> _Value:
    is_input_grad = action.kind == ActionKind.BACKWARD_INPUT
    kind = ActionKind.BACKWARD if is_input_grad else action.kind
    return kind, action.stage, action.microbatch


def _inputs(action: Action, stages_per_chain: int) -> Iterator[_Value]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind == ActionKind.FORWARD:
        if stage % stages_per_chain:
            yield ActionKind.FORWARD, stage - 1, microbatch
    elif action.kind == ActionKind.BACKWARD_WEIGHT:
        yield ActionKind.BACKWARD, stage, microbatch
    elif (stage + 1) % stages_per_chain:
        yield ActionKind.BACKWARD, stage + 1, microbatch
    else:
        yield ActionKind.FORWARD, stage, microbatch
