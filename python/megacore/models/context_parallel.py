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
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megacore.models.functional import softcap, wide_dtype
from megacore.models.mappings import all_gather_sequence
from megacore.parallel.batch import Documents
from megacore.parallel.process_groups import Group
from megacore.parallel.sequence import context_slices


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


class Masks:
    """Cached causal masks, for queries that are the last of more keys or that have a window.

    torch's masks without a window are a tensor subclass, which cannot be created while the
    operations of a captured function are logged.
    """

    def __init__(self) -> None:
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

        With ``whole``, an upper limit of sizes that are many, masks are parts of one.
        """
        if whole is not None and window is not None:
            mask = self.of(whole, whole, window=window, like=like)
            return mask[num_keys - num_queries : num_keys, :num_keys]
        if whole is not None:
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(num_queries, num_keys)
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
        # Imports torch's compiler, which takes longer than torch: not without cp.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(num_queries, num_keys)


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
        documents: Documents inside of which attention stays.

    Returns:
        ``(S/cp, B, N, D)``.

    Sync:
        One all-gather of keys and values over ``group``, and one reduce-scatter of their gradients
        in the backward pass; none for a group of one.
    """
    if group.size > 1:
        both = gather_in_order(torch.stack((k_SBGD, v_SBGD), dim=1), group)
        k_SBGD, v_SBGD = both.unbind(1)
    return attend(
        q_SBND,
        k_SBGD,
        v_SBGD,
        group=group,
        grouped=grouped,
        masks=masks,
        rule=rule,
        sinks=sinks,
        documents=documents,
    )


def gather_in_order(x: Tensor, group: Group) -> Tensor:
    """Gather the tokens of all cp ranks: ``(S/cp, ...)`` to ``(S, ...)`` in the sequence's order.

    Each rank uses the result for its own queries, so the backward pass sums over ranks.

    Sync:
        One all-gather over ``group``, and one reduce-scatter in the backward pass; none for a group
        of one.
    """
    return x if group.size == 1 else _in_order(all_gather_sequence(x, group), group.size)


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
        k_SBGD: Keys of all tokens, ``(S, B, G, D)``.
        v_SBGE: Values of all tokens, ``(S, B, G, E)``.
        group: The cp group.
        grouped: Whether several query heads share a key head.
        masks: Cache of masks.
        rule: Window and scores.
        sinks: As in `causal_attention`.
        documents: Documents inside of which attention stays.

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

    def one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return _attend(queries, keys, values, grouped=grouped, masks=masks, rule=rule, sinks=sinks)

    if group.size == 1:
        return one(q_SBND, k_SBGD, v_SBGE)
    length = q_SBND.shape[0] // 2
    mixed = []
    for queries, index in zip(
        q_SBND.chunk(2), context_slices(group.size, group.position), strict=True
    ):
        end = (index + 1) * length
        start = 0 if rule.window is None else max(0, end - length - rule.window + 1)
        mixed.append(one(queries, k_SBGD[start:end], v_SBGE[start:end]))
    return torch.cat(mixed)


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
    q_BNSD, k_BGSD, v_BGSD = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD))
    window = None if rule.window is None or rule.window >= num_keys else rule.window
    if rule.softcap is not None or sinks is not None:
        seen = None
        if num_queries > 1:
            size = window or whole or num_keys
            seen = masks.of(num_queries, num_keys, window=size, like=q_SBND, whole=whole)
        mixed_BNSD = _attend_with_scores(q_BNSD, k_BGSD, v_BGSD, seen, rule, sinks)
        return mixed_BNSD.permute(2, 0, 1, 3)
    # A single query attends to all keys of its window.
    is_square = num_queries == num_keys and window is None
    needs_mask = num_queries > 1 and not is_square
    mixed_BNSD = scaled_dot_product_attention(
        q_BNSD,
        k_BGSD,
        v_BGSD,
        attn_mask=masks.of(num_queries, num_keys, window=window, like=q_SBND, whole=whole)
        if needs_mask
        else None,
        is_causal=is_square,
        scale=rule.scale,
        enable_gqa=grouped,
    )
    # The kernel preserves the memory order of its input, so this is a view, not a copy.
    return mixed_BNSD.permute(2, 0, 1, 3)


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
        parts = [documents.pieces(n, begin, end, window=rule.window) for n in range(batch)]
        if all(first == 0 for first, _, _ in parts) and end == sequence:
            keys_TGD, values_TGE = k_BSGD.flatten(0, 1), v_BSGE.flatten(0, 1)
        else:
            seen = [slice(first, end) for first, _, _ in parts]
            keys_TGD, values_TGE = (
                torch.cat([row[part] for row, part in zip(x.unbind(), seen, strict=True)])
                for x in (k_BSGD, v_BSGE)
            )
        mixed_TNE = _attend_pieces(
            queries_SBND.transpose(0, 1).flatten(0, 1),
            keys_TGD,
            values_TGE,
            [count for _, counts, _ in parts for count in counts],
            [count for _, _, counts in parts for count in counts],
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
    """Compute causal attention of consecutive pieces of queries and keys, ``(T, N, E)``."""
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


def _attend_with_scores(
    q_BNSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    visible: Tensor | None,
    rule: ScoreRule,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention from a matrix of scores, which no fused kernel can change."""
    repeats = q_BNSD.shape[1] // k_BGSD.shape[1]
    k_BNSD, v_BNSD = (x.repeat_interleave(repeats, dim=1) for x in (k_BGSD, v_BGSD))
    scale = q_BNSD.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    scores_BNST = softcap((q_BNSD @ k_BNSD.transpose(-1, -2)).mul(scale), rule.softcap)
    if visible is not None:
        scores_BNST = scores_BNST.masked_fill(~visible, -torch.inf)
    scores_BNST = scores_BNST.to(wide_dtype(scores_BNST))
    if sinks is None:
        weights_BNST = scores_BNST.softmax(-1)
    else:
        sinks_BNS1 = sinks.to(scores_BNST.dtype)[:, None, None].expand(*scores_BNST.shape[:3], 1)
        weights_BNST = torch.cat((scores_BNST, sinks_BNS1), -1).softmax(-1)[..., :-1]
    weights_BNST = weights_BNST.to(v_BNSD.dtype)
    return weights_BNST @ v_BNSD


def _in_order(gathered: Tensor, cp_size: int) -> Tensor:
    """Reorder gathered slices from rank order into sequence order."""
    slices = gathered.chunk(2 * cp_size)
    held = [index for position in range(cp_size) for index in context_slices(cp_size, position)]
    return torch.cat([slices[held.index(index)] for index in range(2 * cp_size)])
