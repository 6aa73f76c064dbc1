"""Low-rank adapters of the experts of one rank.

Every expert has its own factors. With clones, an expert's rows may be on ranks that have it in a
spare slot, so its factors are sent there, all of them as one row.

Shapes: L local experts, S spare slots, M rows of all local experts and clones, R the sum of ranks,
N output features, K input features, n numbers of all factors of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megacore.ops.grouped_product import grouped_product
from megacore.ops.low_rank import LowRankParts
from megacore.parallel.params import use_params

# First and second factor of each part of a projection.
Factors = tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class ExpertPart:
    """Adapter of one part of a projection of the experts.

    Attributes:
        a: First factor, ``(L, rank, K)``.
        b: Second factor, ``(L, width, rank)``.
    """

    a: nn.Parameter
    b: nn.Parameter


class ExpertAdapters(nn.Module):
    """Adapters of the projections of a rank's experts.

    Args:
        parts: Adapters by projection, ``FC1`` or ``FC2``.
        places: Output features of the adapters of each projection.
        scale: Factor on all of them.
    """

    def __init__(
        self,
        parts: Mapping[int, Sequence[ExpertPart]],
        *,
        places: Mapping[int, LowRankParts],
        scale: float,
    ) -> None:
        super().__init__()
        self.places, self.scale = dict(places), scale
        self._names: dict[int, list[str]] = {}
        for projection, adapters in parts.items():
            self._names[projection] = names = []
            for number, each in enumerate(adapters):
                names.append(f"fc{projection + 1}_{number}")
                self.register_parameter(f"{names[-1]}_a", each.a)
                self.register_parameter(f"{names[-1]}_b", each.b)

    def bind(self, extend: Callable[[Tensor], Tensor] | None = None) -> BoundAdapters:
        """Return the adapters for one pass of the layer.

        Args:
            extend: Appends the rows of clones: ``(L, n)`` to ``(L + S, n)``. Default: no clones.
        """
        use_params(self)
        factors = {
            projection: (self._factors(names, "a"), self._factors(names, "b"))
            for projection, names in self._names.items()
        }
        if extend is not None:
            every = [each for pair in factors.values() for half in pair for each in half]
            rows = extend(torch.cat([each.flatten(1) for each in every], dim=1))
            sizes = [each[0].numel() for each in every]
            split = iter(torch.split_with_sizes(rows, sizes, dim=1))
            factors = {
                projection: (_reshaped(split, a), _reshaped(split, b))
                for projection, (a, b) in factors.items()
            }
        return BoundAdapters(factors=factors, places=self.places, scale=self.scale)

    def _factors(self, names: Sequence[str], factor: str) -> list[Tensor]:
        return [getattr(self, f"{name}_{factor}") for name in names]


def _reshaped(rows: Any, like: Sequence[Tensor]) -> list[Tensor]:
    """Take the next rows, in the shapes of these factors."""
    return [next(rows).unflatten(1, each.shape[1:]) for each in like]


@dataclass(frozen=True, kw_only=True)
class BoundAdapters:
    """Adapters of a rank's experts, and of clones behind them, for one pass.

    Attributes:
        factors: Factors by projection, ``(L + S, rank, K)`` and ``(L + S, width, rank)``.
        places: As in `ExpertAdapters`.
        scale: As in `ExpertAdapters`.
    """

    factors: Mapping[int, Factors]
    places: Mapping[int, LowRankParts]
    scale: float

    def add(
        self,
        projection: int,
        y: Tensor,
        x: Tensor,
        m_splits: Tensor,
        *,
        clear_padding: bool,
        expected_rows: int,
    ) -> Tensor:
        """Add the adapters of ``x``, ``(M, K)``, to the result of a projection, ``(M, N)``.

        The products are computed in the dtype of ``x``. For the hints see
        :func:`megacore.ops.gemm.grouped_gemm`.
        """
        if projection not in self.factors:
            return y
        a, b = self.factors[projection]
        options = self.places[projection], self.scale, (clear_padding, expected_rows)
        result: Tensor = _AddLowRank.apply(y, x, m_splits, *options, *a, *b)  # type: ignore[no-untyped-call]
        return result


class _AddLowRank(torch.autograd.Function):
    """`megacore.ops.low_rank.add_low_rank` for groups of rows, each with its own factors."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        m_splits: Tensor,
        parts: LowRankParts,
        scale: float,
        hints: tuple[bool, int],
        *factors: Tensor,
    ) -> Tensor:
        a, b = _joined(factors, parts, x.dtype)
        options: dict[str, Any] = {"clear_padding": hints[0], "expected_rows": hints[1]}
        inner_MR = grouped_product("forward", x, a, m_splits, **options)
        added_MN = grouped_product("forward", inner_MR, b, m_splits, **options)
        ctx.save_for_backward(x, inner_MR, m_splits, *factors)
        ctx.parts, ctx.scale, ctx.options = parts, scale, options
        return torch.add(y, added_MN, alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner_MR, m_splits, *factors = ctx.saved_tensors
        a, b = _joined(factors, ctx.parts, x.dtype)
        scaled_MN = (grad * ctx.scale).contiguous()
        needs_a = ctx.needs_input_grad[6]
        needs_b = ctx.needs_input_grad[6 + len(factors) // 2]
        grad_x, half = None, len(factors) // 2
        grads: list[Tensor | None] = [None] * len(factors)
        grad_MR = grouped_product("input_grad", scaled_MN, b, m_splits, **ctx.options)
        if ctx.needs_input_grad[1]:
            grad_x = grouped_product("input_grad", grad_MR, a, m_splits, **ctx.options)
        if needs_a:
            whole = _weight_grad(grad_MR, x, m_splits, a)
            ranks = [each.shape[1] for each in factors[:half]]
            grads[:half] = torch.split_with_sizes(whole, ranks, dim=1)
        if needs_b:
            whole = _weight_grad(scaled_MN, inner_MR, m_splits, b)
            grads[half:] = ctx.parts.split_experts(
                whole, [each.shape[2] for each in factors[half:]]
            )
        grad_y = grad if ctx.needs_input_grad[0] else None
        return grad_y, grad_x, *(None,) * 4, *grads


def _joined(
    factors: Sequence[Tensor], parts: LowRankParts, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Join the factors to ``(L, R, K)`` and ``(L, N, R)``, contiguous, of this dtype."""
    a, b = factors[: len(factors) // 2], factors[len(factors) // 2 :]
    first = a[0] if len(a) == 1 else torch.cat(list(a), dim=1)
    second = parts.join_experts(b)
    return first.to(dtype).contiguous(), second.to(dtype).contiguous()


def _weight_grad(grad: Tensor, rows: Tensor, m_splits: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of weights in float32 at least."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    out = torch.empty_like(like, dtype=dtype)
    grouped_product("weight_grad", grad, rows, m_splits, out=out)
    return out
