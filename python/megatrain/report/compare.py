"""Comparison of two runs as one self-contained HTML page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megatrain.report.charts import ChartSpec, Series, legend, linear_and_log
from megatrain.report.cost import bar, causes, size_text, times_of
from megatrain.report.events import layout_text
from megatrain.report.page import drawn, html_page
from megatrain.report.parts import card, table
from megatrain.report.run_files import RunFiles, read_run
from megatrain.report.sections import TAIL, flat_settings, setting_text
from megatrain.report.series import metric_points, number_text, smooth


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
        card("Results", _numbers_table(runs, names)),
        _chart("Loss", "loss", runs, names),
        _chart("Validation loss", "validation_loss", runs, names),
        _chart("Tokens per second", "tokens_per_s", runs, names),
        _chart("Gradient norm", "grad_norm", runs, names),
        _times(runs, names),
        card("Settings that differ", _settings_table(runs, names)),
    )
    return html_page(" and ".join(names), "\n".join(body), runs[0].info.environment)


def _names(runs: Sequence[RunFiles]) -> tuple[str, str]:
    """Return the names of the runs, or their folders if these are equal."""
    first, second = (run.info.name for run in runs)
    if first != second:
        return first, second
    return str(runs[0].directory), str(runs[1].directory)


def _chart(title: str, name: str, runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    series = []
    for run, label, style in zip(runs, names, ("main", "second"), strict=True):
        points = metric_points(run.metrics, name)
        window = max(1, len(points) // 40) | 1
        if window > 1:
            raw = Series(name=label, points=points, style=f"{style} raw", in_legend=False)
            series.append(raw)
            points = smooth(points, window=window)
        series.append(Series(name=label, points=points, style=style, dots=len(points) == 1))
    if not any(each.points for each in series):
        return ""
    spec = ChartSpec(label=f"{title} by step", series=series)
    return card(title, legend(spec) + linear_and_log(spec, name=name))


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
    return card("Time of a step", "".join(parts))


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A number of both runs.

    Attributes:
        title: Its name, HTML.
        value: The number of a run, if it has one.
        text: Format of the number.
        noise: Relative difference up to which two runs count as equal; ``None`` if not known.
    """

    title: str
    value: Callable[[RunFiles], float | None]
    text: Callable[[float], str]
    noise: Callable[[Sequence[RunFiles]], float] | None = None


def _metric_row(title: str, name: str, text: Callable[[float], str], *, scale: float = 1) -> _Row:
    """Return the row of a metric's median; its noise is half the middle range of its steps.

    The range is one of logarithms, so that a speed and a time are judged alike.
    """
    return _Row(
        title=title,
        value=lambda run: _median(run, name, scale),
        text=text,
        noise=lambda runs: max(_half_middle_range(_values(run, name)) for run in runs),
    )


_ROWS = (
    _Row(
        title="steps",
        value=lambda run: run.metrics[-1]["step"] if run.metrics else None,
        text="{:,}".format,
    ),
    _Row(
        title="global batch, sequences",
        value=lambda run: _setting(run, "train", "global_batch_size"),
        text="{:,}".format,
    ),
    _Row(
        title="length of a sequence",
        value=lambda run: _setting(run, "model", "seq_length"),
        text="{:,}".format,
    ),
    _Row(
        title=f"loss, last {TAIL} steps",
        value=lambda run: _tail(run, "loss"),
        text="{:.4f}".format,
        noise=lambda runs: _noise_of_means(runs, "loss"),
    ),
    _Row(
        title="validation loss",
        value=lambda run: _last(run, "validation_loss"),
        text="{:.4f}".format,
    ),
    _metric_row("tokens/s, median", "tokens_per_s", number_text),
    _metric_row("time of a step, median, ms", "step_time_s", "{:,.1f}".format, scale=1000),
    _metric_row("MFU, median", "mfu", "{:.1%}".format),
    _Row(
        title="memory of a rank, peak",
        value=lambda run: _last(run, "memory_peak_bytes"),
        text=size_text,
    ),
    _Row(title="skipped steps", value=lambda run: _last(run, "num_skipped"), text="{:,.0f}".format),
    _Row(title="parameters", value=lambda run: run.info.num_parameters, text="{:,}".format),
)
_NOISE = (
    f"Within noise: the means of the last {TAIL} losses differ by less than two standard errors, "
    "medians of other numbers by less than half the range of the middle half of the steps of a run."
)
_BATCHES = (
    "The global batches differ: at one step, the runs have trained on different numbers of tokens."
)


def _numbers_table(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    body = []
    for row in _ROWS:
        values = [row.value(run) for run in runs]
        if all(value is None for value in values):
            continue
        cells = ["" if value is None else escape(row.text(value)) for value in values]
        cells.append(_difference(row, runs, values[0], values[1]))
        body.append([row.title, *cells])
    hints = [_NOISE] if any("within noise" in difference for *_, difference in body) else []
    tokens = {_tokens_per_step(run) for run in runs} - {None}
    hints += [_BATCHES] if len(tokens) > 1 else []
    notes = "".join(f'<p class="hint">{hint}</p>' for hint in hints)
    return table("stages results", ["", *names, "difference"], body) + notes


def _settings_table(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    both = [flat_settings(run.info.config) for run in runs]
    keys = list(dict.fromkeys([*both[0], *both[1]]))
    rows = []
    for key in keys:
        values = [setting_text(each[key]) if key in each else "not set" for each in both]
        if values[0] != values[1]:
            rows.append([escape(key), *map(escape, values)])
    if not rows:
        return '<p class="hint">None: all settings are equal.</p>'
    return table("stages", ["setting", *names], rows)


def _difference(
    row: _Row, runs: Sequence[RunFiles], first: float | None, second: float | None
) -> str:
    if first is None or second is None or not first:
        return ""
    ratio = second / first
    small = row.noise is not None and ratio > 0 and 0 < abs(math.log(ratio)) <= row.noise(runs)
    return f"{ratio - 1:+.1%}" + ("<small>within noise</small>" if small else "")


def _half_middle_range(values: Sequence[float]) -> float:
    """Return half the distance of the quartiles of the logarithms."""
    logs = [math.log(value) for value in values if value > 0]
    if len(logs) < 2:
        return 0.0
    low, _, high = statistics.quantiles(logs, n=4)
    return (high - low) / 2


def _noise_of_means(runs: Sequence[RunFiles], name: str) -> float:
    """Return two standard errors of the difference of the last steps' means, over the mean."""
    tails = [_values(run, name)[-TAIL:] for run in runs]
    variance = sum(statistics.variance(tail) / len(tail) for tail in tails if len(tail) > 1)
    return 2 * math.sqrt(variance) / abs(statistics.fmean(tails[0]) or 1.0)


def _setting(run: RunFiles, section: str, key: str) -> float | None:
    value: float | None = run.info.config.get(section, {}).get(key)
    return value


def _tokens_per_step(run: RunFiles) -> float | None:
    batch, length = (
        _setting(run, "train", "global_batch_size"),
        _setting(run, "model", "seq_length"),
    )
    return None if batch is None or length is None else batch * length


def _values(run: RunFiles, name: str) -> list[float]:
    return [value for _, value in metric_points(run.metrics, name)]


def _tail(run: RunFiles, name: str) -> float | None:
    values = _values(run, name)[-TAIL:]
    return statistics.fmean(values) if values else None


def _last(run: RunFiles, name: str) -> float | None:
    values = _values(run, name)
    return values[-1] if values else None


def _median(run: RunFiles, name: str, scale: float = 1) -> float | None:
    values = _values(run, name)
    return scale * statistics.median(values) if values else None
