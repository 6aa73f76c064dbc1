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

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megacore.models.functional import softcap, wide_dtype
from megacore.models.mappings import all_gather_sequence
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

    def of(self, num_queries: int, num_keys: int, *, window: int | None, like: Tensor) -> Tensor:
        """Return the mask of a size, true where a query attends to a key, on a tensor's device."""
        size = num_queries, num_keys, window
        if size not in self._made:
            if window is None:
                # Imports torch's compiler, which takes longer than torch: not without cp.
                from torch.nn.attention.bias import causal_lower_right

                self._made[size] = causal_lower_right(num_queries, num_keys)
            else:
                self._made[size] = visible(num_queries, num_keys, window, device=like.device)
        return self._made[size]


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

    Returns:
        ``(S/cp, B, N, D)``.

    Sync:
        One all-gather of keys and values over ``group``, and one reduce-scatter of their gradients
        in the backward pass; none for a group of one.
    """
    if group.size > 1:
        both = gather_in_order(torch.stack((k_SBGD, v_SBGD), dim=1), group)
        k_SBGD, v_SBGD = both.unbind(1)
    return attend(q_SBND, k_SBGD, v_SBGD, group=group, grouped=grouped, masks=masks, rule=rule)


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

    Returns:
        ``(S/cp, B, N, E)``.
    """
    if group.size == 1:
        return _attend(q_SBND, k_SBGD, v_SBGE, grouped=grouped, masks=masks, rule=rule)
    length = q_SBND.shape[0] // 2
    mixed = []
    for queries, index in zip(
        q_SBND.chunk(2), context_slices(group.size, group.position), strict=True
    ):
        end = (index + 1) * length
        start = 0 if rule.window is None else max(0, end - length - rule.window + 1)
        keys, values = k_SBGD[start:end], v_SBGE[start:end]
        mixed.append(_attend(queries, keys, values, grouped=grouped, masks=masks, rule=rule))
    return torch.cat(mixed)


def _attend(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    *,
    grouped: bool,
    masks: Masks,
    rule: ScoreRule,
) -> Tensor:
    """Compute causal attention where the last query has the position of the last key."""
    num_queries, num_keys = q_SBND.shape[0], k_SBGD.shape[0]
    q_BNSD, k_BGSD, v_BGSD = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD))
    window = None if rule.window is None or rule.window >= num_keys else rule.window
    if rule.softcap is not None:
        seen = masks.of(num_queries, num_keys, window=window or num_keys, like=q_SBND)
        return _attend_with_scores(q_BNSD, k_BGSD, v_BGSD, seen, rule).permute(2, 0, 1, 3)
    is_square = num_queries == num_keys and window is None
    mixed_BNSD = scaled_dot_product_attention(
        q_BNSD,
        k_BGSD,
        v_BGSD,
        attn_mask=None
        if is_square
        else masks.of(num_queries, num_keys, window=window, like=q_SBND),
        is_causal=is_square,
        scale=rule.scale,
        enable_gqa=grouped,
    )
    # The kernel preserves the memory order of its input, so this is a view, not a copy.
    return mixed_BNSD.permute(2, 0, 1, 3)


def _attend_with_scores(
    q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, visible: Tensor, rule: ScoreRule
) -> Tensor:
    """Compute attention from a matrix of scores, which no fused kernel can change."""
    repeats = q_BNSD.shape[1] // k_BGSD.shape[1]
    k_BNSD, v_BNSD = (x.repeat_interleave(repeats, dim=1) for x in (k_BGSD, v_BGSD))
    scale = q_BNSD.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    scores_BNST = softcap((q_BNSD @ k_BNSD.transpose(-1, -2)).mul(scale), rule.softcap)
    scores_BNST = scores_BNST.masked_fill(~visible, -torch.inf)
    weights_BNST = scores_BNST.softmax(-1, dtype=wide_dtype(scores_BNST)).to(v_BNSD.dtype)
    return weights_BNST @ v_BNSD


def _in_order(gathered: Tensor, cp_size: int) -> Tensor:
    """Reorder gathered slices from rank order into sequence order."""
    slices = gathered.chunk(2 * cp_size)
    held = [index for position in range(cp_size) for index in context_slices(cp_size, position)]
    return torch.cat([slices[held.index(index)] for index in range(2 * cp_size)])
