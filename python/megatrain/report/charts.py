"""Line charts as SVG text, with colours from the page's style sheet for light and dark pages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

from megatrain.report.series import (
    Axis,
    Point,
    log_axis,
    nice_axis,
    number_text,
    thin,
    tight_axis,
)
from megatrain.view.svg import element, line, text

MAX_POINTS = 700


@dataclass(frozen=True, kw_only=True)
class Series:
    """One set of points of a chart.

    Attributes:
        name: Name in the legend and the tooltip.
        points: ``(step, value)`` pairs, steps increasing, values finite.
        style: CSS class: ``"main"`` or ``"second"``; with ``"raw"`` before it faint.
        dots: Draw points instead of a line.
        in_legend: Whether the legend and the tooltip include the series.
    """

    name: str
    points: Sequence[Point]
    style: str = "main"
    dots: bool = False
    in_legend: bool = True


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A horizontal reference line.

    Attributes:
        value: Position on the value axis.
        label: Text on the line.
    """

    value: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line between two steps.

    Attributes:
        step: The line is drawn before this step.
        kind: CSS class: ``"start"`` of a resumed run, or ``"skip"`` for a skipped step.
        label: Short text at the top of the line; empty without one.
    """

    step: float
    kind: str
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class ChartSpec:
    """Contents of a chart, independent of its size.

    Attributes:
        label: Description for screen readers.
        series: The series, back to front.
        references: Horizontal lines.
        from_zero: Whether the value axis starts at 0.
        upper: Values above are clipped at the top edge; ``None`` shows all.
        marks: Vertical lines.
        top: ``(step, text)`` of the ticks of a second axis at the top, such as tokens.
        top_name: Name of that axis.
        log: Whether the value axis is logarithmic; all values must be above 0.
        value_text: Formats a value for the tooltip.
    """

    label: str
    series: Sequence[Series]
    references: Sequence[Reference] = ()
    from_zero: bool = False
    upper: float | None = None
    marks: Sequence[Mark] = ()
    top: Sequence[tuple[float, str]] = ()
    top_name: str = ""
    log: bool = False
    value_text: Callable[[float], str] = number_text


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Geometry of one chart: its axes and the rectangle of the plot."""

    x: Axis
    y: Axis
    left: float
    right: float
    top: float
    bottom: float
    log: bool = False

    @property
    def max_points(self) -> int:
        """Points of a curve; more than pixels would only increase the file size."""
        return min(MAX_POINTS, math.ceil(self.right - self.left))

    def left_of(self, step: float) -> float:
        """Return the horizontal pixel position of a step."""
        return round(self.left + self.x.position(step) * (self.right - self.left), 1)

    def at(self, point: Point) -> tuple[float, float]:
        """Return the pixel position of a point; values off the axis are clipped to its edge."""
        value = math.log10(point[1]) if self.log else point[1]
        height = min(1.0, max(0.0, self.y.position(value)))
        return self.left_of(point[0]), round(self.bottom - height * (self.bottom - self.top), 1)


def line_chart(spec: ChartSpec, *, width: int, height: int, font: int = 12) -> str:
    """Draw a chart.

    Args:
        spec: Contents of the chart.
        width: Width of the drawing in its own units; the page scales it.
        height: Height of the drawing.
        font: Font size of the axis labels in these units.

    Returns:
        An ``<svg>`` element, or a ``<p>`` if there is nothing to draw.
    """
    values = [point for series in spec.series for point in series.points]
    if not values:
        return '<p class="empty">no finite value was measured</p>'
    frame = _make_frame(spec, values, width=width, height=height, font=font)
    elements = [*_grid(frame, font), *_top_axis(spec, frame), *_marks(spec, frame, font)]
    elements += _references(spec, frame, font)
    for series in spec.series:
        elements.append(_dots(series, frame) if series.dots else _path(series, frame))
    elements.append(element("line", css="cursor", y1=frame.top, y2=frame.bottom))
    return element(
        "svg",
        "".join(elements),
        css="chart",
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=spec.label,
        font_size=font,
        data_hover=_hover_data(spec, frame),
    )


def linear_and_log(spec: ChartSpec, *, name: str) -> str:
    """Return a chart and, below a switch, the same with a logarithmic value axis."""
    values = [value for series in spec.series for _, value in series.points]
    values += [reference.value for reference in spec.references]
    if not values or min(values) <= 0:
        return two_sizes(spec)
    return (
        f'<input type="checkbox" id="log-{name}"><label for="log-{name}">log scale</label>'
        f'<div class="linear">{two_sizes(spec)}</div>'
        f'<div class="log">{two_sizes(replace(spec, log=True))}</div>'
    )


def two_sizes(spec: ChartSpec, *, height: int = 380) -> str:
    """Return a chart for wide and one for narrow pages."""
    wide = line_chart(spec, width=1120, height=height, font=13)
    narrow = line_chart(spec, width=360, height=270 if height > 300 else 220, font=12)
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def legend(spec: ChartSpec) -> str:
    """Return the legend of the series, as HTML."""
    items = [
        f'<span class="key"><i class="{series.style}{" dot" if series.dots else ""}"></i>'
        f"{escape(series.name)}</span>"
        for series in spec.series
        if series.in_legend and series.points
    ]
    return f'<p class="legend">{"".join(items)}</p>' if len(items) > 1 else ""


def _make_frame(
    spec: ChartSpec, values: Sequence[Point], *, width: int, height: int, font: int
) -> _Frame:
    xs = [x for x, _ in values]
    ys = [y for _, y in values] + [reference.value for reference in spec.references]
    high = max(ys) if spec.upper is None else min(max(ys), spec.upper)
    low = min(0.0, *ys) if spec.from_zero else min(ys)
    make_axis = log_axis if spec.log else nice_axis
    y_axis = make_axis(low, high, num_ticks=max(3, height // 45))
    label_width = max(len(_tick_text(tick, spec.log)) for tick in y_axis.ticks) * font * 0.6
    left = round(label_width + 14)
    return _Frame(
        x=tight_axis(min(xs), max(xs), num_ticks=max(3, (width - left) // 70)),
        y=y_axis,
        left=left,
        right=width - 12,
        top=2 * font + 10 if spec.top else font,
        bottom=height - 2 * font - 4,
        log=spec.log,
    )


def _tick_text(tick: float, log: bool) -> str:
    return number_text(10**tick if log else tick)


def _grid(frame: _Frame, font: int) -> list[str]:
    elements = []
    for tick in frame.y.ticks:
        _, y = frame.at((frame.x.low, 10**tick if frame.log else tick))
        kind = "axis" if tick == frame.y.low else "grid"
        elements.append(line(frame.left, y, frame.right, y, css=kind))
        elements.append(_tick(frame.left - 8, y + font * 0.35, _tick_text(tick, frame.log), "end"))
    for tick in frame.x.ticks:
        x, bottom = frame.left_of(tick), frame.bottom
        elements.append(line(x, bottom, x, bottom + 5, css="axis"))
        elements.append(_tick(x, bottom + font + 8, number_text(tick), "middle"))
    return elements


def _top_axis(spec: ChartSpec, frame: _Frame) -> list[str]:
    """Draw the second axis and, at its right end, its name instead of ticks."""
    elements = []
    for step, words in spec.top:
        x = frame.left_of(step)
        if x > frame.right - 60:
            continue
        elements.append(line(x, frame.top - 5, x, frame.top, css="axis"))
        elements.append(_tick(x, frame.top - 9, words, "middle"))
    if spec.top:
        elements.append(_tick(frame.right, frame.top - 9, spec.top_name, "end"))
    return elements


def _tick(x: float, y: float, words: str, anchor: str) -> str:
    return text(x, y, words, css="tick", text_anchor=anchor)


def _marks(spec: ChartSpec, frame: _Frame, font: int) -> list[str]:
    elements = []
    for mark in spec.marks:
        step = mark.step - 0.5
        if not frame.x.low <= step <= frame.x.high:
            continue
        x = frame.left_of(step)
        elements.append(line(x, frame.top, x, frame.bottom, css=f"mark {mark.kind}"))
        if mark.label:
            y = frame.top + font
            circle = element("circle", cx=x, cy=y, r=font * 0.75)
            name = text(x, y + font * 0.35, mark.label, text_anchor="middle")
            elements.append(element("g", circle + name, css="badge"))
    return elements


def _references(spec: ChartSpec, frame: _Frame, font: int) -> list[str]:
    elements = []
    for reference in spec.references:
        _, y = frame.at((frame.x.low, reference.value))
        elements.append(line(frame.left, y, frame.right, y, css="reference"))
        name, at = reference.label, (frame.right, y - 6)
        elements.append(text(*at, name, css="reference", text_anchor="end", font_size=font))
    return elements


def _path(series: Series, frame: _Frame) -> str:
    if len(series.points) == 1:
        return _dots(series, frame)
    pixels = [frame.at(point) for point in thin(series.points, limit=frame.max_points)]
    return element("path", css=series.style, d="M" + "L".join(f"{x:g} {y:g}" for x, y in pixels))


def _dots(series: Series, frame: _Frame) -> str:
    circles = (element("circle", cx=x, cy=y, r=4.5) for x, y in map(frame.at, series.points))
    return element("g", "".join(circles), css=f"dots {series.style}")


def _hover_data(spec: ChartSpec, frame: _Frame) -> str:
    """Return the tooltip data as JSON: ``[[x pixel, step, [[name, value], ...]], ...]``."""
    named = [series for series in spec.series if series.in_legend]
    values = [(series.name, dict(series.points)) for series in named]
    steps = sorted({x for series in named for x, _ in thin(series.points, limit=frame.max_points)})
    rows = [
        [
            frame.left_of(x),
            math.floor(x),
            [[name, spec.value_text(at[x])] for name, at in values if x in at],
        ]
        for x in steps
    ]
    return json.dumps(rows, separators=(",", ":"))
