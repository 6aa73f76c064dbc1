"""SVG timeline of a pipeline: ranks as rows, time to the right, simulated or measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megacore._core import Action
from megacore.pipeline import Costs, Schedule
from megatrain.view.palette import KindColour, kind_colours
from megatrain.view.svg import MUTED, PAGE, TRACK, document, element, hex_colour, label, rect, text

_DEFAULT_COSTS = Costs()
_MARGIN, _LABEL_W, _BUSY_W = 28, 76, 92
_TITLE_H, _LEGEND_H, _AXIS_H = 62, 34, 34
_ROW_H, _ROW_GAP = 34, 8
_MIN_W, _MAX_W = 860.0, 4200.0
_DIGIT_W = 7.2  # of a digit at the font size of a box, in pixels
_MAX_TOOLTIPS = 4000  # beyond this many actions the boxes of a kind become one path

_PALE, _DEEP = "#ffffff", "#141e2c"  # numbers in boxes


@dataclass(frozen=True, kw_only=True)
class _Box:
    """Compute action to draw."""

    row: int
    action: Action
    chunk: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Mapping of time and rows to page coordinates, in pixels."""

    left: float
    top: float
    scale: float  # pixels per unit of time
    width: float
    num_rows: int

    def x(self, time: float) -> float:
        return self.left + time * self.scale

    def y(self, row: int) -> float:
        return self.top + row * (_ROW_H + _ROW_GAP)

    @property
    def bottom(self) -> float:
        return self.y(self.num_rows) - _ROW_GAP


def schedule_svg(schedule: Schedule, *, costs: Costs = _DEFAULT_COSTS) -> str:
    """Return a picture of a simulated schedule; see :func:`timeline_svg`.

    Args:
        schedule: The schedule.
        costs: Times of the actions.
    """
    chunks = f", {schedule.num_chunks} chunks each" if schedule.num_chunks > 1 else ""
    sizes = f"{schedule.num_ranks} ranks{chunks}, {schedule.num_microbatches} microbatches"
    return timeline_svg(schedule.simulate(costs).events, title=f"{schedule.name}: {sizes}")


def timeline_svg(
    events: Iterable[Any],
    *,
    title: str = "",
    unit: str = "",
    width: float | None = None,
    makespan: float | None = None,
    background: bool = True,
    idle_name: str = "bubble",
) -> str:
    """Return a timeline as one SVG document: a row per rank, a box per action, time to the right.

    Forward and backward have different hues, chunks of a rank have different shades, and a box
    shows its microbatch number if it fits. The bubble is grey. The picture follows the light or
    dark setting of its viewer. Communication events are not drawn.

    Args:
        events: ``Timeline.events``, ``ActionRecorder.events()`` of all ranks, or anything with
            ``rank``, ``action`` (an ``Action`` or its text) and start and end, as fields ``start``
            and ``end`` or ``start_us`` and ``end_us``, or as a tuple in that order. Times are drawn
            relative to the first start.
        title: Heading.
        unit: Unit of the times, e.g. ``"ms"``, shown at the axis. Fields in ``_us`` are converted
            to milliseconds, which is then the default unit.
        width: Width in pixels; by default wide enough for the labels.
        makespan: Length of the time axis; use the same value to compare two pictures. Default: the
            last end.
        background: Whether to fill the page; without it the background is transparent.
        idle_name: Name of the time without compute.

    Returns:
        The document. Without compute actions, a picture with a note.

    Example:
        >>> svg = timeline_svg([(0, "0F0", 0, 1), (0, "0B0", 1, 3)], title="one rank")
        >>> "0F0: stage 0, chunk 0, 0 to 1" in svg, "idle 0.0%" in svg
        (True, True)
    """
    boxes, ranks, is_us = _boxes(events)
    end = max((box.end for box in boxes), default=0.0)
    frame = _frame(boxes, len(ranks), max(makespan or 0.0, end) or 1.0, width)
    page_width = frame.left + frame.width + _BUSY_W + _MARGIN
    page_height = frame.bottom + _AXIS_H + _MARGIN - 8
    unit = unit or ("ms" if is_us else "")
    elements = [
        *_head(boxes, len(ranks), end, title, unit, idle_name),
        *_legend(boxes),
        *_tracks(boxes, ranks, frame, end),
        *_draw_boxes(boxes, frame),
        *_axis(frame, unit),
    ]
    title, page = title or "pipeline timeline", PAGE if background else None
    return document(page_width, page_height, title, elements, page=page)


def _boxes(events: Iterable[Any]) -> tuple[list[_Box], list[int], bool]:
    """Read events of any form; returns boxes from time 0, the ranks of the rows, and if in us."""
    read: list[tuple[int, Action, float, float]] = []
    is_us = False
    colours = kind_colours()
    for event in events:
        if hasattr(event, "start_us"):
            is_us = True
            fields = (event.rank, event.action, event.start_us / 1e3, event.end_us / 1e3)
        elif isinstance(event, Sequence):
            rank, action, start, end = event
            fields = (rank, action, start, end)
        else:
            fields = (event.rank, event.action, event.start, event.end)
        rank, action, start, end = fields
        action = action if isinstance(action, Action) else Action.parse(action)
        if action.kind in colours:
            read.append((rank, action, float(start), float(end)))
    origin = min((start for _, _, start, _ in read), default=0.0)
    stages = defaultdict(set)
    for rank, action, _, _ in read:
        stages[rank].add(action.stage)
    ranks = sorted(stages)
    rows = {rank: row for row, rank in enumerate(ranks)}
    chunks = {
        (rank, stage): chunk for rank in ranks for chunk, stage in enumerate(sorted(stages[rank]))
    }
    boxes = [
        _Box(
            row=rows[rank],
            action=action,
            chunk=chunks[rank, action.stage],
            start=start - origin,
            end=end - origin,
        )
        for rank, action, start, end in read
    ]
    return boxes, ranks, is_us


def _frame(boxes: Sequence[_Box], num_rows: int, makespan: float, width: float | None) -> _Frame:
    if width is None:
        # Wide enough for the number in a typical short box, within what is comfortable to look at.
        durations = sorted(box.end - box.start for box in boxes)
        short = durations[len(durations) // 10] if durations else makespan
        wanted = (_label_width(boxes) + 5) * makespan / short if short > 0 else _MAX_W
        inner = min(max(wanted, _MIN_W), _MAX_W)
    else:
        inner = max(width - _LABEL_W - _BUSY_W - 2 * _MARGIN, 200.0)
    return _Frame(
        left=_MARGIN + _LABEL_W,
        top=_MARGIN + _TITLE_H + _LEGEND_H,
        scale=inner / makespan,
        width=inner,
        num_rows=num_rows,
    )


def _head(
    boxes: Sequence[_Box], num_rows: int, end: float, title: str, unit: str, idle_name: str
) -> tuple[str, str]:
    busy = sum(box.end - box.start for box in boxes)
    if boxes and end > 0:
        idle = 1 - busy / (num_rows * end)
        length = f"{end:.4g} {unit}".strip()
        summary = f"{idle_name} {max(idle, 0.0):.1%} of all ranks' time, from 0 to {length}"
    else:
        summary = "no compute action to show"
    return (
        label(_MARGIN, _MARGIN + 18, title or "Pipeline timeline", 19, weight=700),
        label(_MARGIN, _MARGIN + 42, summary, 13.5, fill=MUTED),
    )


def _legend(boxes: Sequence[_Box]) -> list[str]:
    """Return one entry per kind: its name and a swatch per chunk."""
    elements, x, y = [], float(_MARGIN), float(_MARGIN + _TITLE_H)
    num_chunks = _num_chunks(boxes)
    for kind, colour in kind_colours().items():
        if not any(box.action.kind == kind for box in boxes):
            continue
        elements.append(label(x, y + 11, colour.name, 12.5))
        x += 7.4 * len(colour.name) + 10
        for chunk in range(num_chunks):
            shade = hex_colour(*colour.rgb(chunk, num_chunks))
            elements.append(rect(x, y - 1, 22, 15, fill=shade, rx=3))
            if num_chunks > 1:
                elements.append(
                    _numbers([_number(x + 11, y + 11, chunk, colour, chunk, num_chunks)])
                )
            x += 26
        x += 22
    if num_chunks > 1:
        meaning = "shade: model chunk of the rank"
        elements.append(label(x, y + 11, meaning, 12.5, fill=MUTED))
        x += 7.0 * len(meaning) + 14
    if boxes:
        elements.append(rect(x, y - 1, 22, 15, fill=TRACK, rx=3))
        elements.append(label(x + 30, y + 11, "idle", 12.5))
    return elements


def _tracks(boxes: Sequence[_Box], ranks: Sequence[int], frame: _Frame, end: float) -> list[str]:
    """Return a grey bar per row, its rank on the left and its idle share on the right."""
    busy = [0.0] * len(ranks)
    for box in boxes:
        busy[box.row] += box.end - box.start
    elements = []
    for row, rank in enumerate(ranks):
        y = frame.y(row)
        elements.append(rect(frame.left, y, end * frame.scale, _ROW_H, fill=TRACK, rx=4))
        elements.append(label(_MARGIN, y + 22, f"rank {rank}", 13.5, weight=600))
        idle = 1 - busy[row] / end if end > 0 else 0.0
        share = f"idle {max(idle, 0.0):.1%}"
        elements.append(label(frame.left + frame.width + 12, y + 22, share, 12.5, fill=MUTED))
    return elements


def _draw_boxes(boxes: Sequence[_Box], frame: _Frame) -> list[str]:
    num_chunks, colours = _num_chunks(boxes), kind_colours()
    label_w = _label_width(boxes)
    elements: list[str] = []
    numbers: list[str] = []
    paths = defaultdict(list)
    for box in boxes:
        colour = colours[box.action.kind]
        shade = hex_colour(*colour.rgb(box.chunk, num_chunks))
        x, y = frame.x(box.start), frame.y(box.row)
        box_width = max((box.end - box.start) * frame.scale, 0.5)
        gap = min(1.5, box_width * 0.15)
        if len(boxes) > _MAX_TOOLTIPS:
            shape = f"M{x:.2f} {y:g}h{box_width - gap:.2f}v{_ROW_H}h{gap - box_width:.2f}z"
            paths[shade].append(shape)
        else:
            length = f"{box.start:.4g} to {box.end:.4g}"
            tip = f"{box.action}: stage {box.action.stage}, chunk {box.chunk}, {length}"
            corner = min(3.0, box_width / 5)
            elements.append(rect(x, y, box_width - gap, _ROW_H, tip=tip, fill=shade, rx=corner))
        if label_w <= box_width:
            middle = x + (box_width - gap) / 2
            number = box.action.microbatch
            numbers.append(_number(middle, y + 22, number, colour, box.chunk, num_chunks))
    shapes = [element("path", fill=shade, d="".join(d)) for shade, d in paths.items()]
    return [*shapes, *elements, *([_numbers(numbers)] if numbers else [])]


def _axis(frame: _Frame, unit: str) -> list[str]:
    makespan = frame.width / frame.scale
    step = _nice_step(makespan / max(frame.width / 90, 2))
    elements, y = [], frame.bottom + 20
    for number in range(math.floor(makespan / step * 1.0001) + 1):
        tick = number * step
        x = frame.x(tick)
        elements.append(label(x, y, f"{tick:g}", 11.5, fill=MUTED, anchor="middle"))
    name = f"time, {unit}" if unit else "time"
    # Beyond the last tick, which can be at the very end.
    elements.append(label(frame.left + frame.width + 26, y, name, 11.5, fill=MUTED))
    return elements


def _nice_step(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


def _label_width(boxes: Sequence[_Box]) -> float:
    """Return the width that the longest microbatch number needs, so that all or none are shown."""
    return len(str(max((box.action.microbatch for box in boxes), default=0))) * _DIGIT_W + 3


def _num_chunks(boxes: Sequence[_Box]) -> int:
    return max((box.chunk for box in boxes), default=0) + 1


def _numbers(texts: Sequence[str]) -> str:
    """Return the numbers of boxes as a group that lets the pointer reach their tooltips."""
    return element(
        "g",
        "".join(texts),
        font_size=12,
        font_weight=600,
        text_anchor="middle",
        pointer_events="none",
    )


def _number(
    x: float, y: float, number: int, colour: KindColour, chunk: int, num_chunks: int
) -> str:
    return text(x, y, number, fill=_PALE if colour.is_deep(chunk, num_chunks) else _DEEP)
