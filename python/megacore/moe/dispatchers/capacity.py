"""A limit on the tokens of each expert, and who has to go.

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
    """Each rank sends an expert at most its fair share of copies times a factor.

    Attributes:
        factor: Multiple of ``copies / experts``.
        drop_by: Who stays: the copies with the highest weights (of equal ones the first), or the
            first ones.
        pad: Always send exactly that many rows to each expert, so that all sizes are known without
            a look at the device; missing rows are zero.
    """

    factor: float
    drop_by: Literal["probs", "position"] = "probs"
    pad: bool = False

    def rows(self, num_copies: int, num_experts: int) -> int:
        """Rows per expert, at least 1 and never more than all copies.

        Example:
            >>> Capacity(factor=1.25).rows(num_copies=64, num_experts=8)
            10
            >>> Capacity(factor=1e300).rows(num_copies=64, num_experts=8)
            64
        """
        return max(1, min(num_copies, rows_at(self.factor, num_copies, num_experts)))

    def limit(self, expert_ids_Tk: Tensor, probs_Tk: Tensor, *, num_experts: int) -> Tensor:
        """Drop the copies that exceed each expert's capacity.

        The weights of a token's other copies stay as they are.

        Args:
            expert_ids_Tk: Expert of each copy.
            probs_Tk: Weight of each copy.
            num_experts: Number of experts.

        Returns:
            Expert ids, -1 for dropped copies.

        Example:
            >>> ids, probs = torch.tensor([[0], [0], [1]]), torch.tensor([[0.25], [0.5], [1.0]])
            >>> Capacity(factor=0.6).limit(ids, probs, num_experts=2).flatten().tolist()
            [-1, 0, 1]
        """
        rows = self.rows(expert_ids_Tk.numel(), num_experts)
        place = place_in_expert(expert_ids_Tk, probs_Tk if self.drop_by == "probs" else None)
        return expert_ids_Tk.masked_fill(place >= rows, -1)


def place_in_expert(expert_ids_Tk: Tensor, probs_Tk: Tensor | None) -> Tensor:
    """Which place each copy takes among those of its expert, ``(T, k)``, from 0.

    Args:
        expert_ids_Tk: Expert of each copy.
        probs_Tk: Copies with higher weights come first; ``None``: the order of the copies.
    """
    flat = expert_ids_Tk.flatten()
    if probs_Tk is None:
        order = flat.argsort(stable=True)
    else:
        by_weight = probs_Tk.detach().flatten().argsort(descending=True, stable=True)
        order = by_weight[flat[by_weight].argsort(stable=True)]
    sorted_ids = flat[order]
    first = torch.searchsorted(sorted_ids, sorted_ids)
    places = torch.arange(flat.shape[0], device=flat.device) - first
    return torch.empty_like(flat).scatter_(0, order, places).view_as(expert_ids_Tk)


def rows_at(factor: float, num_copies: int, num_parts: int) -> int:
    """``ceil(factor * num_copies / num_parts)`` of the factor as it is written, in decimals.

    Example:
        >>> import math
        >>> rows_at(1.1, 100, 10), math.ceil(1.1 * 100 / 10)
        (11, 12)
    """
    return math.ceil(Fraction(str(factor)) * num_copies / num_parts)
