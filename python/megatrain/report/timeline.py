"""Predicted and measured timeline of a step: drawings, and mean times of each stage."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from megacore.pipeline import Action, ActionKind
from megatrain.report.parts import card, scrolling, table
from megatrain.report.run_files import RunFiles, RunTimeline, TimelineEvent
from megatrain.view import timeline_svg
from megatrain.view.palette import kind_colours

WIDTH = 1120
MAX_ROWS = 32
MAX_STAGES = 32


def timeline_card(run: RunFiles) -> str:
    """Return the predicted schedule above one measured step."""
    if run.timeline is None or not run.timeline.measured:
        return ""
    above = "Above, the schedule as simulated; below, what each rank did in one step of the run. "
    hint = above if has_pipeline(run.timeline) else ""
    hint += (
        f"A box is one pass of a stage, its number the microbatch. {timeline_summary(run.timeline)}"
    )
    # In one box, so that both stay aligned when a narrow page scrolls them.
    drawings = "".join(timeline_drawings(run.timeline))
    body = scrolling("timelines", drawings) + stage_table(run.timeline)
    title = "Pipeline schedule" if has_pipeline(run.timeline) else "Passes of a step"
    return card(title, body, hint)


def timeline_drawings(timeline: RunTimeline) -> list[str]:
    """Return SVGs of the predicted and the measured step on one scale, without empty ones.

    Without a pipeline, there is nothing to predict.
    """
    measured = _first_ranks(timeline.measured)
    is_pipeline = has_pipeline(timeline)
    predicted = timeline.predicted if is_pipeline else []
    parts = {
        "Predicted, by pipeline rank": predicted,
        f"Measured in step {timeline.step:,}, by rank": measured,
    }
    makespan_ms = max(map(length_ms, parts.values()))
    return [
        timeline_svg(
            events,
            title=title,
            width=WIDTH,
            makespan=makespan_ms,
            background=False,
            idle_name="bubble" if is_pipeline else "idle",
        )
        for title, events in parts.items()
        if events
    ]


def _first_ranks(events: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    """Return the events of the lowest ranks; more rows would add no information."""
    shown = set(sorted({event.rank for event in events})[:MAX_ROWS])
    return [event for event in events if event.rank in shown]


def timeline_summary(timeline: RunTimeline) -> str:
    """Return one sentence that compares the measured with the predicted step."""
    measured_ms, predicted_ms = length_ms(timeline.measured), length_ms(timeline.predicted)
    sentence = f"The step took {measured_ms:,.1f} ms"
    if not has_pipeline(timeline):
        return (
            f"{sentence}. There is no pipeline: between passes, a rank waits for the others in "
            "collectives."
        )
    if predicted_ms <= 0 or measured_ms <= 0:
        return sentence + "."
    difference = measured_ms / predicted_ms - 1
    comparison = f"{abs(difference):.1%} {'more' if difference >= 0 else 'less'} than"
    return (
        f"{sentence}, {comparison} the {predicted_ms:,.1f} ms that the schedule predicts if every "
        f"pass takes the mean time of its stage and messages take none. Bubble: "
        f"{_bubble(timeline.predicted):.1%} predicted, {_bubble(timeline.measured):.1%} measured."
    )


def has_pipeline(timeline: RunTimeline) -> bool:
    """Return whether stages are on several ranks."""
    return len({event.rank for event in timeline.predicted}) > 1


def stage_table(timeline: RunTimeline) -> str:
    """Return mean milliseconds per stage of each kind of pass and of waits, as an HTML table."""
    times: defaultdict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    waits: defaultdict[int, float] = defaultdict(float)
    ranks: defaultdict[int, set[int]] = defaultdict(set)
    compute = kind_colours()
    for event in timeline.measured:
        action = Action.parse(event.action)
        milliseconds = (event.end_us - event.start_us) / 1e3
        ranks[action.stage].add(event.rank)
        if action.kind in compute:
            times[action.stage, action.kind].append(milliseconds)
        elif action.kind in (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD):
            waits[action.stage] += milliseconds
    kinds = [kind for kind in compute if any(kind == other for _, other in times)]
    if not kinds:
        return ""
    rows = []
    for stage in sorted(ranks)[:MAX_STAGES]:
        means = [times[stage, kind] for kind in kinds]
        cells = [f"{statistics.fmean(mean):.2f}" if mean else "" for mean in means]
        if waits:
            cells.append(f"{waits[stage] / len(ranks[stage]):.2f}")
        where = ", ".join(map(str, sorted(ranks[stage])[:8]))
        where += ", ..." if len(ranks[stage]) > 8 else ""
        rows.append([str(stage), where, *cells])
    head = ["Stage", "Ranks", *(compute[kind].name for kind in kinds), *["Waiting"] * bool(waits)]
    more = len(ranks) - MAX_STAGES
    note = f'<p class="hint">and {more} more stages, in timeline.json</p>' if more > 0 else ""
    also = ", and all waits for messages of the step" if waits else ""
    return (
        f'<p class="hint">Measured, in ms: the mean of a pass{also}.</p>'
        f"{table('stages', head, rows)}{note}"
    )


def length_ms(events: Sequence[TimelineEvent]) -> float:
    """Return the time from the first start to the last end of compute actions, in ms."""
    computing = _computing(events)
    if not computing:
        return 0.0
    first = min(event.start_us for event in computing)
    return (max(event.end_us for event in computing) - first) / 1e3


def _bubble(events: Sequence[TimelineEvent]) -> float:
    """Return the share of all ranks' time without compute."""
    computing = _computing(events)
    busy = sum(event.end_us - event.start_us for event in computing) / 1e3
    total = len({event.rank for event in computing}) * length_ms(events)
    return max(1 - busy / total, 0.0) if total > 0 else 0.0


def _computing(events: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    compute = kind_colours()
    return [event for event in events if Action.parse(event.action).kind in compute]
