"""Predicted timeline of a step if each pass takes the mean time of its stage and kind.

Measured, a whole backward (B) takes less than its two halves do (I and W), of which ``Costs`` makes
it up, and stages of DualPipe run both.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from megacore.pipeline import Action, ActionKind, Schedule, TimedAction
from megacore.pipeline.timeline import Event, Timeline

# By stage and kind of pass.
PassTimes = Mapping[tuple[int, ActionKind], float]


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
    """Simulate a schedule with measured times; messages take no time, and pairs do not overlap.

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
    stages = range(schedule.num_stages)

    def per_stage(kind: ActionKind) -> list[float]:
        return [times.get((stage, kind), 0.0) for stage in stages]

    native = schedule._native
    simulated = native.simulate(
        forward=per_stage(ActionKind.FORWARD),
        backward=per_stage(ActionKind.BACKWARD),
        backward_input=per_stage(ActionKind.BACKWARD_INPUT),
        backward_weight=per_stage(ActionKind.BACKWARD_WEIGHT),
        send=0.0,
        overlap=0.0,
    )
    return Timeline(native, simulated).events
