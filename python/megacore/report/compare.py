"""Comparison of two runs as one self-contained HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from megacore.report.charts import ChartSpec, Series, legend
from megacore.report.cost import bar, causes, size_text, times_of
from megacore.report.events import layout_text
from megacore.report.page import drawn, html_page
from megacore.report.run_files import RunFiles, read_run
from megacore.report.sections import (
    flat_settings,
    linear_and_log,
    metric_points,
    setting_text,
)
from megacore.report.series import number_text, smooth

TAIL = 10


def write_comparison(first: str | Path, second: str | Path, path: str | Path) -> Path:
    """Write a page that compares two runs.

    Args:
        first: Folder of a run.
        second: Folder of the other run.
        path: The page.

    Raises:
        MegacoreError: If a folder is not a run, or one of its files is invalid.
    """
    runs = read_run(first), read_run(second)
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(comparison_html(*runs), encoding="utf-8")
    partial.replace(path)
    return path


def comparison_html(first: RunFiles, second: RunFiles) -> str:
    """Return the page as HTML text.

    Raises:
        MegacoreError: If the records of a run have values that cannot be drawn.
    """
    return drawn(first, lambda: drawn(second, lambda: _page((first, second))))


def _page(runs: tuple[RunFiles, RunFiles]) -> str:
    names = _names(runs)
    lines = "".join(
        f'<p class="legend"><span class="key"><i class="{style}"></i>'
        f"<b>{escape(name)}</b> {escape(layout_text(run.info.layout))}; {escape(run.info.model)}; "
        f"{escape(run.info.data)}</span></p>"
        for run, name, style in zip(runs, names, ("main", "second"), strict=True)
    )
    body = (
        f"<header><h1>{escape(names[0])} and {escape(names[1])}</h1>{lines}</header>",
        _card("Results", _numbers_table(runs, names)),
        _chart("Loss", "loss", runs, names),
        _chart("Validation loss", "validation_loss", runs, names),
        _chart("Tokens per second", "tokens_per_s", runs, names),
        _chart("Gradient norm", "grad_norm", runs, names),
        _times(runs, names),
        _card("Settings that differ", _settings_table(runs, names)),
    )
    return html_page(" and ".join(names), "\n".join(body), runs[0].info.environment)


def _names(runs: Sequence[RunFiles]) -> tuple[str, str]:
    """Return the names of the runs, or their folders if these are equal."""
    first, second = (run.info.name for run in runs)
    if first != second:
        return first, second
    return str(runs[0].directory), str(runs[1].directory)


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>' if body else ""


def _chart(title: str, name: str, runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    series = []
    for run, label, style in zip(runs, names, ("main", "second"), strict=True):
        points = metric_points(run, name)
        window = max(1, len(points) // 40) | 1
        if window > 1:
            raw = Series(name=label, points=points, style=f"{style} raw", in_legend=False)
            series.append(raw)
            points = smooth(points, window=window)
        series.append(Series(name=label, points=points, style=style, dots=len(points) == 1))
    if not any(each.points for each in series):
        return ""
    spec = ChartSpec(label=f"{title} by step", series=series)
    return _card(title, legend(spec) + linear_and_log(spec, name=name))


def _times(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    parts = []
    for run, name in zip(runs, names, strict=True):
        # The last start, whose layout is that of the page.
        first = run.info.starts[-1].first_step if run.info.starts else 1
        times = times_of([record for record in run.metrics if record["step"] >= first])
        if times:
            total = f"{1000 * sum(times.values()):,.0f} ms per step"
            title = f'<h3>{escape(name)} <span class="total">{total}</span></h3>'
            parts.append(title + bar(times) + causes(times))
    return _card("Time of a step", "".join(parts))


def _numbers_table(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    rows: list[tuple[str, Callable[[RunFiles], float | None], Callable[[float], str]]] = [
        ("steps", lambda run: run.metrics[-1]["step"] if run.metrics else None, "{:,}".format),
        (f"loss, last {TAIL} steps", lambda run: _tail(run, "loss"), "{:.4f}".format),
        ("validation loss", lambda run: _last(run, "validation_loss"), "{:.4f}".format),
        ("tokens/s, median", lambda run: _median(run, "tokens_per_s"), number_text),
        ("time of a step, median, ms", lambda run: _ms(run), "{:,.1f}".format),
        ("MFU, median", lambda run: _median(run, "mfu"), "{:.1%}".format),
        ("memory of a rank, peak", lambda run: _last(run, "memory_peak_bytes"), size_text),
        ("skipped steps", lambda run: _last(run, "num_skipped"), "{:,.0f}".format),
        ("parameters", lambda run: run.info.num_parameters, "{:,}".format),
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = []
    for title, value_of, text_of in rows:
        values = [value_of(run) for run in runs]
        if any(value is not None for value in values):
            cells = ["" if value is None else text_of(value) for value in values]
            cells.append(_difference(values[0], values[1]))
            body.append(
                f"<tr><td>{title}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
            )
    return (
        f'<table class="stages"><thead><tr><th></th>{head}<th>difference</th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _settings_table(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    both = [flat_settings(run.info.config) for run in runs]
    keys = list(dict.fromkeys([*both[0], *both[1]]))
    rows = []
    for key in keys:
        values = [setting_text(each[key]) if key in each else "not set" for each in both]
        if values[0] != values[1]:
            cells = "".join(f"<td>{escape(value)}</td>" for value in values)
            rows.append(f"<tr><td>{escape(key)}</td>{cells}</tr>")
    if not rows:
        return '<p class="hint">None: all settings are equal.</p>'
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    return (
        f'<table class="stages"><thead><tr><th>setting</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _difference(first: float | None, second: float | None) -> str:
    if first is None or second is None or not first:
        return ""
    return f"{second / first - 1:+.1%}"


def _values(run: RunFiles, name: str) -> list[float]:
    return [value for _, value in metric_points(run, name)]


def _tail(run: RunFiles, name: str) -> float | None:
    values = _values(run, name)[-TAIL:]
    return statistics.fmean(values) if values else None


def _last(run: RunFiles, name: str) -> float | None:
    values = _values(run, name)
    return values[-1] if values else None


def _median(run: RunFiles, name: str) -> float | None:
    values = _values(run, name)
    return statistics.median(values) if values else None


def _ms(run: RunFiles) -> float | None:
    seconds = _median(run, "step_time_s")
    return None if seconds is None else 1000 * seconds
