"""Drawings of the layout and of the schedule."""

from __future__ import annotations

from collections.abc import Sequence

from megacore.parallel import Topology
from megacore.report.run_files import RunTimeline, TimelineEvent
from megacore.report.timeline_table import has_pipeline, length_ms
from megacore.view import timeline_svg, topology_svg

WIDTH = 1120
MAX_ROWS = 32


def layout_drawing(topology: Topology) -> str:
    """Return the drawing of a topology's groups, as HTML."""
    return topology_svg(topology)


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
