"""Expert capacity and the choice of dropped tokens.

Shapes: T tokens, k experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Capacity limit: a rank sends each expert at most its fair share of copies times a factor.

    Attributes:
        factor: Multiple of ``copies / experts``.
        drop_by: Copies that are kept: ``"probs"`` for the highest weights (the first of equal
            weights), ``"position"`` for the first copies.
        pad: Always send exactly the capacity's rows to each expert, so that all sizes are known
            without host sync; missing rows are zero.
    """

    factor: float
    drop_by: Literal["probs", "position"] = "probs"
    pad: bool = False

    def rows(self, num_copies: int, num_experts: int) -> int:
        """Compute the rows per expert, at least 1 and at most the number of copies.

        Example:
            >>> Capacity(factor=1.25).rows(num_copies=64, num_experts=8)
            10
            >>> Capacity(factor=1e300).rows(num_copies=64, num_experts=8)
            64
        """
        return max(1, min(num_copies, rows_at(self.factor, num_copies, num_experts)))

    def limit(
        self,
        expert_ids_Tk: Tensor,
        probs_Tk: Tensor,
        *,
        num_experts: int,
        num_copies: Tensor | None = None,
    ) -> Tensor:
        """Drop the copies that exceed each expert's capacity.

        The weights of a token's other copies are unchanged.

        Args:
            expert_ids_Tk: Expert of each copy; below 0 for padding.
            probs_Tk: Weight of each copy.
            num_experts: Number of experts.
            num_copies: Copies that are not padding, int64 scalar, the total of the fair
                shares. Default: all.

        Returns:
            Expert ids, -1 for dropped copies.

        Example:
            >>> ids, probs = torch.tensor([[0], [0], [1]]), torch.tensor([[0.25], [0.5], [1.0]])
            >>> Capacity(factor=0.6).limit(ids, probs, num_experts=2).flatten().tolist()
            [-1, 0, 1]
        """
        rows: int | Tensor = self.rows(expert_ids_Tk.numel(), num_experts)
        if num_copies is not None:
            factor = min(Fraction(str(self.factor)), Fraction(num_experts))
            shares = factor.denominator * num_experts
            rows = (num_copies * factor.numerator + shares - 1).div(shares, rounding_mode="floor")
            rows = rows.clamp(min=1)
        index = index_in_expert(expert_ids_Tk, probs_Tk if self.drop_by == "probs" else None)
        return expert_ids_Tk.masked_fill(index >= rows, -1)


def index_in_expert(expert_ids_Tk: Tensor, probs_Tk: Tensor | None) -> Tensor:
    """Compute the index of each copy among the copies of its expert, ``(T, k)``, from 0.

    Args:
        expert_ids_Tk: Expert of each copy.
        probs_Tk: Weights to sort by, descending; ``None`` for the order of the copies.
    """
    flat = expert_ids_Tk.flatten()
    if probs_Tk is None:
        order = flat.argsort(stable=True)
    else:
        by_weight = probs_Tk.detach().flatten().argsort(descending=True, stable=True)
        order = by_weight[flat[by_weight].argsort(stable=True)]
    sorted_ids = flat[order]
    first = torch.searchsorted(sorted_ids, sorted_ids)
    indices = torch.arange(flat.shape[0], device=flat.device) - first
    return torch.empty_like(flat).scatter_(0, order, indices).view_as(expert_ids_Tk)


def rows_at(factor: float, num_copies: int, num_shares: int) -> int:
    """Compute ``ceil(factor * num_copies / num_shares)`` with the factor's exact decimal value.

    Example:
        >>> import math
        >>> rows_at(1.1, 100, 10), math.ceil(1.1 * 100 / 10)
        (11, 12)
    """
    return math.ceil(Fraction(str(factor)) * num_copies / num_shares)
