"""Output layer and cross entropy over blocks of the vocabulary, without the whole logits.

The forward pass keeps one number per token, the logarithm of the sum of exponentials. The backward
pass computes the logits of each block again: a fourth matrix product of this size, for 4 bytes less
per token and column. Blocks are columns and not tokens, so the gradient of the weight is written
once, one product per block, and needs no wide copy of the weight to sum in.

In a split backward pass, I and W both compute the logits again. To keep their gradients from I to W
instead would take the saved memory again for each microbatch between the two, and I and W would not
take equally long, as schedules assume.

Source:
    Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009, for
    the recomputation of logits in blocks.

Shapes: S sequence, B batch, N = S * B tokens, H hidden, R rows of this rank's part of the padded
vocabulary, V its true rows, C columns of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.ops.linear import (
    add_weight_grad_,
    added_grad_of,
    multiply_,
    multiply_input_grad,
    multiply_weight_grad_,
)
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.process_groups import Group


def head_token_losses(
    x_SBH: Tensor,
    weight_RH: Tensor,
    labels_SB: Tensor,
    *,
    num_columns: int,
    columns: int,
    first_column: int,
    softcap: float | None,
    group: Group,
) -> Tensor:
    """Compute ``token_losses(softcap(linear(x, weight[:num_columns])))`` in blocks.

    Soft caps are computed in float32 at least. Gradients of narrow inputs are sums of one rounded
    product per block, in float32.

    Args:
        x_SBH: ``(S, B, H)``, the same on every rank, any float dtype.
        weight_RH: This rank's rows, ``(R, H)``; the parameter itself, whose ``main_grad`` may get
            the gradient directly, see `added_grad_of`.
        labels_SB: Global token ids, ``(S, B)``, int64, see `token_losses`.
        num_columns: Rows that are not padding, V; may be 0.
        columns: C.
        first_column: Global id of row 0.
        softcap: Limit of the logits; ``None`` for no limit.
        group: The tp group.

    Returns:
        ``(S, B)``, float32 (float64 for float64 inputs), the same on every rank; 0 for an ignored
        label. The gradient of ``x_SBH`` is this rank's part of a sum over ranks.

    Sync:
        Two all-reduces over ``group``; none for a group of one.

    Example:
        >>> x, weight, labels = torch.zeros(1, 1, 2), torch.zeros(4, 2), torch.tensor([[2]])
        >>> losses = head_token_losses(x, weight, labels, num_columns=4, columns=3, first_column=0,
        ...                            softcap=None, group=Group.solo())
        >>> f"{losses.item():.4f}"  # ln(4)
        '1.3863'
    """
    result: Tensor = _HeadTokenLosses.apply(  # type: ignore[no-untyped-call]
        x_SBH,
        weight_RH,
        added_grad_of(weight_RH),
        labels_SB,
        num_columns,
        columns,
        first_column,
        softcap,
        group,
    )
    return result


class _HeadTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        main_grad: Tensor | None,
        labels: Tensor,
        num_columns: int,
        columns: int,
        first_column: int,
        softcap: float | None,
        group: Group,
    ) -> Tensor:
        # Not saved by autograd: other backward passes write to it in the meantime.
        ctx.main_grad = main_grad
        blocks = _Blocks(x, weight, labels - first_column, num_columns, columns, softcap)
        maximum = blocks.per_token(-torch.inf)
        total, label_logit = blocks.per_token(0.0), blocks.per_token(0.0)
        for logits, _, column, here, _ in blocks.logits():
            label_logit += logits.gather(-1, column).squeeze_(-1).mul_(here)
            larger = torch.maximum(maximum, logits.amax(-1))
            total *= (maximum - larger).exp_()
            total += logits.sub_(larger[:, None]).exp_().sum(-1)
            maximum = larger
        whole_maximum = maximum.clone()
        all_reduce_(whole_maximum, group, op="max")
        sums = torch.stack((total * (maximum - whole_maximum).exp_(), label_logit))
        all_reduce_(sums, group)
        log_sum = sums[0].log_().add_(whole_maximum)
        counts = labels.flatten() >= 0
        ctx.save_for_backward(x, weight, labels, log_sum)
        ctx.rest = (num_columns, columns, first_column, softcap)
        return (log_sum - sums[1]).mul_(counts).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, log_sum = ctx.saved_tensors
        num_columns, columns, first_column, softcap = ctx.rest
        blocks = _Blocks(x, weight, labels - first_column, num_columns, columns, softcap)
        scale = ((labels >= 0) * grad).flatten()
        # A split backward pass requests one of the two at a time.
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = torch.zeros_like(blocks.x, dtype=log_sum.dtype) if needs_x else None
        main_grad = ctx.main_grad
        grad_weight = torch.empty_like(weight) if needs_weight and main_grad is None else None
        for logits, narrow, column, here, rows in blocks.logits():
            slope = None if softcap is None else 1 - (logits / softcap).square_()
            logits.sub_(log_sum[:, None]).exp_().mul_(scale[:, None])
            logits.scatter_add_(-1, column, (here * -scale)[:, None])
            grad_logits = logits if slope is None else logits.mul_(slope)
            if narrow is not logits:
                grad_logits = narrow.copy_(grad_logits)
            if grad_x is not None:
                grad_x += multiply_input_grad(grad_logits, weight[rows])
            if grad_weight is not None:
                multiply_weight_grad_(grad_weight[rows], grad_logits, blocks.x)
            elif needs_weight:
                add_weight_grad_(main_grad[rows], grad_logits, blocks.x)
        if grad_x is not None:
            grad_x = grad_x.to(x.dtype).view(x.shape)
        if grad_weight is not None:
            grad_weight[num_columns:].zero_()
        return grad_x, grad_weight, *(None,) * 7


class _Blocks:
    """Logits of blocks of columns, one at a time in the same memory.

    Attributes:
        x: ``(N, H)``.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        column: Tensor,
        num_columns: int,
        columns: int,
        softcap: float | None,
    ) -> None:
        self.x = x.reshape(-1, x.shape[-1])
        self._weight, self._column, self._softcap = weight, column.reshape(-1, 1), softcap
        self._num_columns, self._columns = num_columns, max(1, min(columns, num_columns))
        self._wide = x.dtype if x.dtype == torch.float64 else torch.float32

    def per_token(self, value: float) -> Tensor:
        """Return wide numbers ``(N,)``."""
        return self.x.new_full(self.x.shape[:1], value, dtype=self._wide)

    def logits(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, slice]]:
        """Yield the blocks; each overwrites the one before.

        Logits ``(N, C)`` in the wide dtype; memory of the same shape in the dtype of ``x``, which
        may be the same; label columns ``(N, 1)``, clamped; ``(N,)`` whether the label is in the
        block; its rows of the weight.
        """
        tokens = self.x.shape[0]
        memory = self.x.new_empty(tokens * self._columns)
        wide = memory
        if memory.dtype != self._wide:
            wide = torch.empty_like(memory, dtype=self._wide)
        for first in range(0, self._num_columns, self._columns):
            rows = slice(first, min(first + self._columns, self._num_columns))
            count = rows.stop - first
            product = memory[: tokens * count].view(tokens, count)
            multiply_(product, self.x, self._weight[rows])
            logits = product
            if wide is not memory:
                logits = wide[: tokens * count].view(tokens, count).copy_(product)
            if self._softcap is not None:
                logits.div_(self._softcap).tanh_().mul_(self._softcap)
            column = self._column - first
            here = ((column >= 0) & (column < count)).squeeze(-1)
            yield logits, product, column.clamp_(0, count - 1), here, rows
