"""Chart arithmetic: smoothing, thinning, axis ticks, number formatting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of values with tick positions.

    Attributes:
        low: Value at the start of the axis.
        high: Value at the end of the axis.
        ticks: Round values in between, increasing.
    """

    low: float
    high: float
    ticks: tuple[float, ...]

    def position(self, value: float) -> float:
        """Return the position of a value: 0 at ``low``, 1 at ``high``."""
        return (value - self.low) / (self.high - self.low)


def nice_axis(low: float, high: float, *, num_ticks: int) -> Axis:
    """Return an axis from tick to tick that contains ``[low, high]``.

    Args:
        low: Smallest value.
        high: Largest value.
        num_ticks: Approximate number of ticks.

    Example:
        >>> nice_axis(1.93, 5.61, num_ticks=5).ticks
        (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    """
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    step = nice_step((high - low) / max(1, num_ticks - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Rounded, because 3 * 0.1 is not 0.3; plus 0.0, to avoid the sign of -0.0.
    digits = 2 - math.floor(math.log10(step))
    ticks = tuple(round(k * step, digits) + 0.0 for k in range(first, last + 1))
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks)


def log_axis(low: float, high: float, *, num_ticks: int) -> Axis:
    """Return an axis of decimal logarithms that contains ``[low, high]``, with round values.

    Example:
        >>> [round(10**tick, 3) for tick in log_axis(1.9, 5.6, num_ticks=5).ticks]
        [1.5, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    digits = (1, 2, 5) if high / low > 10 ** (num_ticks / 3) else (1, 1.5, 2, 3, 4, 5, 6, 8)
    powers = range(math.floor(math.log10(low)) - 1, math.floor(math.log10(high)) + 2)
    values = [digit * 10.0**power for power in powers for digit in digits]
    below = max(value for value in values if value <= low)
    above = min(value for value in values if value >= high and value > below)
    ticks = tuple(math.log10(value) for value in values if below <= value <= above)
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks)


def tight_axis(low: float, high: float, *, num_ticks: int) -> Axis:
    """Return an axis for steps that ends exactly at ``low`` and ``high``, with integer ticks.

    Example:
        >>> tight_axis(1, 100, num_ticks=6)
        Axis(low=1, high=100, ticks=(20, 40, 60, 80, 100))
    """
    if high <= low:
        return Axis(low=low - 0.5, high=low + 0.5, ticks=(low,))
    step = max(1, round(nice_step((high - low) / max(1, num_ticks - 1))))
    first = math.ceil(low / step)
    ticks = tuple(k * step for k in range(first, math.floor(high / step) + 1))
    return Axis(low=low, high=high, ticks=ticks)


def nice_step(rough: float) -> float:
    """Return the round number (1, 2 or 5 times a power of ten) nearest to ``rough`` by ratio.

    Example:
        >>> [nice_step(value) for value in (0.9, 23, 0.004)]
        [1.0, 20.0, 0.005]
    """
    power = 10.0 ** math.floor(math.log10(rough))
    candidates = [factor * power for factor in (1, 2, 5, 10)]
    return min(candidates, key=lambda value: abs(math.log(value / rough)))


def smooth(points: Sequence[Point], *, window: int) -> list[Point]:
    """Return the centred moving mean over ``window`` points, with shorter windows at the ends.

    Example:
        >>> smooth([(0, 1.0), (1, 4.0), (2, 1.0)], window=3)
        [(0, 1.0), (1, 2.0), (2, 1.0)]
    """
    half = window // 2
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    result = []
    for index, (x, _) in enumerate(points):
        reach = min(half, index, len(points) - 1 - index)
        low, high = index - reach, index + reach + 1
        result.append((x, (sums[high] - sums[low]) / (high - low)))
    return result


def thin(points: Sequence[Point], *, limit: int) -> list[Point]:
    """Keep at most about ``limit`` points, including the extremes of every interval.

    Example:
        >>> thin([(x, float(x == 50)) for x in range(100)], limit=4)
        [(0, 0.0), (50, 1.0), (51, 0.0)]
    """
    if len(points) <= limit:
        return list(points)
    stretches = max(1, limit // 2)
    kept = []
    for number in range(stretches):
        low = len(points) * number // stretches
        high = len(points) * (number + 1) // stretches
        indices = range(low, high)
        lowest = min(indices, key=lambda index: points[index][1])
        highest = max(indices, key=lambda index: points[index][1])
        kept += [points[index] for index in sorted({lowest, highest})]
    return kept


def finite_points(points: Sequence[tuple[float, float | None]]) -> list[Point]:
    """Return the points whose value was measured and is finite."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def metric_points(records: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """Return the finite values of one metric by step."""
    return finite_points([(record["step"], record.get(name)) for record in records])


def is_finite(value: float | None) -> bool:
    """Return whether a recorded value is finite; JSON stores NaN and infinity as ``None``."""
    return value is not None and math.isfinite(value)


def not_finite_since(records: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """Return the first step after which a metric was never finite again.

    Returns:
        ``None`` if its last recorded value is finite, or if it was never recorded.

    Example:
        >>> not_finite_since([{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}], "loss")
        2
    """
    since = None
    for record in records:
        if name in record:
            if is_finite(record[name]):
                since = None
            elif since is None:
                since = record["step"]
    return since


def number_text(value: float) -> str:
    """Format a number with about three significant digits, for an axis.

    Example:
        >>> [number_text(value) for value in (0, 0.003, 2.5, 12345, 0.00003, 1500000)]
        ['0', '0.003', '2.5', '12.3k', '3e-5', '1.5M']
    """
    size = abs(value)
    if size == 0:
        return "0"
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.3g}{suffix}"
    if size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.3g}"


def duration_text(seconds: float) -> str:
    """Format a time span as readable text.

    Example:
        >>> duration_text(4.24), duration_text(95), duration_text(7322)
        ('4.2 s', '1 min 35 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
