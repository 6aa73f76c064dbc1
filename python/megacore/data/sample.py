"""Samples of training: tokens, labels and positions of one row of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        positions: Position of each token in its document, ``(seq_length,)``, int64, if attention
            stays inside documents; else ``None``.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64] | None = None


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


@dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive tokens of one or more documents.

    Attributes:
        tokens: Token ids, 1-D, int64.
        starts: Index of the first token of each document that starts in the window, ascending.
        counted: Whether the loss of predicting each token counts, 1-D, bool; ``None``: all count.
    """

    tokens: NDArray[np.int64]
    starts: Sequence[int]
    counted: NDArray[np.bool_] | None = None


def sample_of_window(window: Window, *, document_mask: bool) -> Sample:
    """Return the sample of ``seq_length + 1`` consecutive tokens.

    With ``document_mask``, positions restart with each document, and the first token of a document
    is the label of no token. The part of a document that the window begins with starts at 0.

    Example:
        >>> window = Window(tokens=np.array([7, 8, 9, 5, 6]), starts=[3])
        >>> sample = sample_of_window(window, document_mask=True)
        >>> sample.labels.tolist(), sample.positions.tolist()
        ([8, 9, -1, 6], [0, 1, 2, 0])
    """
    labels = window.tokens[1:].copy()
    if window.counted is not None:
        labels[~window.counted[1:]] = NO_LABEL
    positions = None
    if document_mask:
        starts = np.asarray([start for start in window.starts if start > 0], dtype=np.int64)
        labels[starts - 1] = NO_LABEL
        positions = positions_of(len(labels), starts)
    return Sample(tokens=window.tokens[:-1], labels=labels, positions=positions)


def positions_of(length: int, starts: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
    """Return the distance of each index to the last of ``starts``, or of 0, at or before it.

    Example:
        >>> positions_of(5, [2, 4]).tolist()
        [0, 1, 0, 1, 0]
    """
    index = np.arange(length, dtype=np.int64)
    begins = np.zeros(length, dtype=np.int64)
    inside = np.asarray(starts, dtype=np.int64)
    inside = inside[inside < length]
    begins[inside] = inside
    return index - np.maximum.accumulate(begins)
