"""Rules of router settings, for files and Python arguments."""

from __future__ import annotations


def check_router(
    *,
    num_experts: int,
    top_k: int,
    num_groups: int,
    groups_top_k: int,
) -> None:
    """Check that the settings agree with each other.

    Raises:
        ValueError: With the value, the rule, and the legal values.

    Example:
        >>> check_router(num_experts=8, top_k=3, num_groups=4, groups_top_k=1)
        Traceback (most recent call last):
        ...
        ValueError: top_k = 3, but 1 groups of 2 experts offer 2; groups_top_k must be at least 2
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k = {top_k}: with num_experts = {num_experts} it must lie in [1, {num_experts}]"
        )
    if num_groups < 1 or num_experts % num_groups != 0:
        legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ValueError(
            f"num_groups = {num_groups} does not divide num_experts = {num_experts}; use one of "
            f"{legal}"
        )
    if not 1 <= groups_top_k <= num_groups:
        raise ValueError(
            f"groups_top_k = {groups_top_k}: with num_groups = {num_groups} it must lie in "
            f"[1, {num_groups}]"
        )
    group_size = num_experts // num_groups
    if top_k > groups_top_k * group_size:
        raise ValueError(
            f"top_k = {top_k}, but {groups_top_k} groups of {group_size} experts offer "
            f"{groups_top_k * group_size}; groups_top_k must be at least {-(-top_k // group_size)}"
        )
