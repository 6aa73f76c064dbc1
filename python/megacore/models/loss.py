"""Cross entropy over a vocabulary that is split over tensor-parallel ranks.

Logits are never gathered: ranks exchange one maximum and two sums per token.

Shapes: S sequence, B batch, V this rank's true (unpadded) vocabulary columns, possibly none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.models.mappings import Region
from megacore.models.shape import GPTShape
from megacore.parallel.batch import Microbatch
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.process_groups import Group


@dataclass(frozen=True, kw_only=True)
class LossContext:
    """Position of a rank's logits and labels in the whole vocabulary and sequence.

    Attributes:
        region: The tp group that splits the vocabulary, and the cp group that splits sequences.
        vocab: Tokens of the vocabulary, without padding.
        first_column: Token of the first logit of this tp rank.
    """

    region: Region
    vocab: int
    first_column: int

    @classmethod
    def of(cls, region: Region, shape: GPTShape) -> LossContext:
        """Take the padded vocabulary of a shape, split over the tp group in equal parts."""
        rows = shape.padded_vocab // region.group.size
        return cls(region=region, vocab=shape.vocab, first_column=region.group.position * rows)

    def labels(self, batch: Microbatch) -> Tensor:
        """Return the labels of this cp rank, ``(S, B)``, below 0 where they do not count."""
        if batch.labels is None:
            raise ValueError("a loss needs labels, but the batch has none")
        return self.region.share(batch.labels).t()


class Loss(Protocol):
    """Loss function of ``train.loss``."""

    def __call__(self, output: Tensor, batch: Microbatch, context: LossContext) -> Tensor:
        """Compute the mean loss of this cp rank's tokens that count.

        Args:
            output: Output of the last stage; of megacore's GPT the logits of this tp rank's
                columns of the vocabulary, ``(S, B, V)``.
            batch: The microbatch.
            context: Position of the output in vocabulary and sequence.

        Returns:
            Scalar, the same on every tp rank.
        """


def token_loss(output: Tensor, batch: Microbatch, context: LossContext) -> Tensor:
    """Compute the mean cross entropy of the next token, see `cross_entropy`."""
    return cross_entropy(
        output,
        context.labels(batch),
        first_column=context.first_column,
        group=context.region.group,
    )


def cross_entropy(
    logits_SBV: Tensor, labels_SB: Tensor, *, first_column: int, group: Group
) -> Tensor:
    """Compute the mean negative log likelihood of the labels that count.

    Args:
        logits_SBV: This rank's columns, ``(S, B, V)``, any float dtype; ``V`` may differ between
            ranks and may be 0.
        labels_SB: Global token ids, ``(S, B)``, int64, each a column of exactly one rank; below 0
            for an ignored token.
        first_column: Global id of column 0.
        group: The tp group.

    Returns:
        Scalar, float32 (float64 for float64 logits), the same on every rank; 0 if all are ignored.
        The gradient of a rank's logits needs no communication.

    Sync:
        Two all-reduces over ``group``; none for a group of one.

    Example:
        >>> logits, labels = torch.zeros(1, 1, 4), torch.tensor([[2]])
        >>> loss = cross_entropy(logits, labels, first_column=0, group=Group.solo())
        >>> f"{loss.item():.4f}"  # ln(4)
        '1.3863'
    """
    result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_SBV, labels_SB, first_column, group
    )
    return result


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first_column: int, group: Group
    ) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        num_columns = wide.shape[-1]
        shifted = wide - _maximum(wide, group)[..., None]
        column = labels - first_column
        here = (column >= 0) & (column < num_columns)
        column = column.clamp(0, max(num_columns - 1, 0))[..., None]
        if num_columns > 0:
            label_logit = shifted.gather(-1, column).squeeze(-1).mul_(here)
        else:
            label_logit = shifted.new_zeros(labels.shape)
        softmax = shifted.exp_()
        sums = torch.stack((softmax.sum(-1), label_logit))
        all_reduce_(sums, group)
        softmax.div_(sums[0, ..., None])
        counts = labels >= 0
        num_tokens = counts.sum().clamp_(min=1)
        ctx.save_for_backward(softmax, column, here, counts, num_tokens)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).mul_(counts).sum() / num_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, column, here, counts, num_tokens = ctx.saved_tensors
        scale = counts[..., None] * (grad / num_tokens)
        grad_logits = softmax * scale
        if grad_logits.shape[-1] > 0:
            grad_logits.scatter_add_(-1, column, here[..., None] * -scale)
        return grad_logits.to(ctx.dtype), None, None, None


def _maximum(logits: Tensor, group: Group) -> Tensor:
    """Return the largest logit of each token over the whole vocabulary, ``(S, B)``."""
    if logits.shape[-1] > 0:
        maximum = logits.amax(-1)
    else:
        maximum = logits.new_full(logits.shape[:-1], -torch.inf)
    all_reduce_(maximum, group, op="max")
    return maximum
