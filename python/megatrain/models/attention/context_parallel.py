"""Causal attention over a sequence that is split by context parallelism.

Attention is the only part of the model that reads other ranks' tokens (see
``megacore.parallel.sequence``). Keys and values are all-gathered, which grouped queries keep small;
the backward pass reduce-scatters their gradients.

Source:
    Gathering keys and values before attention: Grattafiori et al., "The Llama 3 Herd of Models",
    arXiv:2407.21783, section 3.3.2.

Shapes: S sequence, B batch, N query heads, G heads of keys and values, D head dimension,
E dimension of value heads if it differs, T keys of a query's sequence.
"""

from __future__ import annotations

import functools
import inspect
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megacore.ops.attention import attention, takes_any_width
from megacore.parallel.batch import Documents
from megacore.parallel.process_groups import Group
from megacore.parallel.sequence import context_slices
from megatrain.models.attention.blockwise import (
    Bands,
    ScoreRule,
    Tile,
    attend_tiles,
    causal_tiles,
    visible,
)
from megatrain.models.attention.exchange import exchange_back, exchange_heads, gather
from megatrain.models.attention.ring import ring_attention


class Masks:
    """Cached causal masks, for queries that are the last of more keys or that have a window.

    Attributes:
        bands: Masks of blocks, for attention by tiles.

    torch's masks without a window are a tensor subclass, which cannot be created while the
    operations of a captured function are logged.
    """

    def __init__(self) -> None:
        self.bands = Bands()
        self._made: dict[tuple[int, int, int | None], Tensor] = {}

    def of(
        self,
        num_queries: int,
        num_keys: int,
        *,
        window: int | None,
        like: Tensor,
        whole: int | None = None,
    ) -> Tensor:
        """Return the mask of a size, true where a query attends to a key, on a tensor's device.

        With ``whole``, an upper limit of sizes that are many, masks are slices of one.
        """
        if whole is not None and window is not None:
            mask = self.of(whole, whole, window=window, like=like)
            return mask[num_keys - num_queries : num_keys, :num_keys]
        if whole is not None:
            return _lower_right(num_queries, num_keys)
        size = num_queries, num_keys, window
        if size not in self._made:
            with torch.inference_mode(False):  # training may use the mask later
                self._made[size] = self._make(size, like)
        return self._made[size]

    @staticmethod
    def _make(size: tuple[int, int, int | None], like: Tensor) -> Tensor:
        num_queries, num_keys, window = size
        if window is not None:
            return visible(num_queries, num_keys, window, device=like.device)
        return _lower_right(num_queries, num_keys)


def _lower_right(num_queries: int, num_keys: int) -> Tensor:
    """Return the causal mask where the last query attends to the last key."""
    # Imports torch's compiler, which takes longer than torch: not without cp.
    from torch.nn.attention.bias import causal_lower_right

    with _disable_current_modes():  # it is not made from tensors that a mode has seen
        return causal_lower_right(num_queries, num_keys)


def causal_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    *,
    group: Group,
    grouped: bool,
    masks: Masks,
    rule: ScoreRule,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    chunk: int | None = None,
    comm: str = "allgather",
) -> Tensor:
    """Compute attention of this rank's queries to the keys up to each query.

    Args:
        q_SBND: Queries of this rank's tokens, ``(S/cp, B, N, D)``.
        k_SBGD: Keys, ``(S/cp, B, G, D)``.
        v_SBGD: Values, ``(S/cp, B, G, D)``.
        group: The cp group.
        grouped: Whether several query heads share a key head.
        masks: Cache of masks.
        rule: Window and scores.
        sinks: For each head a score that takes part in the softmax and has no value, ``(N,)``.
        documents: Documents; attention does not cross their boundaries.
        chunk: Tokens of pieces of a document, or of the sequence, which attention does not cross;
            ``None`` for no pieces.
        comm: "allgather" of keys and values, "a2a" from some tokens of all heads to all tokens of
            some heads, and back, or "ring" of keys and values.

    Returns:
        ``(S/cp, B, N, D)``.

    Sync:
        One or two all-gathers of keys and values over ``group``, and as many reduce-scatters of
        their gradients in the backward pass; two all-to-alls in both with "a2a"; see
        `ring_attention` for "ring"; none for a group of one.

    Raises:
        ValueError: If the members of the group do not divide the heads of keys, for "a2a".
    """
    is_ring = group.size > 1 and comm == "ring"
    if chunk is not None and (documents is not None or is_ring):
        if documents is None:
            documents = Documents.of([[0]] * q_SBND.shape[1], q_SBND.shape[0] * group.size)
        documents, chunk = documents.cut(chunk), None
    if is_ring:
        return ring_attention(
            q_SBND,
            k_SBGD,
            v_SBGD,
            group=group,
            bands=masks.bands,
            rule=rule,
            sinks=sinks,
            documents=documents,
        )
    by_heads = group.size > 1 and comm == "a2a"
    if by_heads:
        q_SBND, k_SBGD, v_SBGD = exchange_heads((q_SBND, k_SBGD, v_SBGD), group)
        if sinks is not None:
            sinks = sinks.chunk(group.size)[group.position]
    elif group.size > 1:
        in_order = chunk is not None or needs_order(q_SBND, rule, sinks, documents)
        k_SBGD, v_SBGD = gather((k_SBGD, v_SBGD), group, in_order=in_order)
    arguments: Any = {
        "group": Group.solo() if by_heads else group,
        "grouped": grouped,
        "masks": masks,
        "rule": rule,
        "sinks": sinks,
    }
    if chunk is not None:
        mixed_SBND = _attend_chunks(q_SBND, k_SBGD, v_SBGD, chunk, **arguments)
    else:
        mixed_SBND = attend(q_SBND, k_SBGD, v_SBGD, documents=documents, **arguments)
    return exchange_back(mixed_SBND, group) if by_heads else mixed_SBND


def needs_order(
    q_SBND: Tensor, rule: ScoreRule, sinks: Tensor | None, documents: Documents | None
) -> bool:
    """Return whether `attend` takes gathered tokens in the order of the sequence."""
    has_ranges = rule.window is not None or documents is not None
    return has_ranges or not _is_by_tiles(q_SBND, rule, sinks)


def attend(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    *,
    group: Group,
    grouped: bool,
    masks: Masks,
    rule: ScoreRule,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Compute attention to gathered keys and values, without communication.

    Args:
        q_SBND: Queries of this rank's tokens, ``(S/cp, B, N, D)``.
        k_SBGD: Keys of all tokens, ``(S, B, G, D)``, as `gather` returns them.
        v_SBGE: Values of all tokens, ``(S, B, G, E)``.
        group: The cp group.
        grouped: Whether several query heads share a key head.
        masks: Cache of masks.
        rule: Window and scores.
        sinks: As in `causal_attention`.
        documents: Documents; attention does not cross their boundaries.

    Returns:
        ``(S/cp, B, N, E)``.
    """
    if documents is not None:
        return _attend_documents(
            q_SBND,
            k_SBGD,
            v_SBGE,
            documents,
            group=group,
            grouped=grouped,
            masks=masks,
            rule=rule,
            sinks=sinks,
        )

    arguments: Any = {"grouped": grouped, "masks": masks, "rule": rule, "sinks": sinks}
    if group.size == 1:
        return _attend(q_SBND, k_SBGD, v_SBGE, **arguments)
    if _is_by_tiles(q_SBND, rule, sinks):
        tiles = _slice_tiles(q_SBND, group, masks=masks, rule=rule)
        return attend_tiles(q_SBND, k_SBGD, v_SBGE, tiles, rule=rule, sinks=sinks)
    length = q_SBND.shape[0] // 2
    mixed = []
    for queries, index in zip(
        q_SBND.chunk(2), context_slices(group.size, group.position), strict=True
    ):
        start, end = _reach(index, length, rule)
        mixed.append(_attend(queries, k_SBGD[start:end], v_SBGE[start:end], **arguments))
    return torch.cat(mixed)


def _attend_chunks(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, chunk: int, *, group: Group, **arguments: Any
) -> Tensor:
    """Compute `attend` inside of chunks of the sequence, to keys in its order.

    As the number of pieces is fixed, it can be captured, which documents cannot.
    """
    slices = [0] if group.size == 1 else context_slices(group.size, group.position)
    length = q_SBND.shape[0] // len(slices)
    mixed = []
    for queries, index in zip(q_SBND.chunk(len(slices)), slices, strict=True):
        stop = k_SBGD.shape[0] if group.size == 1 else (index + 1) * length
        first = begin = stop - length
        while first < stop:
            start = first // chunk * chunk
            end = min(start + chunk, stop)
            keys, values = k_SBGD[start:end], v_SBGD[start:end]
            mixed.append(_attend(queries[first - begin : end - begin], keys, values, **arguments))
            first = end
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _is_by_tiles(q_SBND: Tensor, rule: ScoreRule, sinks: Tensor | None) -> bool:
    """Return whether attention that is not square and causal is computed by tiles.

    On GPUs, torch's attention has kernels that take such queries and keys at once.
    """
    return not q_SBND.is_cuda or rule.softcap is not None or sinks is not None


def _reach(index: int, length: int, rule: ScoreRule) -> tuple[int, int]:
    """Return the first key of a slice of queries, and the one after the last."""
    end = (index + 1) * length
    return (0 if rule.window is None else max(0, end - length - rule.window + 1)), end


def _slice_tiles(q_SBND: Tensor, group: Group, *, masks: Masks, rule: ScoreRule) -> list[Tile]:
    """Return the tiles of this rank's two slices, for keys as `gather` returns them."""
    length, num_early = q_SBND.shape[0] // 2, q_SBND.shape[0] // 2 * group.size
    early, late = context_slices(group.size, group.position)
    if rule.window is not None:
        is_limit = rule.window < 2 * num_early
        band = masks.bands.of(rule.window, q_SBND) if is_limit else None
        tiles = []
        for number, index in enumerate((early, late)):
            start, end = _reach(index, length, rule)
            of_slice = causal_tiles(length, end - start, band)
            tiles += [tile.shifted(number * length, start) for tile in of_slice]
        return tiles
    # The later slices of all ranks come first, in descending order.
    own = group.position * length
    tiles = [tile.shifted(0, num_early) for tile in causal_tiles(length, (early + 1) * length)]
    return [
        *tiles,
        Tile((length, 2 * length), (own + length, 2 * num_early)),
        Tile((length, 2 * length), (own, own + length), causal=True),
    ]


def _attend(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    *,
    grouped: bool,
    masks: Masks,
    rule: ScoreRule,
    sinks: Tensor | None,
    whole: int | None = None,
) -> Tensor:
    """Compute causal attention where the last query has the position of the last key."""
    num_queries = q_SBND.shape[0]
    if num_queries == 1 and rule.window is not None:
        k_SBGD, v_SBGD = k_SBGD[-rule.window :], v_SBGD[-rule.window :]
    num_keys = k_SBGD.shape[0]
    window = None if rule.window is None or rule.window >= num_keys else rule.window
    # A single query attends to all keys of its window.
    is_square = num_queries == num_keys and window is None
    needs_mask = num_queries > 1 and not is_square
    q_BNSD, k_BGSD, v_BGSD = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD))
    is_fused = not needs_mask and takes_any_width(q_BNSD, k_BGSD, v_BGSD)
    has_scores = rule.softcap is not None or sinks is not None
    if has_scores or (not is_fused and num_queries > 1 and _is_by_tiles(q_SBND, rule, sinks)):
        tiles = _tiles(num_queries, num_keys, window, masks, like=q_SBND)
        return attend_tiles(q_SBND, k_SBGD, v_SBGD, tiles, rule=rule, sinks=sinks)
    if q_SBND.is_meta:
        # For tensors without data torch would choose the formula with all scores.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        empty_BNSD: Tensor = flash(q_BNSD, k_BGSD, v_BGSD, 0.0, is_square, scale=rule.scale)[0]
        return empty_BNSD.permute(2, 0, 1, 3)
    mixed_BNSD = attention(
        q_BNSD,
        k_BGSD,
        v_BGSD,
        mask=masks.of(num_queries, num_keys, window=window, like=q_SBND, whole=whole)
        if needs_mask
        else None,
        is_causal=is_square,
        scale=rule.scale,
        grouped=grouped,
    )
    # The kernel preserves the memory order of its input, so this is a view, not a copy.
    return mixed_BNSD.permute(2, 0, 1, 3)


def _tiles(
    num_queries: int, num_keys: int, window: int | None, masks: Masks, *, like: Tensor
) -> list[Tile]:
    """Return the tiles of causal attention, with a window if it is less than all keys."""
    band = None
    if window is not None and window < num_keys:
        band = masks.bands.of(window, like)
    return causal_tiles(num_queries, num_keys, band)


def _attend_documents(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    documents: Documents,
    *,
    group: Group,
    grouped: bool,
    masks: Masks,
    rule: ScoreRule,
    sinks: Tensor | None,
) -> Tensor:
    """Compute `attend` document by document; masks are as large as for whole sequences at most."""
    sequence, batch = k_SBGD.shape[:2]
    slices = [0] if group.size == 1 else context_slices(group.size, group.position)
    length = q_SBND.shape[0] // len(slices)
    # Samples one after the other; one split has a cheaper gradient than many slices.
    k_BSGD, v_BSGE = k_SBGD.transpose(0, 1), v_SBGE.transpose(0, 1)
    mixed = []
    for queries_SBND, index in zip(q_SBND.chunk(len(slices)), slices, strict=True):
        begin, end = index * length, (index + 1) * length
        pieces = [documents.pieces(n, begin, end, window=rule.window) for n in range(batch)]
        if all(first == 0 for first, _, _ in pieces) and end == sequence:
            keys_TGD, values_TGE = k_BSGD.flatten(0, 1), v_BSGE.flatten(0, 1)
        else:
            seen = [slice(first, end) for first, _, _ in pieces]
            keys_TGD, values_TGE = (
                torch.cat([row[keys] for row, keys in zip(x.unbind(), seen, strict=True)])
                for x in (k_BSGD, v_BSGE)
            )
        mixed_TNE = _attend_pieces(
            queries_SBND.transpose(0, 1).flatten(0, 1),
            keys_TGD,
            values_TGE,
            [count for _, counts, _ in pieces for count in counts],
            [count for _, _, counts in pieces for count in counts],
            grouped=grouped,
            masks=masks,
            rule=rule,
            sinks=sinks,
            whole=sequence,
        )
        mixed.append(mixed_TNE.view(batch, length, *mixed_TNE.shape[1:]).transpose(0, 1))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _attend_pieces(
    q_TND: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    num_queries: list[int],
    num_keys: list[int],
    *,
    grouped: bool,
    masks: Masks,
    rule: ScoreRule,
    sinks: Tensor | None,
    whole: int,
) -> Tensor:
    """Compute causal attention of consecutive pieces of queries and keys, ``(T, N, E)``.

    Raises:
        ValueError: If a piece has no query or no key, which no kernel takes.
    """
    if min(*num_queries, *num_keys) < 1:
        raise ValueError(
            f"pieces of documents must have at least 1 token, got {num_queries} queries and "
            f"{num_keys} keys"
        )
    if sinks is None and _has_kernel(q_TND, v_TGE, rule):
        from torch.nn.attention.varlen import varlen_attn

        query_borders, key_borders = torch.tensor(
            [[0, *accumulate(counts)] for counts in (num_queries, num_keys)], dtype=torch.int32
        ).to(q_TND.device, non_blocking=True)
        mixed: Tensor = varlen_attn(  # type: ignore[assignment]
            q_TND,
            k_TGD,
            v_TGE,
            query_borders,
            key_borders,
            max(num_queries),
            max(num_keys),
            scale=rule.scale,
            window_size=(-1 if rule.window is None else rule.window - 1, 0),
            enable_gqa=grouped,
        )
        return mixed
    if _is_by_tiles(q_TND, rule, sinks):
        tiles, first, start = [], 0, 0
        for queries, keys in zip(num_queries, num_keys, strict=True):
            own = _tiles(queries, keys, rule.window, masks, like=q_TND)
            tiles += [tile.shifted(first, start) for tile in own]
            first, start = first + queries, start + keys
        tensors = q_TND[:, None], k_TGD[:, None], v_TGE[:, None]
        return attend_tiles(*tensors, tiles, rule=rule, sinks=sinks).squeeze(1)
    pieces = zip(
        torch.split_with_sizes(q_TND[:, None], num_queries),
        torch.split_with_sizes(k_TGD[:, None], num_keys),
        torch.split_with_sizes(v_TGE[:, None], num_keys),
        strict=True,
    )
    attended = [
        _attend(*piece, grouped=grouped, masks=masks, rule=rule, sinks=sinks, whole=whole)
        for piece in pieces
    ]
    return torch.cat(attended).squeeze(1)


def _has_kernel(q_TND: Tensor, v_TGE: Tensor, rule: ScoreRule) -> bool:
    """Return whether one kernel computes attention of pieces of different lengths."""
    is_narrow = q_TND.dtype in (torch.float16, torch.bfloat16)
    is_usual = rule.softcap is None and q_TND.shape[-1] == v_TGE.shape[-1] <= 256
    return q_TND.is_cuda and is_narrow and is_usual and _has_varlen()


@functools.cache
def _has_varlen() -> bool:
    """Return whether this torch has variable-length attention with groups of heads (2.12)."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
