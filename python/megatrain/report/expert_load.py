"""Load of experts and of their ranks over a run: drawings, and the effect of clones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.report.charts import ChartSpec, Reference, Series, legend, two_sizes
from megatrain.report.parts import card
from megatrain.report.run_files import RunFiles
from megatrain.report.series import Point, finite_points, metric_points
from megatrain.view.svg import element, rect, text

# More layers or boxes would only increase the file size; layers are sampled evenly.
MAX_LAYERS = 8
MAX_BOXES = 6000
MAX_BINS = 60
# A load this many times the mean has the full colour.
FULL_COLOUR = 3.0

Loads = list[list[float]]


def experts_card(run: RunFiles) -> str:
    """Return the load of experts; empty for a model without experts."""
    loads = relative_loads(run.metrics)
    if not loads:
        return ""
    imbalance = [value for _, value in metric_points(run.metrics, "expert_imbalance")]
    dropped = sum(int(record.get("num_dropped_copies", 0)) for record in run.metrics)
    lost = f"{dropped:,} copies of tokens were dropped." if dropped else "No token was dropped."
    hint = (
        "One picture per layer: steps from left to right, experts from top to bottom. The colour "
        "is an expert's share of the tokens: none at 0, full at three times the fair share. In the "
        f"last step the busiest expert had {imbalance[-1]:.2f} times its share. {lost}"
    )
    drawings = "".join(load_drawing(layer, values) for layer, values in loads.items())
    return card("Load of the experts", f'<div class="loads">{drawings}</div>', hint)


def echo_card(run: RunFiles) -> str:
    """Return the effect of clones on the load of ranks; empty without clones."""
    series = echo_series(run.metrics)
    if not series:
        return ""
    hint = (
        "The highest load of a rank over the mean, in the layer where it is worst: as the router "
        f"chose, and with clones of hot experts. {echo_sentence(run.metrics)}"
    )
    spec = ChartSpec(
        label="Load of the fullest rank",
        series=series,
        references=[Reference(value=1.0, label="all ranks alike")],
    )
    return card("Load of the ranks", legend(spec) + two_sizes(spec, height=260), hint)


def relative_loads(records: Sequence[Mapping[str, Any]]) -> dict[str, Loads]:
    """Return the loads over the mean of their layer, averaged over ranges of steps.

    Args:
        records: Records of ``metrics.jsonl``.

    Returns:
        By layer, one list per range of steps, each with one number per expert; 1 is the fair share.
        Empty without records of experts.

    Example:
        >>> relative_loads([{"step": 1, "expert_load": {"1": [3, 1]}}])
        {'1': [[1.5, 0.5]]}
    """
    told = [record["expert_load"] for record in records if record.get("expert_load")]
    if not told:
        return {}
    layers = list(told[-1])
    if len(layers) > MAX_LAYERS:
        layers = [layers[index * len(layers) // MAX_LAYERS] for index in range(MAX_LAYERS)]
    num_experts = len(told[-1][layers[0]])
    num_bins = max(1, min(len(told), MAX_BINS, MAX_BOXES // num_experts))
    borders = [len(told) * index // num_bins for index in range(num_bins + 1)]
    return {
        layer: [
            _mean_share([loads[layer] for loads in told[first:last] if layer in loads])
            for first, last in itertools.pairwise(borders)
        ]
        for layer in layers
    }


def load_drawing(layer: str, loads: Loads, *, width: int = 360, height: int = 150) -> str:
    """Draw one layer: steps from left to right, experts from top to bottom, darker is higher.

    Args:
        layer: Its global index.
        loads: From `relative_loads`.
        width: Width of the drawing, in its own units.
        height: Height of the boxes.
    """
    num_experts = len(loads[0])
    box_width, box_height = (width - 30) / len(loads), height / num_experts
    boxes = [
        rect(
            30 + x * box_width,
            y * box_height,
            box_width + 0.2,
            box_height,
            tip=f"expert {y}: {value:.2f} of the mean",
            fill_opacity=min(1.0, value / FULL_COLOUR),
        )
        for x, column in enumerate(loads)
        for y, value in enumerate(column)
    ]
    labels = [
        text(24, (y + 0.5) * box_height + 4, y, css="tick", text_anchor="end")
        for y in sorted({0, num_experts - 1})
    ]
    bottom, highest = height + 18, f"highest {max(loads[-1]):.2f}"
    labels.append(text(30, bottom, f"layer {layer}", css="tick"))
    labels.append(text(width, bottom, highest, css="tick", text_anchor="end"))
    return element(
        "svg",
        "".join((*boxes, *labels)),
        css="chart load",
        viewBox=f"0 0 {width} {height + 24}",
        role="img",
        font_size=12,
        aria_label=f"Load of the experts of layer {layer}",
    )


def _mean_share(loads: list[list[int]]) -> list[float]:
    if not loads:
        return [0.0]
    totals = [sum(column) for column in zip(*loads, strict=True)]
    mean = sum(totals) / len(totals)
    return [total / mean if mean else 0.0 for total in totals]


def echo_series(records: Sequence[Mapping[str, Any]]) -> list[Series]:
    """Return the max over the mean load of ranks in each step's worst layer; empty without clones.

    Args:
        records: Records of ``metrics.jsonl``.

    Example:
        >>> layer = {"imbalance_before": 1.8, "imbalance_after": 1.01}
        >>> [series.points for series in echo_series([{"step": 1, "echo": {"1": layer}}])]
        [[(1, 1.8)], [(1, 1.01)]]
    """
    before, after = (_worst(records, f"imbalance_{when}") for when in ("before", "after"))
    if not after:
        return []
    return [
        Series(name="without clones", points=before, style="second"),
        Series(name="with clones", points=after),
    ]


def echo_sentence(records: Sequence[Mapping[str, Any]]) -> str:
    """Describe clones, traffic and planning time of the last step with clone records."""
    layers = next(record["echo"] for record in reversed(records) if record.get("echo")).values()
    clones = sum(layer["num_clones"] for layer in layers) / len(layers)
    mib = sum(layer["bytes_sent"] for layer in layers) / (1 << 20)
    micros = sum(layer["plan_us"] for layer in layers) / len(layers)
    return (
        f"In the last step a layer had {clones:.1f} clones per microbatch. Their weights and "
        f"gradients took {mib:,.1f} MiB in all, each plan {micros:.0f} microseconds."
    )


def _worst(records: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    return finite_points(
        [
            (record["step"], max(layer[key] for layer in record["echo"].values()))
            for record in records
            if record.get("echo")
        ]
    )
