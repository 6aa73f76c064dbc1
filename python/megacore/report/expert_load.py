"""Drawings of the load of each expert over a run, as SVG text."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

# More layers or boxes would only increase the file size; layers are sampled evenly.
MAX_LAYERS = 8
MAX_BOXES = 6000
MAX_BINS = 60
# A load this many times the mean has the full colour.
FULL_COLOUR = 3.0

Loads = list[list[float]]


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
        f'<rect x="{30 + x * box_width:.1f}" y="{y * box_height:.1f}" '
        f'width="{box_width + 0.2:.1f}" height="{box_height:.1f}" '
        f'fill-opacity="{min(1.0, value / FULL_COLOUR):.2f}">'
        f"<title>expert {y}: {value:.2f} of the mean</title></rect>"
        for x, column in enumerate(loads)
        for y, value in enumerate(column)
    ]
    labels = "".join(
        f'<text class="tick" x="24" y="{(y + 0.5) * box_height + 4:.1f}" '
        f'text-anchor="end">{y}</text>'
        for y in sorted({0, num_experts - 1})
    )
    bottom = height + 18
    caption = f'<text class="tick" x="30" y="{bottom}">layer {layer}</text>'
    now = max(loads[-1])
    last = f'<text class="tick" x="{width}" y="{bottom}" text-anchor="end">highest {now:.2f}</text>'
    return (
        f'<svg class="chart load" viewBox="0 0 {width} {height + 24}" role="img" font-size="12" '
        f'aria-label="Load of the experts of layer {layer}">'
        f"{''.join(boxes)}{labels}{caption}{last}</svg>"
    )


def _mean_share(loads: list[list[int]]) -> list[float]:
    if not loads:
        return [0.0]
    totals = [sum(column) for column in zip(*loads, strict=True)]
    mean = sum(totals) / len(totals)
    return [total / mean if mean else 0.0 for total in totals]
