"""Microbatch of tokens, made by the data code and consumed by the model."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from megacore.ops.counter_random import StepKeys


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents of a microbatch; attention stays inside of them.

    Attributes:
        starts: Index of the first token of each document, ascending from 0, for each sample. On the
            host, so that every rank finds its part without waiting for the device.
        positions: Position of each token in its document, ``(B, S)``, int64.

    Raises:
        ValueError: If the starts of a sample do not begin with 0, do not rise, or reach its end.

    Example:
        >>> Documents.of([[0, 2], [0]], 3).positions.tolist()
        [[0, 1, 0], [0, 1, 2]]
    """

    starts: tuple[tuple[int, ...], ...]
    positions: Tensor

    def __post_init__(self) -> None:
        for number, row in enumerate(self.starts):
            if problem := problem_of_starts(row, self.positions.shape[-1]):
                raise ValueError(f"document starts of sample {number} {problem}")

    @classmethod
    def of(cls, starts: Sequence[Sequence[int]], sequence: int) -> Documents:
        """Describe samples of ``sequence`` tokens by the starts of their documents.

        Raises:
            ValueError: As for the class.
        """
        positions = torch.arange(sequence).repeat(len(starts), 1)
        documents = cls(starts=tuple(tuple(row) for row in starts), positions=positions)
        for row, row_positions in zip(starts, positions, strict=True):
            for begin, end in pairwise((*row, sequence)):
                row_positions[begin:end] -= begin
        return documents

    def cut(self, length: int) -> Documents:
        """Return the documents in pieces of at most ``length`` tokens; positions do not change.

        Example:
            >>> Documents.of([[0, 5]], 9).cut(2).starts
            ((0, 2, 4, 5, 7),)
        """
        sequence = self.positions.shape[-1]
        starts = (
            tuple(
                start
                for begin, end in pairwise((*row, sequence))
                for start in range(begin, end, length)
            )
            for row in self.starts
        )
        return replace(self, starts=tuple(starts))

    def pieces(
        self, sample: int, begin: int, end: int, *, window: int | None = None
    ) -> tuple[int, list[int], list[int]]:
        """Return the first key that queries ``[begin, end)`` see, and queries and keys by document.

        Only the first document may have more keys than queries: those before ``begin``.

        Args:
            sample: Index of the sample.
            begin: First query.
            end: One after the last query.
            window: Keys that a query attends to at most.

        Example:
            >>> Documents.of([[0, 2, 5]], 9).pieces(0, 3, 7)
            (2, [2, 2], [3, 2])
        """
        starts = self.starts[sample]
        inner = starts[bisect_right(starts, begin) : bisect_left(starts, end)]
        queries = [after - before for before, after in pairwise((begin, *inner, end))]
        first = starts[bisect_right(starts, begin) - 1]
        if window is not None:
            first = max(first, begin - window + 1)
        return first, queries, [queries[0] + begin - first, *queries[1:]]


def problem_of_starts(starts: Sequence[int], sequence: int) -> str:
    """Return what is wrong with the starts of the documents of a sample, or nothing.

    A document without a token would be a piece of length 0, which kernels cannot take.

    Example:
        >>> problem_of_starts([0, 4, 4], 8)
        'must rise, each document having a token, got 4 after 4'
        >>> problem_of_starts([0, 3], 8)
        ''
    """
    if len(starts) == 0 or starts[0] != 0:
        return f"must begin with 0, got {list(starts[:8])}"
    for before, after in pairwise(starts):
        if after <= before:
            return f"must rise, each document having a token, got {after} after {before}"
    if starts[-1] >= sequence:
        return f"must be below the {sequence} tokens of the sample, got {starts[-1]}"
    return ""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Documents that a loss compares with each other: the first ones of each sample.

    Attributes:
        counts: Answers of each sample. On the host.
        values: Numbers of each answer, ``(sum(counts), K)``, float32; K may be 0.
    """

    counts: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """The tokens of one forward pass on one data-parallel rank.

    Every rank of a pipeline and of a tensor-parallel group gets the same microbatch.

    Attributes:
        tokens: Token ids, ``(B, S)``, int64.
        labels: The next token of each token, ``(B, S)``, int64; below 0 where it does not count
            in the loss; ``None`` if no loss is computed.
        sample_ids: Global number of each sample, ``(B,)``, int64. Together with the step it
            identifies a sample in every layout, so that dropout masks do not depend on the rank of
            the sample.
        step: Optimizer step of the microbatch, from 0.
        loss_factor: Factor on its mean loss in the backward pass, such as the loss scale divided by
            the number of microbatches. Auxiliary losses (those of MoE routers) get the same factor.
        label_factor: Factor on the sum of the losses of its labels: ``loss_factor`` over the number
            of labels of this cp rank, also where that is 0. ``None``: derived from them.
        sample_factors: Factors on the auxiliary losses by sample, ``(B,)``, or of all, instead of
            ``loss_factor``: the mean over the samples of factor times mean loss counts. ``None`` if
            both have the same factor.
        number: Index of the microbatch in the step on this rank, which selects the graphs of
            captured layers; ``None`` runs them eagerly.
        keys: Keys of the step's random numbers on the device, for code that may be captured.
        documents: Documents, which attention does not cross; ``None``: each sample is one.
        lengths: Tokens of each sample before its padding, ``(B,)``, int64; ``None`` without padding
            in the data. Routers leave padding out of losses, counts, capacities and dispatch.
        answers: Documents that a loss of groups compares; ``None`` for other data.

    Raises:
        ValueError: If the shapes disagree.

    Example:
        >>> import torch
        >>> rows = torch.arange(6).view(2, 3)
        >>> Microbatch(tokens=rows, labels=rows + 1, sample_ids=torch.arange(2), step=0).shape
        (2, 3)
    """

    tokens: Tensor
    labels: Tensor | None
    sample_ids: Tensor
    step: int
    loss_factor: float | Tensor = 1.0
    label_factor: float | Tensor | None = None
    sample_factors: float | Tensor | None = None
    number: int | None = None
    keys: StepKeys | None = None
    documents: Documents | None = None
    lengths: Tensor | None = None
    answers: Answers | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.tokens.shape)
        if len(shape) != 2:
            raise ValueError(f"tokens have shape {shape}, expected (batch, sequence)")
        if self.labels is not None and tuple(self.labels.shape) != shape:
            raise ValueError(f"labels have shape {tuple(self.labels.shape)}, tokens have {shape}")
        if tuple(self.sample_ids.shape) != shape[:1]:
            raise ValueError(
                f"sample_ids have shape {tuple(self.sample_ids.shape)}, expected {shape[:1]}"
            )

    @property
    def router_factor(self) -> float | Tensor:
        """Factor on auxiliary losses: one number, or ``(B,)``."""
        return self.loss_factor if self.sample_factors is None else self.sample_factors

    @property
    def shape(self) -> tuple[int, int]:
        """``(B, S)``: samples and tokens per sample."""
        batch, sequence = self.tokens.shape
        return batch, sequence

    def to(self, device: torch.device | str) -> Microbatch:
        """Return a copy with its tensors on ``device``.

        Sync:
            Waits for copies between devices, unless the tensors are pinned.
        """
        return self._with(lambda x: x.to(device, non_blocking=x.is_pinned()))

    def pinned(self) -> Microbatch:
        """Return a copy in pinned memory, from which copies to a GPU need no wait."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Microbatch:
        documents = self.documents
        if documents is not None:
            documents = replace(documents, positions=change(documents.positions))
        answers = self.answers
        if answers is not None:
            answers = replace(answers, values=change(answers.values))
        return replace(
            self,
            tokens=change(self.tokens),
            labels=None if self.labels is None else change(self.labels),
            sample_ids=change(self.sample_ids),
            documents=documents,
            lengths=None if self.lengths is None else change(self.lengths),
            answers=answers,
        )
