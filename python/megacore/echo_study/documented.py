"""Steps of the documented ECHO planner, one function each, for inspection and tests.

``plan_offload(..., method="echo")`` runs these steps natively in sequence: :func:`floor_average`,
:func:`spare_capacity`, :func:`spillover`, :func:`assign_spillover`, :func:`top_pieces`, and per
cloned expert :func:`breadth_first_shares` and :func:`depth_first_shares`. Sorts are stable and the
lowest index wins a tie; integers only.

Source:
    Megatron-LM pull request 2368 ("ECHO"), arXiv:2603.07685 section 4.3.7.
"""

from __future__ import annotations

from collections.abc import Sequence

from megacore import _core

Piece = tuple[int, int, int]
"""Chunk (or expert), bucket (or rank), tokens of the chunk that lie in the bucket."""


def floor_average(rank_loads: Sequence[int]) -> int:
    """Compute the average load of a rank, rounded down.

    Raises:
        ValueError: If there are no ranks.

    Example:
        >>> floor_average([500, 200, 300, 400])
        350
    """
    return _core.floor_average(_sizes(rank_loads))


def spare_capacity(rank_loads: Sequence[int], average: int) -> list[int]:
    """Compute the spare capacity of each rank: average minus load, at least 0.

    Example:
        >>> spare_capacity([500, 200, 300, 400], 350)
        [0, 150, 50, 0]
    """
    return _core.spare_capacity(_sizes(rank_loads), average)


def spillover(expert_loads: Sequence[int], *, num_ranks: int, average: int) -> list[int]:
    """Compute the tokens to offload per expert, so that no rank keeps more than the average.

    In every rank the prefix sum over experts in ascending order of load is cut at the average: the
    hottest experts spill first, and at most one expert of a rank is split. Of equal loads the later
    expert spills first.

    Raises:
        ValueError: If the experts do not divide over the ranks.

    Example:
        >>> spillover([50, 100, 150, 200], num_ranks=1, average=250)
        [0, 0, 50, 200]
    """
    return _core.spillover(_sizes(expert_loads), num_ranks=num_ranks, average=average)


def interval_overlap(chunks: Sequence[int], buckets: Sequence[int]) -> list[Piece]:
    """Compute the non-empty overlaps of consecutive chunks and consecutive buckets, both from 0.

    Example:
        >>> interval_overlap([100, 150], [80, 120])
        [(0, 0, 80), (0, 1, 20), (1, 1, 100)]
    """
    return _core.interval_overlap(_sizes(chunks), _sizes(buckets))


def assign_spillover(spillover: Sequence[int], spare_capacity: Sequence[int]) -> list[Piece]:
    """Assign spilled tokens to ranks by overlaps of spillover and capacity, sorted descending.

    A piece is (expert, rank, tokens).

    Example:
        >>> assign_spillover([0, 80, 0, 0, 50, 100, 0, 30], [0, 120, 60, 0])
        [(5, 1, 100), (1, 1, 20), (1, 2, 60)]
    """
    return _core.assign_spillover(_sizes(spillover), _sizes(spare_capacity))


def top_pieces(pieces: Sequence[Piece], *, num_spare_slots: int) -> list[tuple[int, int, int, int]]:
    """Select each rank's largest pieces, one per slot, as (expert, rank, slot, tokens).

    The result is sorted by rank and slot. The largest piece is in slot 0; ties are broken by the
    lowest expert.

    Example:
        >>> top_pieces([(5, 1, 100), (1, 1, 20), (1, 2, 60)], num_spare_slots=1)
        [(5, 1, 0, 100), (1, 2, 0, 60)]
    """
    return _core.top_pieces(pieces, num_spare_slots=num_spare_slots)


def breadth_first_shares(tokens: Sequence[int], amounts: Sequence[int]) -> list[list[int]]:
    """Compute each source's proportional share of each amount, rounded down; a row per source.

    Args:
        tokens: Tokens of one expert from each source rank; the sum is below 2^31.
        amounts: Tokens of the expert's clones; each at most the sum of ``tokens``.

    Example:
        >>> breadth_first_shares([30, 50, 20], [83])
        [[24], [41], [16]]
    """
    if max(amounts, default=0) > sum(tokens):
        raise ValueError(f"a clone of {max(amounts)} tokens; the expert has {sum(tokens)}")
    return _rows(_core.breadth_first_shares(_sizes(tokens), _sizes(amounts)), len(amounts))


def depth_first_shares(tokens_left: Sequence[int], missing: Sequence[int]) -> list[list[int]]:
    """Fill the remainder of the first pass from the sources in rank order; one row per source.

    Example:
        >>> depth_first_shares([6, 9, 4], [2])
        [[2], [0], [0]]
    """
    return _rows(_core.depth_first_shares(_sizes(tokens_left), _sizes(missing)), len(missing))


def _sizes(values: Sequence[int]) -> Sequence[int]:
    if min(values, default=0) < 0 or sum(values) >= 2**47:
        raise ValueError(f"numbers of tokens are at least 0 and below 2^47 in all: {list(values)}")
    return values


def _rows(flat: list[int], length: int) -> list[list[int]]:
    return [flat[start : start + length] for start in range(0, len(flat), length)] if length else []
