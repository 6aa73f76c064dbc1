"""The documented offload planner written down literally, and a checker of plans.

Nothing here shares code with the planner: plain loops over plain integers, dense matrices instead
of walks, so that a reader can compare it with the documents line by line.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from megacore.moe import OffloadPlan

Matrix = list[list[int]]


def overlap_matrix(chunks: list[int], buckets: list[int]) -> Matrix:
    """Overlap of every chunk with every bucket, both laid end to end from 0."""
    return [
        [
            max(
                0,
                min(sum(chunks[: i + 1]), sum(buckets[: j + 1]))
                - max(sum(chunks[:i]), sum(buckets[:j])),
            )
            for j in range(len(buckets))
        ]
        for i in range(len(chunks))
    ]


def expert_assignment(counts: Matrix) -> Matrix:
    """Tokens of every expert that every rank has room for, ``(experts, ranks)``."""
    num_ranks, num_experts = len(counts), len(counts[0])
    experts_per_rank = num_experts // num_ranks
    tokens = [sum(row[e] for row in counts) for e in range(num_experts)]
    loads = [
        sum(tokens[p * experts_per_rank : (p + 1) * experts_per_rank]) for p in range(num_ranks)
    ]
    average = sum(loads) // num_ranks
    spare = [max(0, average - load) for load in loads]
    spill = [0] * num_experts
    for p in range(num_ranks):
        own = range(p * experts_per_rank, (p + 1) * experts_per_rank)
        running = 0
        for e in sorted(own, key=lambda e: tokens[e]):
            spill[e] = max(0, running + tokens[e] - average) - max(0, running - average)
            running += tokens[e]
    experts = sorted(range(num_experts), key=lambda e: -spill[e])
    ranks = sorted(range(num_ranks), key=lambda p: -spare[p])
    sorted_assignment = overlap_matrix([spill[e] for e in experts], [spare[p] for p in ranks])
    assignment = [[0] * num_ranks for _ in range(num_experts)]
    for i, e in enumerate(experts):
        for j, p in enumerate(ranks):
            assignment[e][p] = sorted_assignment[i][j]
    return assignment


def documented_plan(counts: Matrix, num_spare_slots: int) -> tuple[Matrix, list[Matrix]]:
    """``slot_expert`` and ``rerouted`` of the documented planner, as nested lists."""
    num_ranks, num_experts = len(counts), len(counts[0])
    assignment = expert_assignment(counts)
    slot_expert = [[-1] * num_spare_slots for _ in range(num_ranks)]
    amounts = [[0] * num_spare_slots for _ in range(num_ranks)]
    for p in range(num_ranks):
        candidates = [e for e in range(num_experts) if assignment[e][p] > 0]
        candidates.sort(key=lambda e: (-assignment[e][p], e))
        for slot, e in enumerate(candidates[:num_spare_slots]):
            slot_expert[p][slot], amounts[p][slot] = e, assignment[e][p]
    return slot_expert, split_sources(counts, slot_expert, amounts, locality_first=False)


def split_sources(
    counts: Matrix, slot_expert: Matrix, amounts: Matrix, *, locality_first: bool
) -> list[Matrix]:
    """Tokens of every source for every clone, ``(sources, ranks, slots)``.

    ``amounts`` has the tokens of each slot. With ``locality_first`` clones and home experts take
    tokens of their own ranks before the rest is shared.
    """
    num_ranks, num_experts, num_slots = len(counts), len(counts[0]), len(slot_expert[0])
    rerouted = [[[0] * num_slots for _ in range(num_ranks)] for _ in range(num_ranks)]
    for e in range(num_experts):
        places = [
            (p, s) for p in range(num_ranks) for s in range(num_slots) if slot_expert[p][s] == e
        ]
        left = [row[e] for row in counts]
        missing = [amounts[p][s] for p, s in places]
        stays_home = sum(left) - sum(missing)
        if locality_first:
            for j, (p, s) in enumerate(places):
                rerouted[p][p][s] = min(left[p], missing[j])
                left[p] -= rerouted[p][p][s]
                missing[j] -= rerouted[p][p][s]
            home = e // (num_experts // num_ranks)
            left[home] -= min(left[home], stays_home)
        floors = [
            [int(Fraction(left[r], sum(left)) * m) if sum(left) else 0 for m in missing]
            for r in range(num_ranks)
        ]
        rest = overlap_matrix(
            [left[r] - sum(floors[r]) for r in range(num_ranks)],
            [m - sum(row[j] for row in floors) for j, m in enumerate(missing)],
        )
        for r in range(num_ranks):
            for j, (p, s) in enumerate(places):
                rerouted[r][p][s] += floors[r][j] + rest[r][j]
    return rerouted


def violations(
    counts: np.ndarray, plan: OffloadPlan, *, num_spare_slots: int, bound: int | None = None
) -> list[str]:
    """The promises that ``plan`` breaks; ``bound`` is what it should promise, where known."""
    num_ranks, num_experts = counts.shape
    counts = counts.astype(np.int64)
    experts_per_rank = num_experts // num_ranks
    kept = counts.copy()
    load = np.zeros(num_ranks, np.int64)
    clones = 0
    found = []
    for p in range(num_ranks):
        used = [int(e) for e in plan.slot_expert[p] if e >= 0]
        clones += len(used)
        if len(set(used)) < len(used):
            found.append(f"rank {p} holds duplicates {used}")
        if any(e // experts_per_rank == p for e in used):
            found.append(f"rank {p} clones its own expert: {used}")
        for s, e in enumerate(plan.slot_expert[p]):
            served = plan.rerouted[:, p, s]
            if (e < 0) != (served.sum() == 0):
                found.append(f"slot {p}, {s} holds {e} and serves {served.sum()} tokens")
            if e >= 0:
                kept[:, e] -= served
                load[p] += served.sum()
    if plan.rerouted.min(initial=0) < 0 or kept.min() < 0:
        found.append("a source sends more tokens than it has, or fewer than none")
    load += kept.sum(axis=0).reshape(num_ranks, -1).sum(axis=1)
    before = counts.sum(axis=0).reshape(num_ranks, -1).sum(axis=1)
    checks = {
        "shape": plan.slot_expert.shape == (num_ranks, num_spare_slots)
        and plan.rerouted.shape == (num_ranks, num_ranks, num_spare_slots),
        "load_before": np.array_equal(plan.load_before, before),
        "load_after": np.array_equal(plan.load_after, load),
        "conservation": load.sum() == counts.sum(),
        "max_load": plan.max_load == load.max() and plan.max_load <= before.max(),
        "num_clones": plan.num_clones == clones,
        "bound": bound is None or plan.bound == bound,
        "bound_holds": plan.bound_holds == (plan.max_load <= plan.bound),
        "guarantee": plan.planner != "balanced"
        or num_spare_slots < experts_per_rank
        or plan.bound_holds,
    }
    return found + [name for name, holds in checks.items() if not holds]
