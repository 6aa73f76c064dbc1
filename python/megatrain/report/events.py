"""Events of a run: resumed starts, changed layouts, skipped steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from megacore.parallel import Topology
from megatrain.report.charts import Mark
from megatrain.report.run_files import RunFiles, RunStart

MAX_LISTED = 12


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened before or in a step.

    Attributes:
        step: The step, from 1.
        kind: ``"start"`` of a resumed run or ``"skip"`` of a step.
        text: The event in words.
    """

    step: int
    kind: str
    text: str


def events_of(run: RunFiles) -> list[Event]:
    """Return the events of a run in the order of their steps."""
    found = [
        Event(step=now.first_step, kind="start", text=_start_text(before, now))
        for before, now in pairwise(run.info.starts)
    ]
    counts = {record["step"]: record.get("num_skipped", 0) for record in run.metrics}
    for step, count in counts.items():
        if count > counts.get(step - 1, count if step > 1 else 0):
            found.append(Event(step=step, kind="skip", text="the gradient was not finite: skipped"))
    return sorted(found, key=lambda event: event.step)


def marks_of(events: list[Event], *, labelled: bool) -> list[Mark]:
    """Return the lines of events on a chart; resumed starts are numbered if ``labelled``."""
    numbers = _numbers(events)
    return [
        Mark(
            # A skipped step is marked itself, a start between two steps.
            step=event.step + (0.5 if event.kind == "skip" else 0),
            kind=event.kind,
            label=numbers.get(index, "") if labelled else "",
        )
        for index, event in enumerate(events)
    ]


def event_list(events: list[Event]) -> str:
    """Return the events as an HTML list; empty without events."""
    numbers = _numbers(events)
    items = "".join(
        f'<li class="{event.kind}"><b>{escape(numbers.get(index, "x"))}</b> '
        f"step {event.step:,}: {escape(event.text)}</li>"
        for index, event in enumerate(events[:MAX_LISTED])
    )
    more = len(events) - MAX_LISTED
    items += f"<li>and {more} more</li>" if more > 0 else ""
    return f'<ul class="events">{items}</ul>' if items else ""


def _numbers(events: list[Event]) -> dict[int, str]:
    """Return the number of each start by its index in the list."""
    starts = [index for index, event in enumerate(events) if event.kind == "start"]
    return {index: str(number) for number, index in enumerate(starts, start=1)}


def layout_text(layout: Mapping[str, Any]) -> str:
    """Format a layout, e.g. ``"4 ranks = tp 2 x pp 2"``."""
    topology = Topology(**layout)
    sizes = {"tp": topology.tp, "cp": topology.cp, "dp": topology.dp, "pp": topology.pp}
    shown = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    product = " x ".join(shown) if shown else "one process"
    if topology.ep > 1 or topology.etp != topology.tp:
        sizes = {"etp": topology.etp, "ep": topology.ep, "edp": topology.expert_dp}
        experts = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        product += f", experts {experts}" if experts else ""
    return f"{topology.world_size:,} ranks = {product}" if shown else product


def _start_text(before: RunStart, now: RunStart) -> str:
    name = Path(now.resumed_from).name if now.resumed_from else "the beginning"
    text = f"continued from {name}"
    if now.layout != before.layout:
        return f"{text} with {layout_text(now.layout)}, previously {layout_text(before.layout)}"
    if now.schedule != before.schedule:
        return f"{text} with {now.schedule}, previously {before.schedule}"
    return f"{text} with the same layout"
