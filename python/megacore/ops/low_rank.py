"""Low-rank terms that are added to the results of linear layers.

A layer has the terms of one or more of its parts, which are groups of its output features: all
terms take the same input, so their first factors are one product, and so are their second ones,
with a matrix of zeros apart from the blocks of the parts. For the backward pass, the input is kept
in its own number format, and the factors are not copied.

Shapes: M rows, N output features, K input features, R the sum of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True)
class LowRankParts:
    """Output features of each low-rank term of a layer.

    The features are ``num_groups`` equal groups, and the features of a part are
    ``[starts[i], starts[i] + widths[i])`` of each group.

    Attributes:
        starts: First feature of each part in a group.
        widths: Features of each part in a group.
        group_width: Features of a group.
        num_groups: Number of groups.

    Example:
        >>> parts = LowRankParts(starts=(0, 3), widths=(2, 1), group_width=4, num_groups=2)
        >>> parts.joined([torch.ones(4, 1), torch.full((2, 1), 2.0)]).tolist()
        ... # doctest: +NORMALIZE_WHITESPACE
        [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 2.0],
         [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 2.0]]
    """

    starts: tuple[int, ...]
    widths: tuple[int, ...]
    group_width: int
    num_groups: int = 1

    @property
    def is_whole(self) -> bool:
        """True if there is one part with all features."""
        return self.widths == (self.group_width,)

    def joined(self, b: Sequence[Tensor]) -> Tensor:
        """Join the second factors, ``(num_groups * width, rank)`` each, to ``(N, R)``."""
        if self.is_whole:
            return b[0]
        ranks = [each.shape[1] for each in b]
        whole = b[0].new_zeros(self.num_groups, self.group_width, sum(ranks))
        for part, each in zip(self._views(whole, ranks), b, strict=True):
            part.copy_(each.view(part.shape))
        return whole.flatten(0, 1)

    def split(self, whole: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Take the blocks of the parts out of ``(N, R)``: the inverse of `joined`."""
        if self.is_whole:
            return [whole]
        views = self._views(whole.view(self.num_groups, self.group_width, -1), ranks)
        return [part.flatten(0, 1) for part in views]

    def rows(self, whole: Tensor) -> list[Tensor]:
        """Take the rows of the parts out of one number per output feature, ``(N,)``."""
        groups = whole.view(self.num_groups, self.group_width)
        return [
            groups[:, start : start + width].flatten()
            for start, width in zip(self.starts, self.widths, strict=True)
        ]

    def joined_rows(self, values: Sequence[Tensor], *, fill: float) -> Tensor:
        """Join one number per output feature of each part to ``(N,)``; others are ``fill``."""
        pieces, end, places = [], 0, [*zip(self.starts, self.widths, strict=True)]
        for (start, width), value in zip(places, values, strict=True):
            pieces += [value.new_full((self.num_groups, start - end), fill)]
            pieces += [value.view(self.num_groups, width)]
            end = start + width
        pieces += [values[0].new_full((self.num_groups, self.group_width - end), fill)]
        return torch.cat(pieces, dim=1).flatten()

    def join_experts(self, b: Sequence[Tensor]) -> Tensor:
        """Join the second factors of experts, ``(E, width, rank)`` each, to ``(E, N, R)``."""
        if self.is_whole:
            return b[0]
        ranks = [each.shape[2] for each in b]
        whole = b[0].new_zeros(len(b[0]), self.group_width, sum(ranks))
        for part, each in zip(self._views(whole, ranks), b, strict=True):
            part.copy_(each)
        return whole

    def split_experts(self, whole: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Take the blocks of the parts out of ``(E, N, R)``: the inverse of `join_experts`."""
        return [whole] if self.is_whole else self._views(whole, ranks)

    def _views(self, whole: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        blocks, first = [], 0
        for start, width, rank in zip(self.starts, self.widths, ranks, strict=True):
            blocks.append(whole[:, start : start + width, first : first + rank])
            first += rank
        return blocks


def low_rank_sum(weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Compute ``weight + scale * b @ a`` in the dtype of the factors.

    Args:
        weight: ``(N, K)``, of any float dtype.
        a: First factor, ``(R, K)``.
        b: Second factor, ``(N, R)``.
        scale: Factor on the product.

    Returns:
        A new tensor ``(N, K)``, dtype of the factors; it is all the memory that is needed.

    Example:
        >>> a, b = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0]])
        >>> low_rank_sum(torch.tensor([[1.0, 0.5]]), a, b, scale=0.5).tolist()
        [[2.0, 1.5]]
    """
    return torch.mm(b, a).mul_(scale).add_(weight)


def add_low_rank(
    y: Tensor,
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    *,
    parts: LowRankParts,
    scale: float,
) -> Tensor:
    """Add ``scale * b @ a @ x`` to the features of each part of ``y``.

    The terms and the sum are computed in the dtype of the factors and rounded once.

    Args:
        y: Result of the layer, ``(..., N)``.
        x: Its input, ``(..., K)``, dtype of ``y``.
        a: First factor of each part, ``(rank, K)``.
        b: Second factor of each part, ``(num_groups * width, rank)``.
        parts: The parts.
        scale: Factor on all terms.

    Returns:
        ``(..., N)``, dtype of ``y``.

    Sync:
        None.

    There is no second derivative.

    Source:
        LoRA, arXiv:2106.09685.

    Example:
        >>> parts = LowRankParts(starts=(0,), widths=(1,), group_width=1)
        >>> x, a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0]])
        >>> add_low_rank(torch.tensor([[1.0]]), x, [a], [b], parts=parts, scale=0.5).item()
        4.0
    """
    result: Tensor = _AddLowRank.apply(y, x, parts, scale, *a, *b)  # type: ignore[no-untyped-call]
    return result


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, parts: LowRankParts, scale: float, *factors: Tensor
    ) -> Tensor:
        a, b = _halves(factors)
        wide = a[0].dtype
        rows = x.reshape(-1, x.shape[-1])
        inner_MR = rows.to(wide) @ _joined_a(a).t()
        ctx.save_for_backward(rows, inner_MR, *factors)
        ctx.parts, ctx.scale = parts, scale
        sums, factor = y.reshape(-1, y.shape[-1]), parts.joined(b).t()
        if y.dtype == wide:
            return torch.addmm(sums, inner_MR, factor, alpha=scale).view(y.shape)
        # A copy in the wide format, which takes the sum.
        return sums.to(wide).addmm_(inner_MR, factor, alpha=scale).to(y.dtype).view(y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner_MR, *factors = ctx.saved_tensors
        a, b = _halves(factors)
        scale, num_parts = ctx.scale, len(a)
        needs_a, needs_b = ctx.needs_input_grad[4], ctx.needs_input_grad[4 + num_parts]
        grad_MN = grad.reshape(-1, grad.shape[-1]).to(a[0].dtype)
        grad_x = None
        grads_a: Sequence[Tensor | None] = [None] * num_parts
        grads_b: Sequence[Tensor | None] = [None] * num_parts
        if needs_a or ctx.needs_input_grad[1]:
            grad_MR = (grad_MN @ ctx.parts.joined(b)).mul_(scale)
        if ctx.needs_input_grad[1]:
            grad_x = (grad_MR @ _joined_a(a)).to(rows.dtype).view(*grad.shape[:-1], -1)
        if needs_a:
            whole = grad_MR.t() @ rows.to(grad_MR.dtype)
            grads_a = torch.split_with_sizes(whole, [len(each) for each in a])
        if needs_b:
            whole = (grad_MN.t() @ inner_MR).mul_(scale)
            grads_b = ctx.parts.split(whole, [each.shape[1] for each in b])
        return grad if ctx.needs_input_grad[0] else None, grad_x, None, None, *grads_a, *grads_b


def _halves(factors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    half = len(factors) // 2
    return factors[:half], factors[half:]


def _joined_a(a: Sequence[Tensor]) -> Tensor:
    return a[0] if len(a) == 1 else torch.cat(list(a))
