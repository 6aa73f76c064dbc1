"""Causal attention over a sequence that is split by context parallelism.

Attention is the only part of the model that reads other ranks' tokens (see
``megacore.parallel.sequence``). Keys and values are all-gathered, which grouped queries keep small;
the backward pass reduce-scatters their gradients.

Source:
    Gathering keys and values before attention: Grattafiori et al., "The Llama 3 Herd of Models",
    arXiv:2407.21783, section 3.3.2.

Shapes: S sequence, B batch, N query heads, G heads of keys and values, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megacore.models.mappings import all_gather_sequence
from megacore.parallel.process_groups import Group
from megacore.parallel.sequence import context_slices


class LowerRightMasks:
    """Cached lower-right causal masks, for queries that are the last of more keys.

    torch's masks of this kind are a tensor subclass, which cannot be created while the operations
    of a captured function are logged.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Tensor] = {}

    def of(self, num_queries: int, num_keys: int) -> Tensor:
        """Return the mask of a size."""
        # Imports torch's compiler, which takes longer than torch: not for models without cp.
        from torch.nn.attention.bias import causal_lower_right

        size = num_queries, num_keys
        if size not in self._made:
            self._made[size] = causal_lower_right(num_queries, num_keys)
        return self._made[size]


def causal_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    *,
    group: Group,
    grouped: bool,
    masks: LowerRightMasks,
) -> Tensor:
    """Compute attention of this rank's queries to the keys up to each query.

    Args:
        q_SBND: Queries of this rank's tokens, ``(S/cp, B, N, D)``.
        k_SBGD: Keys, ``(S/cp, B, G, D)``.
        v_SBGD: Values, ``(S/cp, B, G, D)``.
        group: The cp group.
        grouped: Whether several query heads share a key head.
        masks: Cache of masks.

    Returns:
        ``(S/cp, B, N, D)``.

    Sync:
        One all-gather of keys and values over ``group``, and one reduce-scatter of their gradients
        in the backward pass; none for a group of one.
    """
    if group.size == 1:
        return _attend(q_SBND, k_SBGD, v_SBGD, grouped=grouped, masks=masks)
    keys_values = all_gather_sequence(torch.stack((k_SBGD, v_SBGD), dim=1), group)
    k_all, v_all = _in_order(keys_values, group.size).unbind(1)
    length = q_SBND.shape[0] // 2
    mixed = []
    for queries, index in zip(
        q_SBND.chunk(2), context_slices(group.size, group.position), strict=True
    ):
        end = (index + 1) * length
        mixed.append(_attend(queries, k_all[:end], v_all[:end], grouped=grouped, masks=masks))
    return torch.cat(mixed)


def _attend(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, *, grouped: bool, masks: LowerRightMasks
) -> Tensor:
    """Compute causal attention where the last query has the position of the last key."""
    num_queries, num_keys = q_SBND.shape[0], k_SBGD.shape[0]
    is_square = num_queries == num_keys
    mixed_BNSD = scaled_dot_product_attention(
        q_SBND.permute(1, 2, 0, 3),
        k_SBGD.permute(1, 2, 0, 3),
        v_SBGD.permute(1, 2, 0, 3),
        attn_mask=None if is_square else masks.of(num_queries, num_keys),
        is_causal=is_square,
        enable_gqa=grouped,
    )
    # The kernel preserves the memory order of its input, so this is a view, not a copy.
    return mixed_BNSD.permute(2, 0, 1, 3)


def _in_order(gathered: Tensor, cp_size: int) -> Tensor:
    """Reorder gathered slices from rank order into sequence order."""
    slices = gathered.chunk(2 * cp_size)
    held = [index for position in range(cp_size) for index in context_slices(cp_size, position)]
    return torch.cat([slices[held.index(index)] for index in range(2 * cp_size)])
