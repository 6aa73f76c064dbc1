"""Cross entropy over a vocabulary that is split over tensor-parallel ranks.

Logits are never gathered: ranks exchange one maximum and two sums per token.

Shapes: S sequence, B batch, V this rank's true (unpadded) vocabulary columns, possibly none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore import host_values
from megacore.errors import ConfigError
from megacore.parallel.batch import Microbatch
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.process_groups import Group
from megatrain.models.mappings import Region
from megatrain.models.shape import GPTShape


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


class FirstLossCheck:
    """Check of the first training loss of a function or model of one's own.

    Args:
        shown: The setting that names the function, for messages.
        group: The tp group, whose ranks must compute the same loss.
    """

    def __init__(self, shown: str, group: Group) -> None:
        self._shown = shown
        self._group = group
        self._is_done = False

    def __call__(self, loss: object, *, advice: str = "") -> Tensor:
        """Return the loss.

        Args:
            loss: Result of the function.
            advice: End of the message about another result than a scalar.

        Raises:
            ConfigError: On every tp rank, if it is not a scalar, or in the first training step not
                finite, without gradient, or different on another tp rank.

        Sync:
            Waits for the device in the first training step. One all-reduce over the tp group.
        """
        if not isinstance(loss, Tensor) or loss.dim() > 0 or not loss.is_floating_point():
            found = type(loss).__name__
            if isinstance(loss, Tensor):
                found = f"a tensor {tuple(loss.shape)} {loss.dtype}"
            raise ConfigError(
                f"{self._shown} must return a scalar loss on the last stage, got {found}{advice}"
            )
        if not self._is_done and torch.is_grad_enabled():
            self._is_done = True
            self._check(loss)
        return loss

    def _check(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise ConfigError(
                f"{self._shown} must return a loss with a gradient, got one that does not depend "
                "on the parameters; compute it from the output, without detach() or item()"
            )
        value = loss.detach().double()
        bounds = torch.stack((value, -value))
        all_reduce_(bounds, self._group, op="max")
        highest, negative = host_values.read(
            bounds, "first loss of one's own", assumed=lambda: [0.0, 0.0]
        )
        lowest = -negative
        if not (math.isfinite(highest) and math.isfinite(lowest)):
            raise ConfigError(
                f"{self._shown} must return a finite loss in the first step, got {highest}"
            )
        if highest - lowest > 1e-6 * max(1.0, abs(highest)):
            raise ConfigError(
                f"{self._shown} must return the same loss on every tensor-parallel rank, got "
                f"{lowest:.6g} to {highest:.6g}; logits are this rank's columns of the vocabulary, "
                "so sum over them with reduce_from_group(x, context.region.group)"
            )


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
    losses = token_losses(logits_SBV, labels_SB, first_column=first_column, group=group)
    return mean_of_labels(losses, labels_SB)


def mean_of_labels(losses_SB: Tensor, labels_SB: Tensor) -> Tensor:
    """Return the mean of the losses of the labels that count; 0 if all are ignored."""
    return losses_SB.sum() / (labels_SB >= 0).sum().clamp_(min=1)


def token_losses(
    logits_SBV: Tensor, labels_SB: Tensor, *, first_column: int, group: Group
) -> Tensor:
    """Compute the negative log likelihood of each label; arguments as for `cross_entropy`.

    Returns:
        ``(S, B)``, float32 (float64 for float64 logits), the same on every rank; 0 for an ignored
        label.

    Sync:
        Two all-reduces over ``group``; none for a group of one.
    """
    result: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        logits_SBV, labels_SB, first_column, group
    )
    return result


class _TokenLosses(torch.autograd.Function):
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
        ctx.save_for_backward(softmax, column, here, counts)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).mul_(counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, column, here, counts = ctx.saved_tensors
        scale = (counts * grad)[..., None]
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
