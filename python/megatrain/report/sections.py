"""Parts of a report, each a function from the files of a run to HTML."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from megacore.parallel import Topology
from megatrain.config import Config
from megatrain.config.resolved import derived_keys
from megatrain.config.schedule_file import COPY_NAME
from megatrain.report.charts import (
    ChartSpec,
    Reference,
    Series,
    legend,
    line_chart,
    linear_and_log,
)
from megatrain.report.events import event_list, events_of, layout_text, marks_of
from megatrain.report.parts import card, scrolling, table
from megatrain.report.run_files import RunFiles
from megatrain.report.series import (
    Point,
    duration_text,
    is_finite,
    metric_points,
    nice_axis,
    not_finite_since,
    number_text,
    smooth,
)
from megatrain.view import topology_svg

# Number of last steps whose mean is the final loss.
TAIL = 10


def header(run: RunFiles) -> str:
    """Return the title and one sentence about the run."""
    info = run.info
    facts = [info.model, f"{number_text(info.num_parameters)} parameters", info.data]
    lines = [" · ".join(escape(fact) for fact in facts)]
    lines.append(escape(f"{layout_text(info.layout)}; schedule {info.schedule}"))
    started = f"started {escape(info.started_at)}"
    resumed = f", continued from {escape(info.resumed_from)}" if info.resumed_from else ""
    lines.append(started + resumed)
    lines.append(escape(hardware_text(info.environment)))
    if info.prediction is not None:
        lines.append(escape(_prediction_text(info.prediction)))
    paragraphs = "".join(f"<p>{line}</p>" for line in lines if line)
    if info.command:
        # A word breaks only if it is longer than a line.
        words = " ".join(f"<span>{escape(word)}</span>" for word in info.command.split())
        paragraphs += f'<p><code class="command">{words}</code></p>'
    return f"<header><h1>{escape(info.name)}</h1>{paragraphs}</header>"


def hardware_text(environment: Mapping[str, str]) -> str:
    """Return the GPUs of rank 0's machine, or its processor."""
    gpus = [value for name, value in environment.items() if name.startswith("GPU")]
    if gpus:
        return f"{len(gpus)} x {gpus[0]} on rank 0's machine"
    facts = [environment.get("processor", "")]
    if "cores" in environment:
        facts.append(f"{environment['cores']} cores")
    facts.append(environment.get("memory", ""))
    return ", ".join(fact for fact in facts if fact)


def _prediction_text(prediction: Mapping[str, Any]) -> str:
    """Return predicted and measured time of a step and memory, and the term that is most off."""
    predicted, measured = prediction["predicted"], prediction["measured"]
    parts = [f"step {measured['step_s']:.3g} s, predicted {predicted['step_s']:.3g} s"]
    if measured["memory_bytes"]:
        gib = [each["memory_bytes"] / 2**30 for each in (measured, predicted)]
        parts.append(f"memory {gib[0]:.1f} GiB, predicted {gib[1]:.1f} GiB")
    off = prediction["most_off"].rpartition("_")[0].replace("_", " ")
    return f"{'; '.join(parts)} with {prediction['calibration']}; most off: {off}"


def tiles(run: RunFiles) -> str:
    """Return the tiles with the headline numbers."""
    info = run.info
    world = int(info.layout["world_size"])
    cells = [
        _loss_tile(run),
        _validation_tile(run),
        _speed_tile(run),
        _wall_time_tile(run),
        _tile(
            "World",
            f"{world:,}",
            layout_text(info.layout).rpartition("= ")[2],
            unit="rank" if world == 1 else "ranks",
        ),
        _skipped_tile(run),
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def loss_card(run: RunFiles) -> str:
    """Return the loss curve with validation points and the unigram entropy."""
    points = metric_points(run.metrics, "loss")
    window = max(1, len(points) // 40) | 1
    series = [Series(name="training loss", points=points, style="raw" if window > 1 else "main")]
    if window > 1:
        smoothed = smooth(points, window=window)
        series.append(Series(name=f"mean of {window} steps", points=smoothed))
    validation = metric_points(run.metrics, "validation_loss")
    if len(validation) > 1:
        series.append(Series(name="validation", points=validation, style="second", in_legend=False))
    series.append(Series(name="validation loss", points=validation, style="second", dots=True))
    entropy = run.info.unigram_entropy
    events = events_of(run)
    spec = ChartSpec(
        label="Training and validation loss by step",
        series=series,
        references=[]
        if entropy is None
        else [Reference(value=entropy, label=f"unigram entropy {entropy:.3f}")],
        marks=marks_of(events, labelled=True),
        top=_token_ticks(run),
        top_name="tokens",
        value_text=lambda value: f"{value:.4f}",
    )
    hint = (
        "Nats per token over the steps of the run. A model that only knows how frequent each token "
        "is reaches the unigram entropy; below it the model uses context."
        f"{_not_finite_note(run)}"
    )
    body = legend(spec) + linear_and_log(spec, name="loss") + event_list(events)
    return card("Loss", body + _validation_table(run), hint)


def _token_ticks(run: RunFiles) -> list[tuple[float, str]]:
    """Return ticks of the tokens axis by step; between two records tokens grow evenly."""
    length = run.info.config.get("model", {}).get("seq_length", 0)
    points = [(r["step"], r["samples"] * length) for r in run.metrics if r.get("samples")]
    if not length or len(points) < 2:
        return []
    low, high = points[0][1], points[-1][1]
    ticks = []
    for tick in nice_axis(low, high, num_ticks=6).ticks:
        pair = next(((a, b) for a, b in pairwise(points) if a[1] <= tick <= b[1]), None)
        if pair is not None:
            (step, tokens), (next_step, next_tokens) = pair
            share = (tick - tokens) / max(1, next_tokens - tokens)
            ticks.append((step + share * (next_step - step), number_text(tick)))
    return ticks


def _validation_table(run: RunFiles) -> str:
    """Return the last loss of each of several validation sets; empty for one set."""
    last: Mapping[str, float | None] = next(
        (r["validation_losses"] for r in reversed(run.metrics) if r.get("validation_losses")), {}
    )
    rows = [
        (escape(name), "not finite" if loss is None else f"{loss:.4f}")
        for name, loss in last.items()
    ]
    return table("sets", ("validation set", "last loss"), rows)


def small_charts(run: RunFiles) -> str:
    """Return charts of learning rate, gradient norm and speed."""
    norms = metric_points(run.metrics, "grad_norm")
    upper = _robust_upper([value for _, value in norms])
    above = sum(value > upper for _, value in norms)
    values = "value" if above == 1 else "values"
    cut = f" {above} {values} above {number_text(upper)} cut off." if above else ""
    schedule = run.info.config.get("optimizer", {}).get("schedule", "")
    marks = marks_of(events_of(run), labelled=False)
    charts = [
        (
            "Learning rate",
            f"Schedule: {schedule}." if schedule else "",
            _chart([Series(name="learning rate", points=metric_points(run.metrics, "lr"))]),
        ),
        (
            "Gradient norm",
            f"Before clipping.{cut}",
            _smoothed("gradient norm", norms, upper=upper if above else None),
        ),
        (
            "Tokens per second",
            "All ranks together.",
            _smoothed("tokens/s", metric_points(run.metrics, "tokens_per_s")),
        ),
    ]
    cards = "".join(
        card(title, line_chart(replace(spec, marks=marks), width=360, height=200), hint)
        for title, hint, spec in charts
    )
    return f'<div class="row">{cards}</div>'


def layout_card(run: RunFiles) -> str:
    """Return the drawing of ranks and their groups; empty for a single process."""
    topology = Topology(**run.info.layout)
    if topology.world_size == 1:
        return ""
    hint = "Which ranks work together along each parallel axis."
    return card("Rank layout", scrolling("drawing", topology_svg(topology)), hint)


def settings_card(run: RunFiles) -> str:
    """Return the settings that differ from their defaults and, folded, all others."""
    if not run.info.config:
        return ""
    changed: list[str] = []
    others: list[str] = []
    defaults = Config().model_dump(mode="json")
    for name, values in run.info.config.items():
        rows = _settings_rows(name, values, defaults.get(name, {}), run.info.derived)
        for found, is_changed in ((changed, True), (others, False)):
            lines = "".join(row for row, marked in rows if marked == is_changed)
            if lines:
                section = f"<h3>[{escape(name)}]</h3><table>{lines}</table>"
                found.append(f"<section>{section}</section>")
    folded = (
        "<details><summary>All other settings; those in <i>italics</i> were derived</summary>"
        f'<div class="settings">{"".join(others)}</div></details>'
    )
    body = f'<div class="settings">{"".join(changed)}</div>{folded}'
    return card("Configuration", body, "Settings that differ from their default.")


def sample_card(run: RunFiles) -> str:
    """Return a text that the trained model has continued; empty without one."""
    sample = run.info.sample
    if sample is None:
        return ""
    hint = "The model continues the marked start, from the validation data, at temperature 0.7."
    text = f"<mark>{escape(sample.prompt)}</mark>{escape(sample.text)}"
    return card("Generated text", f'<pre class="generated">{text}</pre>', hint)


def environment_card(run: RunFiles) -> str:
    """Return versions and hardware."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
        for name, value in run.info.environment.items()
    )
    return card("Environment", f'<table class="environment">{rows}</table>' if rows else "")


def files_card(run: RunFiles) -> str:
    """Return links to the other files of the run, if they exist."""
    known = {
        "metrics.jsonl": "one JSON object per step",
        "config.toml": "the settings above; trains the same run again",
        COPY_NAME: "the schedule, if it is from a file",
        "timeline.json": "the events of the timeline",
        "trace.json": "the measured step, to open in ui.perfetto.dev or chrome://tracing",
        "run.json": "the other facts of this page",
        "checkpoints": "to resume from, or for megacore generate",
    }
    items = "".join(
        f'<li><a href="{escape(name, quote=True)}">{escape(name)}</a><span>{text}</span></li>'
        for name, text in known.items()
        if (run.directory / name).exists()
    )
    where = Path(run.directory).absolute()
    return card("Files", f'<ul class="files">{items}</ul>', f"In {where}")


# ---- tiles ---------------------------------------------------------------------------------------


def _tile(name: str, value: str, sub: str, *, unit: str = "") -> str:
    small = f" <small>{escape(unit)}</small>" if unit else ""
    return (
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd>'
        f'<div class="sub">{sub}</div></div>'
    )


def _wall_time_tile(run: RunFiles) -> str:
    """Return the wall time of this start; earlier starts of a resumed run are not included."""
    if run.info.wall_time_s is None:
        return _tile("Wall time", "none", "the run has not ended")
    if run.info.resumed_from is None:
        sub = f"this run, {len(run.metrics):,} steps"
    else:
        sub = f"this run, continued from {escape(Path(run.info.resumed_from).name)}"
    return _tile("Wall time", duration_text(run.info.wall_time_s), sub)


def _not_finite_tile(name: str, step: int) -> str:
    return _tile(name, "not finite", f'<span class="pill bad">since step {step:,}</span>')


def _loss_tile(run: RunFiles) -> str:
    since = not_finite_since(run.metrics, "loss")
    if since is not None:
        return _not_finite_tile("Loss", since)
    points = metric_points(run.metrics, "loss")
    if not points:
        return _tile("Loss", "none", "no step was recorded")
    tail = points[-TAIL:]
    loss = statistics.fmean(value for _, value in tail)
    if run.info.unigram_entropy is None:
        return _tile(f"Loss, last {len(tail)} steps", f"{loss:.3f}", "mean over groups")
    gap = run.info.unigram_entropy - loss
    kind, word = ("good", "below") if gap > 0 else ("bad", "above")
    sub = f'<span class="pill {kind}">{abs(gap):.2f} {word}</span> unigram entropy'
    return _tile(f"Loss, last {len(tail)} steps", f"{loss:.3f}", sub, unit="nats")


def _validation_tile(run: RunFiles) -> str:
    since = not_finite_since(run.metrics, "validation_loss")
    if since is not None:
        return _not_finite_tile("Validation loss", since)
    points = metric_points(run.metrics, "validation_loss")
    if not points:
        return _tile("Validation loss", "none", "not measured")
    step, loss = points[-1]
    if run.info.unigram_entropy is None:
        return _tile("Validation loss", f"{loss:.3f}", f"step {step:,.0f}")
    perplexity = f"perplexity {math.exp(loss):.2f}, " if loss < 20 else ""
    return _tile("Validation loss", f"{loss:.3f}", f"{perplexity}step {step:,.0f}", unit="nats")


def _speed_tile(run: RunFiles) -> str:
    speeds = [value for _, value in metric_points(run.metrics, "tokens_per_s")]
    times = [value for _, value in metric_points(run.metrics, "step_time_s")]
    if not speeds or not times:
        return _tile("Speed", "none", "no step was recorded")
    sub = f"median; {statistics.median(times) * 1000:,.0f} ms per step{_efficiency_text(run)}"
    return _tile("Speed", number_text(statistics.median(speeds)), sub, unit="tokens/s")


def _efficiency_text(run: RunFiles) -> str:
    """Return the median MFU, or operations per second where the peak is not known."""
    shares = [value for _, value in metric_points(run.metrics, "mfu")]
    if shares:
        return f", MFU {statistics.median(shares):.1%}"
    speeds = [value for _, value in metric_points(run.metrics, "tflops_per_device")]
    if not speeds:
        return ""
    speed = statistics.median(speeds)
    amount = f"{speed:.3g} TFLOP/s" if speed >= 1 else f"{1e3 * speed:.3g} GFLOP/s"
    return f", {amount} per rank"


def _skipped_tile(run: RunFiles) -> str:
    skipped = run.metrics[-1].get("num_skipped", 0) if run.metrics else 0
    samples = run.metrics[-1].get("samples", 0) if run.metrics else 0
    if not skipped:
        return _tile("Samples", f"{samples:,}", "no step was skipped")
    sub = f'<span class="pill bad">{skipped}</span> skipped: gradient not finite'
    return _tile("Samples", f"{samples:,}", sub)


def _not_finite_note(run: RunFiles) -> str:
    """Describe the steps that are missing in the curve."""
    gaps = [r["step"] for r in run.metrics if "loss" in r and not is_finite(r["loss"])]
    if not gaps:
        return ""
    steps = "1 step" if len(gaps) == 1 else f"{len(gaps):,} steps"
    return f" The training loss was not finite in {steps}, first in step {gaps[0]:,}: not drawn."


# ---- charts --------------------------------------------------------------------------------------


def _smoothed(name: str, points: Sequence[Point], *, upper: float | None = None) -> ChartSpec:
    window = max(1, len(points) // 20) | 1
    mean = Series(name=f"mean of {window}", points=smooth(points, window=window))
    return _chart([Series(name=name, points=points, style="raw"), mean], upper=upper)


def _chart(series: Sequence[Series], *, upper: float | None = None) -> ChartSpec:
    label = f"{series[0].name} by step"
    return ChartSpec(label=label, series=series, from_zero=True, upper=upper)


def _robust_upper(values: Sequence[float]) -> float:
    """Return a limit that excludes single spikes: four times the 95th percentile."""
    if not values:
        return 1.0
    ordered = sorted(values)
    return 4 * ordered[int(0.95 * (len(ordered) - 1))]


# ---- tables --------------------------------------------------------------------------------------


def _settings_rows(
    section: str, values: Mapping[str, Any], defaults: Mapping[str, Any], derived: Sequence[str]
) -> list[tuple[str, bool]]:
    """Return the table row of each setting, and whether it differs from its default."""
    rows, default_of = [], flat_settings(defaults)
    for name, value in flat_settings(values).items():
        key, default = f"{section}.{name}", default_of.get(name)
        kind, note = "", ""
        if key in derived:
            kind = "derived"
        elif value != default or isinstance(value, bool) != isinstance(default, bool):
            kind = "changed"
            shown = setting_text(default)
            if default is None:
                shown = "derived from others" if key in derived_keys() else "not set"
            note = f"<small>default: {escape(shown)}</small>"
        text = escape(setting_text(value))
        row = f'<tr class="{kind}"><td>{escape(name)}</td><td><span>{text}</span>{note}</td></tr>'
        rows.append((row, kind == "changed"))
    return rows


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested sections into keys such as ``"echo.num_spare_slots"``."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat_settings(value) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{name}.{key}" if key else name: setting for key, setting in inner.items()}
    return flat


def setting_text(value: object) -> str:
    """Format the value of a setting."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
