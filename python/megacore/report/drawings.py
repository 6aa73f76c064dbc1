"""Drawings of the layout and of the schedule, recoloured for dark pages."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Sequence

from megacore.parallel import Topology
from megacore.report.run_files import RunTimeline, TimelineEvent
from megacore.report.timeline_table import length_ms
from megacore.view import timeline_svg, topology_svg

WIDTH = 1120
MAX_ROWS = 32

_COLOUR = re.compile(r'((?:fill|stroke|stop-color|color)(?:="|:\s*))#([0-9a-fA-F]{6})\b')


def layout_drawing(topology: Topology) -> str:
    """Return the drawing of a topology's groups, as HTML."""
    return themed(topology_svg(topology))


def timeline_drawings(timeline: RunTimeline) -> list[str]:
    """Return SVGs of the predicted and the measured step on one scale, without empty ones."""
    measured = _first_ranks(timeline.measured)
    parts = {"Predicted": timeline.predicted, f"Measured in step {timeline.step:,}": measured}
    makespan_ms = max(map(length_ms, parts.values()))
    return [
        timeline_svg(events, title=title, width=WIDTH, makespan=makespan_ms, background=False)
        for title, events in parts.items()
        if events
    ]


def themed(svg: str) -> str:
    """Make the colours of a drawing for light pages follow the theme of the page.

    Every colour becomes a variable with itself as fallback; a style sheet sets the variables on
    dark pages. Lightness is inverted and hues are kept, which preserves contrast.

    Returns:
        The drawing with its style sheet, for an element of class ``drawing``.

    Example:
        >>> print(themed('<rect fill="#ffffff"/>'))
        <style>@media (prefers-color-scheme: dark){.drawing{--c-ffffff:#11161d}}</style>
        <rect fill="var(--c-ffffff,#ffffff)"/>
    """
    colours = sorted({match[2].lower() for match in _COLOUR.finditer(svg)})
    rules = ";".join(f"--c-{colour}:#{_dark_counterpart(colour)}" for colour in colours)
    drawing = _COLOUR.sub(
        lambda match: f"{match[1]}var(--c-{match[2].lower()},#{match[2].lower()})", svg
    )
    return f"<style>@media (prefers-color-scheme: dark){{.drawing{{{rules}}}}}</style>\n{drawing}"


def _first_ranks(events: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    """Return the events of the lowest ranks; more rows would add no information."""
    shown = set(sorted({event.rank for event in events})[:MAX_ROWS])
    return [event for event in events if event.rank in shown]


def _dark_counterpart(colour: str) -> str:
    red, green, blue = (int(colour[k : k + 2], 16) / 255 for k in (0, 2, 4))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    if max(red, green, blue) - min(red, green, blue) < 0.14:
        # Greys get the blue tint of the page.
        hue, saturation = 0.59, 0.25
    turned = 0.09 + (1 - lightness) * 0.84
    channels = colorsys.hls_to_rgb(hue, turned, min(saturation, 0.6))
    return "".join(f"{round(channel * 255):02x}" for channel in channels)
