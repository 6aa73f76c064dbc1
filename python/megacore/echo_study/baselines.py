"""What others do about hot experts, written here to compare with.

An EPLB-style balancer replicates experts by load and then places *all* of them anew. It is meant
to run once in a while on past loads, since it moves almost every expert; each replica takes an
equal part of its expert's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Which experts a rank computes; nothing is at home by definition.

    Attributes:
        rank_experts: ``(R, E / R + k)`` int64, the experts on each rank; one may occur repeatedly.
        num_replicas: ``(E,)`` int64, how often each expert occurs, at least once.
    """

    rank_experts: Counts
    num_replicas: Counts

    def rank_loads(self, expert_loads: Counts) -> npt.NDArray[np.float64]:
        """Tokens per rank, ``(R,)``, when replicas share their expert's tokens equally."""
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
        """Experts on another rank than their home: each needs its weights sent."""
        return int(self._away().sum())

    def num_moved_tokens(self, expert_loads: Counts) -> float:
        """Tokens computed on another rank than their expert's home."""
        return float(self._shares(expert_loads)[self._away()].sum())


def place_by_load(expert_loads: Counts, *, num_ranks: int, num_spare_slots: int) -> Placement:
    """Replicate the hottest experts, then place all replicas, the heaviest first.

    Every spare slot goes to the expert with the most tokens per replica. Then each replica, by
    descending load, goes to the rank with the least load that has room for another expert.

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
