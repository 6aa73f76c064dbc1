"""Attention by tiles of queries and keys, merged by the log-sum-exp of their scores.

A tile is unmasked, causal, or has a small mask that many tiles share, so that no matrix of queries
and keys is stored: memory is linear in the sequence. The backward pass computes the weights of each
tile again from the merged log-sum-exp, which makes it exact.

Source:
    Merging tiles, and a backward pass from the log-sum-exp: Dao et al., "FlashAttention", 2022,
    arXiv:2205.14135, section 3.1 and appendix B.

Shapes: S queries, T keys, B batch, N query heads, G heads of keys and values, D head dimension,
E dimension of value heads, R query heads per head of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megacore.ops.activations import softcap
from megacore.ops.attention import Attended, flash_on_cpu, flash_on_cpu_backward
from megacore.ops.dense import wide_dtype

# Scores that `_Blocks` has at once: 64 MiB in float32.
_BLOCK_SCORES = 1 << 24
# Elements of a mask of `Bands`, if a window is not too wide for 64 rows of it: 16 MiB in float32.
_MASK_ELEMENTS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class ScoreRule:
    """Rule from products of queries and keys to attention weights.

    Attributes:
        window: Keys that a query attends to, with that of its own token; ``None`` for all before.
        softcap: Limit of scores, see `softcap`; ``None`` for none.
        scale: Factor on the products. Default: ``D ** -0.5``.
    """

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None


@dataclass(frozen=True)
class Tile:
    """Queries that attend to a range of keys.

    Attributes:
        queries: First query, and the one after the last.
        keys: First key, and the one after the last.
        causal: Query ``i`` of the tile attends to its keys up to ``i``; as many keys as queries.
        mask: Added to the scores, ``(queries, keys)``; each query has a finite element.

    Raises:
        ValueError: If the tile has no query or no key, for which torch's kernel ends the process.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool = False
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        for name, (first, last) in (("queries", self.queries), ("keys", self.keys)):
            if last <= first:
                raise ValueError(f"a tile of attention must have {name}, got [{first}, {last})")

    def shifted(self, queries: int, keys: int) -> Tile:
        """Return the tile with other indices of its first query and key."""
        (first, last), (start, end) = self.queries, self.keys
        return replace(
            self, queries=(first + queries, last + queries), keys=(start + keys, end + keys)
        )


class Bands:
    """Cached masks of windows, each for a block of queries."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def of(self, window: int, like: Tensor) -> Tensor:
        """Return 0 inside a window and ``-inf`` outside, for the queries of the last keys.

        A smaller mask is its lower right corner.
        """
        key = window, like.dtype, like.device
        if key not in self._made:
            rows = min(max(window, 64), 512, max(64, _MASK_ELEMENTS // window))
            with torch.inference_mode(False):  # training may use the mask later
                outside = ~visible(rows, rows + window - 1, window, device=like.device)
                zeros = torch.zeros(outside.shape, dtype=like.dtype, device=like.device)
                self._made[key] = zeros.masked_fill_(outside, -torch.inf)
        return self._made[key]


def visible(
    num_queries: int, num_keys: int, window: int, *, device: torch.device | None = None
) -> Tensor:
    """Return the keys of each query, ``(queries, keys)``, bool; the last of both are one token.

    Example:
        >>> visible(2, 3, 2).tolist()
        [[True, True, False], [False, True, True]]
    """
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    distance = query - torch.arange(num_keys, device=device)
    return (distance >= 0) & (distance < window)


def causal_tiles(num_queries: int, num_keys: int, band: Tensor | None = None) -> list[Tile]:
    """Return the tiles of causal attention where the last query has the position of the last key.

    Args:
        num_queries: Number of queries.
        num_keys: Number of keys, at least that of queries.
        band: The mask of `Bands` for attention with a window.

    Example:
        >>> [(tile.keys, tile.causal) for tile in causal_tiles(2, 5)]
        [((0, 3), False), ((3, 5), True)]
    """
    before = num_keys - num_queries
    if num_queries == 1 and band is None:
        return [Tile((0, 1), (0, num_keys))]
    if band is None:
        own = Tile((0, num_queries), (before, num_keys), causal=True)
        return [Tile((0, num_queries), (0, before)), own] if before else [own]
    rows, width = band.shape
    tiles = []
    for first in range(0, num_queries, rows):
        last = min(first + rows, num_queries)
        start, end = max(0, before + first - (width - rows)), before + last
        mask = band[rows - (last - first) :, width - (end - start) :]
        tiles.append(Tile((first, last), (start, end), mask=mask))
    return tiles


def attend_tiles(
    q_SBND: Tensor,
    k_TBGD: Tensor,
    v_TBGE: Tensor,
    tiles: Sequence[Tile],
    *,
    rule: ScoreRule,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of queries to the keys of all their tiles.

    Args:
        q_SBND: Queries.
        k_TBGD: Keys.
        v_TBGE: Values.
        tiles: Each query is in at least one; those of the same queries follow each other.
        rule: Scale and soft cap of scores; the window is in the masks of the tiles.
        sinks: For each head a score that takes part in the softmax and has no value, ``(N,)``.

    Returns:
        ``(S, B, N, E)``.
    """
    arguments = q_SBND, k_TBGD, v_TBGE, sinks, tiles, rule
    mixed: Tensor = _Attention.apply(*arguments)  # type: ignore[no-untyped-call]
    return mixed


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SBND: Tensor,
        k_TBGD: Tensor,
        v_TBGE: Tensor,
        sinks: Tensor | None,
        tiles: Sequence[Tile],
        rule: ScoreRule,
    ) -> Tensor:
        kernel = kernel_for(q_SBND, v_TBGE, rule)
        length, batch, heads, _ = q_SBND.shape
        mixed_SBNE = q_SBND.new_empty(length, batch, heads, v_TBGE.shape[-1])
        lse_SBN = q_SBND.new_empty(length, batch, heads, dtype=wide_dtype(q_SBND))
        for (first, last), same in groupby(tiles, key=lambda tile: tile.queries):
            merged = None
            for tile in same:
                tensors = tile_views(tile, q_SBND, k_TBGD, v_TBGE)
                merged = merge(merged, Mixed(*kernel.forward(*tensors, tile)))
            assert merged is not None
            if sinks is not None:
                merged = merged.with_sinks(sinks)
            mixed_SBNE[first:last] = merged.values.permute(2, 0, 1, 3)
            lse_SBN[first:last] = merged.lse.permute(2, 0, 1)
        ctx.save_for_backward(q_SBND, k_TBGD, v_TBGE, sinks, mixed_SBNE, lse_SBN)
        ctx.tiles, ctx.kernel = tiles, kernel
        return mixed_SBNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SBNE: Tensor) -> tuple[Tensor | None, ...]:
        q_SBND, k_TBGD, v_TBGE, sinks, mixed_SBNE, lse_SBN = ctx.saved_tensors
        grad_SBNE = grad_SBNE.contiguous()
        dq, dk, dv = (_Sum(x) for x in (q_SBND, k_TBGD, v_TBGE))
        for tile in ctx.tiles:
            rows = slice(*tile.queries)
            grad, mixed = (x[rows].permute(1, 2, 0, 3) for x in (grad_SBNE, mixed_SBNE))
            lse = lse_SBN[rows].permute(1, 2, 0)
            done = Attended(*tile_views(tile, q_SBND, k_TBGD, v_TBGE), mixed, lse)
            grads = ctx.kernel.backward(grad, done, tile)
            for total, added, where in zip(
                (dq, dk, dv), grads, (tile.queries, tile.keys, tile.keys), strict=True
            ):
                total.add(added.permute(2, 0, 1, 3), *where)
        d_sinks = None
        if sinks is not None:
            share_SBN = (sinks - lse_SBN).exp()
            delta_SBN = (grad_SBNE * mixed_SBNE).sum(-1, dtype=lse_SBN.dtype)
            d_sinks = -(share_SBN * delta_SBN).sum((0, 1)).to(sinks.dtype)
        return dq.whole(), dk.whole(), dv.whole(), d_sinks, None, None


class _Sum:
    """Gradient of a tensor, to which slices along dimension 0 are added."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, grad: Tensor, first: int, last: int) -> None:
        if self._total is None and grad.shape == self._like.shape:
            self._total = grad
        else:
            self.whole()[first:last] += grad

    def whole(self) -> Tensor:
        if self._total is None:
            self._total = self._like.new_zeros(self._like.shape)
        return self._total


class Mixed(NamedTuple):
    """Weighted means of values, ``(B, N, S, E)``, and the log-sum-exp of scores, ``(B, N, S)``."""

    values: Tensor
    lse: Tensor

    def with_sinks(self, sinks: Tensor) -> Mixed:
        """Add a score per head whose value is 0."""
        lse = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
        factor = (self.lse - lse).exp_()[..., None]
        return Mixed((self.values * factor).to(self.values.dtype), lse)


def merge(one: Mixed | None, other: Mixed) -> Mixed:
    """Combine attention of the same queries to two ranges of keys."""
    if one is None:
        return other
    weight = torch.sigmoid(other.lse - one.lse)[..., None]
    values = torch.lerp(one.values.to(weight.dtype), other.values.to(weight.dtype), weight)
    return Mixed(values.to(one.values.dtype), torch.logaddexp(one.lse, other.lse))


def tile_views(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tile's queries, keys and values, ``(B, heads, tokens, dimension)``."""
    rows, keys = slice(*tile.queries), slice(*tile.keys)
    return q[rows].permute(1, 2, 0, 3), k[keys].permute(1, 2, 0, 3), v[keys].permute(1, 2, 0, 3)


# ---- kernels -------------------------------------------------------------------------------------


class _Kernel(Protocol):
    """Attention of one tile, and the gradients of its queries, keys and values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, done: Attended, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def kernel_for(q: Tensor, v: Tensor, rule: ScoreRule) -> _Kernel:
    """Return the kernels for tiles of the attention of these queries and values."""
    scale = q.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    if not q.is_cuda and rule.softcap is None:
        return _CpuFlash(scale, max(q.shape[-1], v.shape[-1]))
    return _Blocks(scale, rule.softcap)


class _CpuFlash:
    """torch's fused kernel for CPUs; narrower heads are padded, as it has one width for all."""

    def __init__(self, scale: float, width: int) -> None:
        self._scale, self._width = scale, width

    def _wide(self, x: Tensor) -> Tensor:
        missing = self._width - x.shape[-1]
        return pad(x, (0, missing)) if missing else x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        wide_q, wide_k, wide_v = map(self._wide, (q, k, v))
        mixed, lse = flash_on_cpu(
            wide_q, wide_k, wide_v, mask=tile.mask, is_causal=tile.causal, scale=self._scale
        )
        return mixed[..., : v.shape[-1]], lse

    def backward(self, grad: Tensor, done: Attended, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, lse = done
        wide = Attended._make([*map(self._wide, tensors), lse])
        options: Any = {"mask": tile.mask, "is_causal": tile.causal, "scale": self._scale}
        grads = flash_on_cpu_backward(self._wide(grad), wide, **options)
        dq, dk, dv = (g[..., : x.shape[-1]] for g, x in zip(grads, tensors[:3], strict=True))
        return dq, dk, dv


class _Blocks:
    """Matrix products of some queries at a time with all keys, on any device."""

    def __init__(self, scale: float, limit: float | None) -> None:
        self._scale, self._limit = scale, limit

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        mixed = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
        for rows, keys in _blocks(q, k, tile):
            scores, _ = self._scores(q, k[:, :, keys], rows, tile)
            lse[:, :, rows] = scores.logsumexp(-1)
            weights = (scores - lse[:, :, rows, None]).exp_()
            mixed[:, :, rows] = _products(weights.to(v.dtype), v[:, :, keys])
        return mixed, lse

    def backward(self, grad: Tensor, done: Attended, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, mixed, lse = done
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        delta = (grad * mixed).sum(-1, dtype=lse.dtype, keepdim=True)
        for rows, keys in _blocks(q, k, tile):
            scores, slope = self._scores(q, k[:, :, keys], rows, tile)
            weights = scores.sub_(lse[:, :, rows, None]).exp_()
            grad_rows, queries = grad[:, :, rows], q[:, :, rows]
            dv[:, :, keys] += _sums(weights.to(v.dtype), grad_rows, v.shape[1])
            of_scores = _products(grad_rows, v[:, :, keys].transpose(-1, -2)).to(lse.dtype)
            of_scores = of_scores.sub_(delta[:, :, rows]).mul_(weights).mul_(self._scale)
            if slope is not None:
                of_scores = of_scores.mul_(slope)
            of_scores = of_scores.to(q.dtype)
            dq[:, :, rows] = _products(of_scores, k[:, :, keys])
            dk[:, :, keys] += _sums(of_scores, queries, k.shape[1])
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _scores(
        self, q: Tensor, k: Tensor, rows: slice, tile: Tile
    ) -> tuple[Tensor, Tensor | None]:
        """Return masked scores of some queries, and the derivative of the soft cap."""
        scores = _products(q[:, :, rows], k.transpose(-1, -2)).mul_(self._scale)
        slope = None
        if self._limit is not None:
            scores = softcap(scores, self._limit)
            slope = 1 - (scores / self._limit).square_().to(wide_dtype(scores))
        scores = scores.to(wide_dtype(scores))
        if tile.mask is not None:
            scores = scores + tile.mask[rows, : scores.shape[-1]]
        if tile.causal:
            shape = rows.stop - rows.start, scores.shape[-1]
            later = ~visible(*shape, scores.shape[-1], device=q.device)
            scores = scores.masked_fill_(later, -torch.inf)
        return scores, slope


def _blocks(q: Tensor, k: Tensor, tile: Tile) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block, and the keys that these may attend to."""
    batch, heads, num_queries, _ = q.shape
    num_keys = k.shape[2]
    size = max(1, _BLOCK_SCORES // (batch * heads * num_keys))
    for first in range(0, num_queries, size):
        last = min(first + size, num_queries)
        yield slice(first, last), slice(0, last if tile.causal else num_keys)


def _products(x_BNSX: Tensor, y_BGXY: Tensor) -> Tensor:
    """Multiply the matrices of each head, without copies of those that several heads share."""
    batch, heads, rows, _ = x_BNSX.shape
    x_BGRX = x_BNSX.reshape(batch, y_BGXY.shape[1], -1, x_BNSX.shape[-1])
    return (x_BGRX @ y_BGXY).view(batch, heads, rows, -1)


def _sums(weights_BNST: Tensor, x_BNSX: Tensor, groups: int) -> Tensor:
    """Sum queries by their weights over all heads that share a key: ``(B, G, T, X)``."""
    weights, x = (
        each.reshape(each.shape[0], groups, -1, each.shape[-1]) for each in (weights_BNST, x_BNSX)
    )
    return weights.transpose(-1, -2) @ x
