"""Baseline load balancers, for comparison.

An EPLB-style balancer replicates experts by load and then places *all* replicas from scratch. It is
intended to run occasionally on past loads, since it moves almost every expert; each replica
receives an equal part of its expert's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megacore.moe.echo.plan import Counts


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Placement of expert replicas on ranks, without home experts.

    Attributes:
        rank_experts: ``(R, E / R + k)`` int64, the experts on each rank; one may occur repeatedly.
        num_replicas: ``(E,)`` int64, number of replicas of each expert, at least 1.
    """

    rank_experts: Counts
    num_replicas: Counts

    def rank_loads(self, expert_loads: Counts) -> npt.NDArray[np.float64]:
        """Compute the tokens per rank, ``(R,)``, with tokens divided equally among replicas."""
        loads: npt.NDArray[np.float64] = self._shares(expert_loads).sum(axis=1)
        return loads

    def _shares(self, expert_loads: Counts) -> npt.NDArray[np.float64]:
        shares: npt.NDArray[np.float64] = (expert_loads / self.num_replicas)[self.rank_experts]
        return shares

    def _away(self) -> npt.NDArray[np.bool_]:
        num_ranks = len(self.rank_experts)
        home = self.rank_experts // (len(self.num_replicas) // num_ranks)
        away: npt.NDArray[np.bool_] = home != np.arange(num_ranks)[:, None]
        return away

    @property
    def num_moved_experts(self) -> int:
        """Number of replicas outside their expert's home rank; each costs a weight transfer."""
        return int(self._away().sum())

    def num_moved_tokens(self, expert_loads: Counts) -> float:
        """Count tokens computed outside their expert's home rank."""
        return float(self._shares(expert_loads)[self._away()].sum())


def place_by_load(expert_loads: Counts, *, num_ranks: int, num_spare_slots: int) -> Placement:
    """Replicate the hottest experts, then place all replicas by descending load.

    Every spare slot is assigned to the expert with the most tokens per replica. Then each replica,
    by descending load, is placed on the least loaded rank that has a free slot.

    Args:
        expert_loads: Tokens per expert, ``(E,)``; this step's or an earlier one's.
        num_ranks: R, a divisor of E.
        num_spare_slots: Slots per rank beyond E / R.

    Source:
        The strategy of DeepSeek's EPLB without its node hierarchy.

    Example:
        >>> placement = place_by_load(np.array([90, 10]), num_ranks=2, num_spare_slots=1)
        >>> placement.num_replicas.tolist(), placement.rank_loads(np.array([90, 10])).tolist()
        ([3, 1], [60.0, 40.0])
    """
    num_experts = len(expert_loads)
    replicas = np.ones(num_experts, np.int64)
    for _ in range(num_ranks * num_spare_slots):
        replicas[np.argmax(expert_loads / replicas)] += 1
    physical = np.repeat(np.arange(num_experts), replicas)
    weights = (expert_loads / replicas)[physical]
    places = num_experts // num_ranks + num_spare_slots
    rank_experts = np.empty((num_ranks, places), np.int64)
    loads, filled = np.zeros(num_ranks), np.zeros(num_ranks, np.int64)
    for index in np.argsort(-weights, kind="stable"):
        rank = int(np.argmin(np.where(filled < places, loads, np.inf)))
        rank_experts[rank, filled[rank]] = physical[index]
        loads[rank] += weights[index]
        filled[rank] += 1
    return Placement(rank_experts=rank_experts, num_replicas=replicas)
