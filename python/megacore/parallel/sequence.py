"""Tokens of a sequence on each context-parallel rank.

Attention is causal, so a token near the end of a sequence has more work than one near its start.
The sequence is therefore cut into ``2 * cp`` slices, and the rank at position ``r`` holds slice
``r`` and slice ``2 * cp - 1 - r``, so each rank has the same number of query-key pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def context_slices(cp_size: int, position: int) -> tuple[int, int]:
    """Return the two of the ``2 * cp_size`` slices of a sequence that a rank holds.

    Example:
        >>> [context_slices(2, position) for position in range(2)]
        [(0, 3), (1, 2)]
    """
    return position, 2 * cp_size - 1 - position


def context_positions(
    seq_length: int, *, cp_size: int, position: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the positions in the whole sequence of this rank's tokens, in their order.

    Args:
        seq_length: Tokens of the whole sequence.
        cp_size: Ranks that share the sequence.
        position: Position of this rank among them.
        device: Device of the result.

    Returns:
        ``(seq_length / cp,)``, int64.

    Raises:
        ValueError: If the sequence has no ``2 * cp`` equal slices.

    Example:
        >>> context_positions(8, cp_size=2, position=0).tolist()
        [0, 1, 6, 7]
    """
    if cp_size == 1:
        return torch.arange(seq_length, device=device)
    if seq_length % (2 * cp_size):
        raise ValueError(
            f"context parallelism over {cp_size} ranks cuts a sequence into {2 * cp_size} "
            f"equal slices, but it has {seq_length} tokens"
        )
    length = seq_length // (2 * cp_size)
    starts = [length * index for index in context_slices(cp_size, position)]
    return torch.cat([torch.arange(start, start + length, device=device) for start in starts])
