"""Samples of training: tokens and labels of one row of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Label of a token that does not count in the loss.
NO_LABEL = -1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row of a microbatch.

    Attributes:
        tokens: Token ids, ``(seq_length,)``, int64.
        labels: The next token of each token, below 0 where it does not count, ``(seq_length,)``,
            int64.
        document_starts: Index of the first token of each document that starts in the sample; with
            ``data.document_mask`` also 0.
        length: Tokens before the padding at the end; ``None`` for data without padding.
        values: For a loss of groups: K numbers, possibly none, of each of the first R documents,
            which are its answers, ``(R, K)``, float64.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    document_starts: Sequence[int] = ()
    length: int | None = None
    values: NDArray[np.float64] | None = None


class Samples(Protocol):
    """Interface of datasets: an endless or long sequence of samples by number."""

    name: str

    @property
    def seq_length(self) -> int:
        """Number of predicted tokens per sample."""

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch of all sources."""

    def sample(self, number: int) -> Sample:
        """Return sample ``number`` >= 0; a function of the number alone.

        Raises:
            DataError: If a token is not in the vocabulary, or the samples have ended.
        """

    def epochs(self, num_samples: int) -> Mapping[str, float]:
        """Return the passes over each source, by name, that the first samples make."""


class OneEpoch:
    """Samples of which those after the first epoch do not count: no labels, and no answers."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.name = samples.name
        # Every source of a blend is read whole, in one of the first samples.
        self.num_samples = round(1 / min(samples.epochs(1 << 20).values()) * (1 << 20))

    def sample(self, number: int) -> Sample:
        """Return a sample; without labels after the first epoch."""
        if number < self.num_samples:
            return self._samples.sample(number)
        sample = self._samples.sample(0)
        values = None if sample.values is None else sample.values[:0]
        return replace(sample, labels=np.full_like(sample.labels, NO_LABEL), values=values)

    @property
    def seq_length(self) -> int:
        """Number of predicted tokens per sample."""
        return self._samples.seq_length

    @property
    def num_tokens(self) -> int:
        """Tokens of the epoch."""
        return self._samples.num_tokens

    def epochs(self, num_samples: int) -> Mapping[str, float]:
        """Return the passes over each source that the first samples make."""
        return self._samples.epochs(min(num_samples, self.num_samples))


@dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive tokens of one or more documents.

    Attributes:
        tokens: Token ids, 1-D, int64.
        starts: Index of the first token of each document that starts in the window, ascending.
        counted: Whether the loss of predicting each token counts, 1-D, bool; ``None``: all count.
        length: Tokens before the padding at the end; ``None`` for data without padding.
    """

    tokens: NDArray[np.int64]
    starts: Sequence[int]
    counted: NDArray[np.bool_] | None = None
    length: int | None = None


def sample_of_window(window: Window, *, document_mask: bool = False) -> Sample:
    """Return the sample of ``seq_length + 1`` consecutive tokens.

    Args:
        window: The tokens.
        document_mask: No document predicts the first token of the next one.

    Example:
        >>> window = Window(tokens=np.array([7, 8, 9, 5]), starts=[2, 3])
        >>> sample = sample_of_window(window)
        >>> sample.tokens.tolist(), sample.labels.tolist(), sample.document_starts
        ([7, 8, 9], [8, 9, 5], [2])
    """
    labels = window.tokens[1:].copy()
    if window.counted is not None:
        labels[~window.counted[1:]] = NO_LABEL
    starts = [start for start in window.starts if start < len(labels)]
    if document_mask:
        labels[[start - 1 for start in window.starts if start > 0]] = NO_LABEL
        starts = [0, *(start for start in starts if start > 0)]
    # The last token of the documents predicts nothing: it is in a longer sample what the token
    # behind the end is in a shorter one.
    length = None if window.length is None else window.length - 1
    return Sample(tokens=window.tokens[:-1], labels=labels, document_starts=starts, length=length)
