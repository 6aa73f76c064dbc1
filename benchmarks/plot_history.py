"""Picture of ``history.jsonl``: each peer's processor time relative to megacore's, by measurement.

    python benchmarks/plot_history.py [--history FILE] [--out FILE]

Above 1, megacore is faster. Rows of other processors are other rows of the list below the charts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from _common import options
from megatrain.report.charts import ChartSpec, Reference, Series, line_chart

HERE = Path(__file__).parent
WIDTH, HEIGHT, COLUMNS, LINE = 320, 170, 3, 16
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #444; }
.grid { stroke: #ddd; } .axis { stroke: #888; }
.title { font-weight: 600; fill: #111; } path { fill: none; stroke: #2a6fb0; stroke-width: 2; }
.dots circle { fill: #2a6fb0; } .reference { stroke: #111; stroke-dasharray: 5 4; }
text.reference { stroke: none; } .cursor { visibility: hidden; }
"""


def ratios(
    measurements: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return ``(number of the measurement, ratio)`` of every contestant of every work.

    The first contestant of a work is megacore, which the others are divided by.
    """
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number, measurement in enumerate(measurements, start=1):
        base: dict[str, float] = {}
        for row in measurement["rows"]:
            cpu_ms = row["cpu_ms"][1]
            if row["work"] not in base:
                base[row["work"]] = cpu_ms
                continue
            key = row["work"], row["name"]
            points.setdefault(key, []).append((float(number), cpu_ms / base[row["work"]]))
    return points


def picture(measurements: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG document with a chart for each contestant, and the list of measurements."""
    charts = list(_charts(measurements))
    rows = -(-len(charts) // COLUMNS)
    parts = [
        f'<g transform="translate({i % COLUMNS * WIDTH} {i // COLUMNS * HEIGHT})">{chart}</g>'
        for i, chart in enumerate(charts)
    ]
    for number, measurement in enumerate(measurements, start=1):
        text = (
            f"{number}: {measurement['commit']}, {measurement['date']}, {measurement['cpu']}, "
            f"{measurement.get('vectors', '')}, load {measurement['load'].split()[0]}"
        )
        parts.append(f'<text x="8" y="{rows * HEIGHT + LINE * number}">{escape(text)}</text>')
    width, height = COLUMNS * WIDTH, rows * HEIGHT + LINE * (len(measurements) + 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _charts(measurements: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for (work, name), points in ratios(measurements).items():
        spec = ChartSpec(
            label=f"{work}: {name}",
            series=[Series(name=name, points=points), Series(name=name, points=points, dots=True)],
            references=[Reference(value=1.0, label="")],
        )
        chart = line_chart(spec, width=WIDTH - 20, height=HEIGHT - 50)
        size = f'<svg x="8" y="40" width="{WIDTH - 20}" height="{HEIGHT - 50}" '
        yield (
            f'<text class="title" x="8" y="18">{escape(name)}</text>'
            f'<text x="8" y="34">{escape(work)}</text>{chart.replace("<svg ", size, 1)}'
        )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--history", type=Path, default=HERE / "history.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "history.svg")
    args = parser.parse_args()
    lines = args.history.read_text().splitlines()
    args.out.write_text(picture([json.loads(line) for line in lines]))
    print(args.out)


if __name__ == "__main__":
    main()
