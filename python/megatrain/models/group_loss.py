"""Losses of groups of answers, such as pairs of a preferred and a rejected one.

The answers of a group are documents of one sample, so that a group is never split. The loss gets
the log-prob of each answer, summed over all ranks that hold some of its tokens.

Shapes: S sequence of this cp rank, B batch, R answers of a microbatch, G groups, M metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.errors import ConfigError, DataError
from megacore.parallel.batch import Microbatch
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.process_groups import Group
from megatrain.models.loss import LossContext


@dataclass(frozen=True, kw_only=True)
class AnswerLogprobs:
    """Answers of a microbatch, group by group.

    Attributes:
        logprobs: Sum of the log-probs of the labels of each answer that count, ``(R,)``, float32;
            the same on all tp and cp ranks.
        num_tokens: Number of these labels, ``(R,)``, float32.
        values: Numbers of each answer that its data gave, ``(R, K)``, float32.
    """

    logprobs: Tensor
    num_tokens: Tensor
    values: Tensor


class GroupLoss(Protocol):
    """Loss of groups of answers: an object that ``train.loss`` names."""

    @property
    def group_size(self) -> int:
        """Answers of a group; those of a sample are its first documents, in order."""

    @property
    def metrics(self) -> Sequence[str]:
        """Names of the metrics."""

    def __call__(self, answers: AnswerLogprobs) -> tuple[Tensor, Tensor]:
        """Compute losses and metrics.

        Returns:
            The loss of each group, ``(G,)``, and its metrics, ``(M, G)``, which need no gradient.
        """


class GroupLossSum:
    """Mean loss of the groups of a microbatch, and sums of their metrics.

    Args:
        loss: The loss of groups.
        shown: The setting that names it, for messages.
        device: Device of the sums.

    Attributes:
        sums: Sums of the metrics, and their number of groups, since they were set to 0:
            ``(M + 1,)``, fp64. Over the cp ranks, each group counts once.
    """

    def __init__(self, loss: GroupLoss, *, shown: str, device: torch.device) -> None:
        self._loss, self._shown = loss, shown
        num_metrics = len(loss.metrics)
        self.sums = torch.zeros(num_metrics + 1, dtype=torch.float64, device=device)

    def __call__(self, losses_SB: Tensor, batch: Microbatch, context: LossContext) -> Tensor:
        """Compute the mean loss of the groups, the same on all tp and cp ranks.

        Args:
            losses_SB: Loss of each label of this cp rank; 0 where it does not count.
            batch: The microbatch.
            context: Position in the sequence.

        Raises:
            DataError: If the batch has no answers, or those of a sample are no whole groups.
            ConfigError: If the loss returns something else.

        Sync:
            One all-reduce over cp.
        """
        groups = num_groups(batch, self._loss.group_size)
        answers = answer_logprobs(losses_SB, batch, context)
        losses_G, metrics_MG = self._loss(answers)
        shape = (len(self._loss.metrics), sum(groups))
        if tuple(losses_G.shape) != shape[1:] or tuple(metrics_MG.shape) != shape:
            raise ConfigError(
                f"{self._shown} must return the losses of {shape[1]} groups and their metrics "
                f"{shape}, got {tuple(losses_G.shape)} and {tuple(metrics_MG.shape)}"
            )
        with torch.no_grad():
            share = 1.0 / context.region.cp.size
            self.sums[:-1] += metrics_MG.sum(1) * share
            self.sums[-1] += shape[1] * share
        return losses_G.sum() / max(1, shape[1])


def num_groups(batch: Microbatch, group_size: int) -> list[int]:
    """Return the number of groups of each sample.

    Raises:
        DataError: If the batch has no answers, or those of a sample are no whole groups.
    """
    if batch.answers is None or batch.documents is None:
        raise DataError(
            "a loss of groups needs samples with document_starts and values for their answers, "
            "and data.document_mask = true"
        )
    for row, (count, starts) in enumerate(
        zip(batch.answers.counts, batch.documents.starts, strict=True)
    ):
        if count % group_size or count > len(starts):
            raise DataError(
                f"sample {int(batch.sample_ids[row])} must have whole groups of {group_size} "
                f"answers, each a document, got {count} answers in {len(starts)} documents"
            )
    return [count // group_size for count in batch.answers.counts]


def answer_logprobs(losses_SB: Tensor, batch: Microbatch, context: LossContext) -> AnswerLogprobs:
    """Sum the log-probs of the labels of each answer.

    Sync:
        One all-reduce over cp.
    """
    assert batch.answers is not None
    region, labels_SB = context.region, context.labels(batch)
    places = region.share(_answers_of_tokens(batch).to(losses_SB.device)).t()
    rows = torch.arange(sum(batch.answers.counts), device=losses_SB.device)
    # A product, and not index_add, whose order of additions differs from run to run on GPUs.
    is_in_RN = (rows[:, None] == places.reshape(1, -1)).to(losses_SB.dtype)
    counts_N = (labels_SB >= 0).reshape(-1).to(losses_SB.dtype)
    sums = torch.stack((-(is_in_RN @ losses_SB.reshape(-1)), is_in_RN @ counts_N))
    logprobs, num_tokens = _sum_over(sums.float(), region.cp)
    return AnswerLogprobs(
        logprobs=logprobs, num_tokens=num_tokens.detach(), values=batch.answers.values
    )


def _answers_of_tokens(batch: Microbatch) -> Tensor:
    """Return the answer that each token of the samples is part of, ``(B, S)``; -1 for none."""
    assert batch.answers is not None
    assert batch.documents is not None
    size, sequence = batch.shape
    found = torch.full((size, sequence), -1)
    first = 0
    for row, (count, starts) in enumerate(
        zip(batch.answers.counts, batch.documents.starts, strict=True)
    ):
        ends = (*starts[1:], sequence)
        for number in range(count):
            found[row, starts[number] : ends[number]] = first + number
        first += count
    return found


def _sum_over(x: Tensor, cp: Group) -> Tensor:
    if cp.size == 1:
        return x
    result: Tensor = _SumOverContext.apply(x, cp)  # type: ignore[no-untyped-call]
    return result


class _SumOverContext(torch.autograd.Function):
    """Sum over cp ranks that all compute the same from it: the sum of their equal gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.size = group.size
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce_(total, group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None
