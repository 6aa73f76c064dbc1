"""Time of a step by cause, and predicted and measured memory, as cards of the report."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from megatrain.report.events import layout_text
from megatrain.report.parts import card, table
from megatrain.report.run_files import RunFiles, RunStart

# Causes by name and style class, in the order of a step.
CAUSES = {
    "forward and backward": "compute",
    "wait for the pipeline": "pipeline",
    "wait for all-to-all": "exchange",
    "gradient reduction": "reduce",
    "gather of weights": "gather",
    "update of weights": "update",
    "wait for data": "data",
    "checkpoints": "save",
    "other": "other",
}
MAX_RANKS = 16


def times_of(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean seconds per step by cause, without the first step; empty if not measured.

    Example:
        >>> record = {"step": 1, "step_time_s": 3.0, "time_forward_backward_s": 2.0,
        ...           "time_all_to_all_s": 0.5}
        >>> {cause: seconds for cause, seconds in times_of([record]).items() if seconds}
        {'forward and backward': 1.5, 'wait for all-to-all': 0.5, 'other': 1.0}
    """
    settled = [record for record in records if "time_forward_backward_s" in record]
    settled = settled[1:] or settled
    if not settled:
        return {}

    def mean(name: str) -> float:
        return statistics.fmean(float(record.get(name) or 0.0) for record in settled)

    exchange = mean("time_all_to_all_s")
    times = {
        "forward and backward": max(0.0, mean("time_forward_backward_s") - exchange),
        "wait for the pipeline": mean("time_pipeline_wait_s"),
        "wait for all-to-all": exchange,
        "gradient reduction": mean("time_grad_reduce_s"),
        "gather of weights": mean("time_param_gather_s"),
        "update of weights": mean("time_optimizer_s"),
        "wait for data": mean("time_data_s"),
    }
    rest = max(0.0, mean("step_time_s") - sum(times.values()))
    return times | {"checkpoints": mean("time_checkpoint_s"), "other": rest}


def time_card(run: RunFiles) -> str:
    """Return the time of a step by cause, for each start of the run; empty if not measured."""
    parts = []
    for start, records in starts_with_records(run):
        times = times_of(records)
        if not times:
            continue
        steps = f"steps {records[0]['step']:,} to {records[-1]['step']:,}"
        title = f"{steps}, {layout_text(start.layout)}"
        total = f"{1000 * sum(times.values()):,.0f} ms per step"
        parts.append(
            f'<h3>{escape(title)} <span class="total">{total}</span></h3>'
            f"{bar(times)}{causes(times)}"
        )
    hint = (
        "Mean of the steps after the first, on rank 0. A wait is time that nothing hides; waits "
        "for all-to-all are measured on CPUs only, elsewhere they are part of forward and backward."
    )
    return card("Time of a step", "".join(parts), hint)


def bar(times: Mapping[str, float]) -> str:
    """Return a bar whose parts are shares of the time."""
    parts = "".join(
        f'<i class="{CAUSES[cause]}" style="flex-grow:{share:.4f}" '
        f'title="{escape(cause)} {share:.1%}"></i>'
        for cause, _, share in _shares(times)
    )
    return f'<div class="bar">{parts}</div>'


def causes(times: Mapping[str, float]) -> str:
    """Return the legend of a bar with milliseconds and shares."""
    items = "".join(
        f'<span class="key"><i class="{CAUSES[cause]}"></i>{escape(cause)} '
        f"<b>{_ms(seconds)} ms</b> {share:.1%}</span>"
        for cause, seconds, share in _shares(times)
    )
    return f'<p class="legend causes">{items}</p>'


def _shares(times: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Yield cause, seconds and share of the causes that do not round to 0.0%."""
    total = sum(times.values()) or 1.0
    for cause, seconds in times.items():
        if seconds > 0.0005 * total:
            yield cause, seconds, seconds / total


def memory_card(run: RunFiles) -> str:
    """Return predicted tensors and measured peaks by pipeline position; empty without them."""
    rows = run.info.memory[:MAX_RANKS]
    if not rows:
        return ""
    on_gpu = any(name.startswith("GPU") for name in run.info.environment)
    hint = (
        "Predicted: tensors of a rank at the peak, the state of the optimizer exactly. Measured: "
        + (
            "the most that torch allocated."
            if on_gpu
            else "how much a process has grown at its peak, with torch's and Python's own memory."
        )
    )
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.predicted))
    head = ["Pipeline rank", *map(str.capitalize, kinds), "Predicted", "Measured"]
    cells = [
        [
            str(row.pp_rank),
            *(size_text(row.predicted.get(kind, 0.0)) for kind in kinds),
            f"<b>{size_text(sum(row.predicted.values()))}</b>",
            "" if row.measured is None else f"<b>{size_text(row.measured)}</b>",
        ]
        for row in rows
    ]
    more = len(run.info.memory) - len(rows)
    note = f'<p class="hint">and {more} more positions</p>' if more > 0 else ""
    return card("Memory of a rank", table("stages stacked", head, cells) + note, hint)


def starts_with_records(run: RunFiles) -> list[tuple[RunStart, list[dict[str, Any]]]]:
    """Return each start of a run with the records of its steps."""
    starts = list(run.info.starts) or [
        RunStart(
            first_step=1,
            started_at=run.info.started_at,
            layout=run.info.layout,
            schedule=run.info.schedule,
        )
    ]
    ends = [start.first_step for start in starts[1:]] + [1 << 62]
    found = []
    for start, end in zip(starts, ends, strict=True):
        records = [each for each in run.metrics if start.first_step <= each["step"] < end]
        if records:
            found.append((start, records))
    return found


def size_text(num_bytes: float) -> str:
    """Format bytes.

    Example:
        >>> size_text(3 << 30), size_text(5 << 20), size_text(0)
        ('3.00 GiB', '5.0 MiB', '0.0 MiB')
    """
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):,.2f} GiB"
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.2g}"
