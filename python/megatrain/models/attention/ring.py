"""Attention over a sequence split by context parallelism, by a ring of keys and values.

Each rank computes its queries with one rank's keys and values at a time, while those of the next
rank are received, and merges the results by the log-sum-exp of their scores. In the backward
pass the gradients of keys and values are sent on with their blocks, and at the end to the rank that
owns the block. A rank holds two blocks instead of all keys and values of the sequence.

Source:
    Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889. The order of slices
    that balances causal work (see ``megacore.parallel.sequence``) is that of Brandon et al.,
    "Striped Attention", arXiv:2311.09431, in slices instead of stripes.

Shapes: S tokens of a rank, B batch, N query heads, G heads of keys and values, D and E dimensions
of keys and values.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.ops.attention import Attended
from megacore.ops.dense import wide_dtype
from megacore.parallel.async_collectives import PendingCollective
from megacore.parallel.batch import Documents
from megacore.parallel.process_groups import Group
from megacore.parallel.row_exchange import RowSplits, all_to_all_async
from megacore.parallel.sequence import context_slices
from megatrain.models.attention.blockwise import (
    Bands,
    Mixed,
    ScoreRule,
    Tile,
    causal_tiles,
    kernel_for,
    merge,
    tile_views,
)


def ring_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    *,
    group: Group,
    bands: Bands,
    rule: ScoreRule,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Compute attention of this rank's queries to the keys up to each query.

    Args:
        q_SBND: Queries of this rank's tokens.
        k_SBGD: Keys of this rank's tokens.
        v_SBGE: Values of this rank's tokens.
        group: The cp group, of at least two.
        bands: Cache of masks.
        rule: Window and scores.
        sinks: For each head a score that takes part in the softmax and has no value, ``(N,)``.
        documents: Documents; attention does not cross their boundaries.

    Returns:
        ``(S, B, N, E)``.

    Sync:
        ``cp - 1`` exchanges with the neighbours in the ring, and ``2 * cp - 1`` in the backward
        pass.
    """
    length, batch = q_SBND.shape[:2]
    starts: Sequence[Sequence[int]] = ((0,),)  # the same for all samples
    if documents is not None:
        # Samples one after the other, as each has other documents.
        starts = documents.starts
        q_SBND, k_SBGD, v_SBGE = (
            x.transpose(0, 1).flatten(0, 1)[:, None] for x in (q_SBND, k_SBGD, v_SBGE)
        )
    band = None
    if rule.window is not None and rule.window < length * group.size:
        band = bands.of(rule.window, q_SBND)
    tiles = [
        ring_tiles(
            group.position,
            (group.position - step) % group.size,
            group.size,
            length // 2,
            starts=starts,
            window=None if band is None else rule.window,
            band=band,
        )
        for step in range(group.size)
    ]
    arguments = q_SBND, k_SBGD, v_SBGE, sinks, group, tiles, rule
    mixed: Tensor = _Ring.apply(*arguments)  # type: ignore[no-untyped-call]
    if documents is not None:
        mixed = mixed[:, 0].view(batch, length, *mixed.shape[2:]).transpose(0, 1)
    return mixed


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGE: Tensor,
        sinks: Tensor | None,
        group: Group,
        tiles: Sequence[Sequence[Tile]],
        rule: ScoreRule,
    ) -> Tensor:
        kernel = kernel_for(q_SBND, v_SBGE, rule)
        length, batch, heads, _ = q_SBND.shape
        wide = wide_dtype(q_SBND)
        values = q_SBND.new_zeros(batch, heads, length, v_SBGE.shape[-1], dtype=wide)
        lse = torch.full_like(values[..., 0], -torch.inf)
        for keys, by_member in _around(k_SBGD, v_SBGE, group, tiles):
            for tile in by_member:
                new = Mixed(*kernel.forward(*tile_views(tile, q_SBND, *keys), tile))
                rows = slice(*tile.queries)
                both = merge(Mixed(values[:, :, rows], lse[:, :, rows]), new)
                values[:, :, rows], lse[:, :, rows] = both
        whole = Mixed(values, lse)
        if sinks is not None:
            whole = whole.with_sinks(sinks)
        mixed_SBNE = whole.values.permute(2, 0, 1, 3).to(q_SBND.dtype).contiguous()
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGE, sinks, mixed_SBNE, whole.lse)
        ctx.group, ctx.tiles, ctx.kernel = group, tiles, kernel
        return mixed_SBNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SBNE: Tensor) -> tuple[Tensor | None, ...]:
        sinks, mixed_SBNE, lse_BNS = ctx.saved_tensors[3:]
        grad_BNSE, mixed_BNSE = (x.permute(1, 2, 0, 3) for x in (grad_SBNE, mixed_SBNE))
        dq = dk = dv = d_sinks = None
        # A split backward pass requests the gradient of the sinks on its own, without the ring.
        if any(ctx.needs_input_grad[:3]):
            dq, dk, dv = _grads_around(ctx, grad_BNSE, mixed_BNSE)
        if sinks is not None and ctx.needs_input_grad[3]:
            share_BNS = (sinks[:, None] - lse_BNS).exp()
            delta_BNS = (grad_BNSE * mixed_BNSE).sum(-1, dtype=lse_BNS.dtype)
            d_sinks = -(share_BNS * delta_BNS).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, d_sinks, None, None, None


def _grads_around(ctx: Any, grad_BNSE: Tensor, mixed_BNSE: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, by one more round of the ring."""
    q_SBND, k_SBGD, v_SBGE, _, _, lse_BNS = ctx.saved_tensors
    group, wide, width = ctx.group, lse_BNS.dtype, k_SBGD.shape[-1]
    dq_SBND = torch.zeros_like(q_SBND, dtype=wide)
    arriving, arrival = None, PendingCollective()
    for keys, by_member in _around(k_SBGD, v_SBGE, group, ctx.tiles):
        d_block = k_SBGD.new_zeros(*k_SBGD.shape[:3], width + v_SBGE.shape[-1], dtype=wide)
        for tile in by_member:
            rows, columns = slice(*tile.queries), slice(*tile.keys)
            mixed, lse = mixed_BNSE[:, :, rows], lse_BNS[:, :, rows]
            done = Attended(*tile_views(tile, q_SBND, *keys), mixed, lse)
            dq, dk, dv = ctx.kernel.backward(grad_BNSE[:, :, rows], done, tile)
            dq_SBND[rows] += dq.permute(2, 0, 1, 3)
            d_block[columns, :, :, :width] += dk.permute(2, 0, 1, 3)
            d_block[columns, :, :, width:] += dv.permute(2, 0, 1, 3)
        # The member before has added its share; the next one holds this block in the next step.
        arrival.wait()
        if arriving is not None:
            d_block += arriving
        arriving, arrival = _start_shift(d_block, group)
    arrival.wait()
    assert arriving is not None
    dk, dv = (x.to(k_SBGD.dtype) for x in arriving.tensor_split((width,), dim=-1))
    return dq_SBND.to(q_SBND.dtype), dk, dv


def _around(
    k_SBGD: Tensor, v_SBGE: Tensor, group: Group, tiles: Sequence[Sequence[Tile]]
) -> Iterator[tuple[tuple[Tensor, Tensor], Sequence[Tile]]]:
    """Yield the keys and values of each member, this one first, and its tiles.

    The next block is received while the caller computes.
    """
    block = torch.cat((k_SBGD, v_SBGE), dim=-1)
    for step, by_member in enumerate(tiles):
        following, arrival = block, PendingCollective()
        if step + 1 < group.size:
            following, arrival = _start_shift(block, group)
        keys, values = block.tensor_split((k_SBGD.shape[-1],), dim=-1)
        yield (keys, values), by_member
        arrival.wait()
        block = following


def _start_shift(rows: Tensor, group: Group) -> tuple[Tensor, PendingCollective]:
    """Start to send rows to the next member, and to receive as many from the one before."""
    sent, received = ([0] * group.size for _ in range(2))
    sent[(group.position + 1) % group.size] = rows.shape[0]
    received[(group.position - 1) % group.size] = rows.shape[0]
    return all_to_all_async(rows, group, RowSplits(sent=tuple(sent), received=tuple(received)))


def ring_tiles(
    position: int,
    member: int,
    size: int,
    length: int,
    *,
    starts: Sequence[Sequence[int]] = ((0,),),
    window: int | None = None,
    band: Tensor | None = None,
) -> list[Tile]:
    """Return the tiles of one member's queries and another one's keys.

    Args:
        position: The member with the queries.
        member: The member with the keys.
        size: Members of the group.
        length: Tokens of a slice; each member has two.
        starts: First token of each document, for each sample; tokens of samples follow each other.
        window: Keys that a query attends to; ``None`` for all before.
        band: The mask of `Bands` for the window.

    Example:
        >>> [[(p.queries, p.keys, p.causal) for p in ring_tiles(1, m, 3, 4)] for m in (0, 2)]
        [[((0, 8), (0, 4), False)], [((4, 8), (0, 8), False)]]
    """
    tiles: list[Tile] = []
    for sample, documents in enumerate(starts):
        for row, late in enumerate(context_slices(size, position)):
            for column, early in enumerate(context_slices(size, member)):
                shift = (2 * sample + row) * length, (2 * sample + column) * length
                if early == late:
                    own = _own_slice(late * length, length, documents, window, band)
                    tiles += [tile.shifted(*shift) for tile in own]
                elif early < late:
                    begins = late * length, early * length
                    earlier = _earlier_slice(*begins, length, documents, window, band)
                    tiles += [tile.shifted(*shift) for tile in earlier]
    return _joined(tiles)


def _own_slice(
    begin: int, length: int, starts: Sequence[int], window: int | None, band: Tensor | None
) -> list[Tile]:
    """Return the tiles of a slice and its own keys, from the slice's first token."""
    inner = starts[bisect_right(starts, begin) : bisect_left(starts, begin + length)]
    tiles = []
    for first, last in pairwise((begin, *inner, begin + length)):
        is_narrow = window is not None and window < last - first
        of_document = causal_tiles(last - first, last - first, band if is_narrow else None)
        tiles += [tile.shifted(first - begin, first - begin) for tile in of_document]
    return tiles


def _earlier_slice(
    begin: int,
    key_begin: int,
    length: int,
    starts: Sequence[int],
    window: int | None,
    band: Tensor | None,
) -> list[Tile]:
    """Return the tiles of a slice and an earlier slice of keys, from the first token of each."""
    document = bisect_right(starts, begin)
    first_key, end = max(starts[document - 1], key_begin), key_begin + length
    last = min([begin + length, *starts[document : document + 1]])
    if first_key >= end:
        return []
    if window is None or band is None or last - first_key <= window:
        return [Tile((0, last - begin), (first_key - key_begin, length))]
    last = min(last, end + window - 1)  # queries that see the last key
    rows, width = band.shape
    tiles = []
    for first in range(begin, last, rows):
        stop = min(first + rows, last)
        start = max(first_key, first - window + 1)
        columns = slice(width - (stop - start), width - (stop - end))
        mask = band[rows - (stop - first) :, columns]
        tiles.append(Tile((first - begin, stop - begin), (start - key_begin, length), mask=mask))
    return tiles


def _joined(tiles: Sequence[Tile]) -> list[Tile]:
    """Join unmasked tiles that follow each other, which takes fewer calls of the kernel."""
    joined: list[Tile] = []
    for tile in tiles:
        last = joined[-1] if joined else tile
        is_plain = not any(each.causal or each.mask is not None for each in (last, tile))
        if is_plain and last.queries == tile.queries and last.keys[1] == tile.keys[0]:
            joined[-1] = Tile(tile.queries, (last.keys[0], tile.keys[1]))
        elif is_plain and last.keys == tile.keys and last.queries[1] == tile.queries[0]:
            joined[-1] = Tile((last.queries[0], tile.queries[1]), tile.keys)
        else:
            joined.append(tile)
    return joined
