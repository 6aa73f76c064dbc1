"""Effect of expert clones on the load of ranks over a run, as a chart and a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megacore.report.charts import Reference, Series
from megacore.report.series import Point, finite_points


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


def balanced() -> Reference:
    """Return the reference line of perfect balance."""
    return Reference(value=1.0, label="all ranks alike")


def _worst(records: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    return finite_points(
        [
            (record["step"], max(layer[key] for layer in record["echo"].values()))
            for record in records
            if record.get("echo")
        ]
    )
