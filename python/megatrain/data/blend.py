"""Blends of datasets by weight: a pure function of the sample number."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.data.sample import Sample, Samples

_UNIT = 1 << 40


class BlendOrder:
    """Order of the samples of several datasets.

    Dataset 0 takes sample ``n`` if ``round(n * share)`` rises there; the samples that it leaves
    are divided among the other datasets in the same way. Shares are integers, so the order is
    exact for any sample number.

    Args:
        weights: Shares of the tokens, above 0; they need not sum to 1.

    Example:
        >>> order = BlendOrder([0.5, 0.25, 0.25])
        >>> "".join(str(order.locate(n)[0]) for n in range(12)), order.counts(12)
        ('010201020102', [6, 3, 3])
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        self._units = [max(1, round(weight / total * _UNIT)) for weight in weights]

    def locate(self, number: int) -> tuple[int, int]:
        """Return the dataset of a sample of the blend, and the sample's number in it."""
        rest = sum(self._units)
        for index, units in enumerate(self._units):
            before = _taken(number, units, rest)
            if _taken(number + 1, units, rest) > before:
                return index, before
            number -= before
            rest -= units
        raise AssertionError("the last dataset takes every sample that is left")

    def counts(self, num_samples: int) -> list[int]:
        """Return the samples of each dataset among the first ones of the blend."""
        counts = []
        rest = sum(self._units)
        for units in self._units:
            counts.append(_taken(num_samples, units, rest))
            num_samples -= counts[-1]
            rest -= units
        return counts


class Blend:
    """Samples of several datasets in proportion to their weights.

    Args:
        datasets: At least one.
        weights: Shares of the tokens, above 0; they need not sum to 1.
        name: Name in messages.
    """

    def __init__(self, datasets: Sequence[Samples], weights: Sequence[float], *, name: str) -> None:
        self.name = name
        self.datasets = list(datasets)
        self.order = BlendOrder(weights)

    @property
    def seq_length(self) -> int:
        """Number of predicted tokens per sample."""
        return self.datasets[0].seq_length

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch of every dataset."""
        return sum(dataset.num_tokens for dataset in self.datasets)

    def sample(self, number: int) -> Sample:
        """Return sample ``number`` >= 0 of the blend."""
        index, inner = self.order.locate(number)
        return self.datasets[index].sample(inner)

    def epochs(self, num_samples: int) -> dict[str, float]:
        """Return the passes over each dataset that the first samples make."""
        passes: dict[str, float] = {}
        for dataset, count in zip(self.datasets, self.order.counts(num_samples), strict=True):
            passes |= dataset.epochs(count)
        return passes


def _taken(number: int, units: int, whole: int) -> int:
    """Round ``number * units / whole`` to the nearest integer."""
    return (2 * number * units + whole) // (2 * whole)
