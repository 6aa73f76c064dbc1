"""ECHO in a layer: plan clones from this microbatch's counts and send tokens to them.

Every rank gathers the counts of all, makes the same plan, and gives each of its copies the number
of a *place*: a home expert or a spare slot of some rank (see ``reroute.py``). To a dispatcher
places are experts like others, ``L + k`` on each rank.

Shapes: T tokens of this rank, k choices per token, E experts, G members of the group that shares
the experts, R parts that the experts are dealt into (``G / etp``), P places of all ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megacore.moe.clone_weights import CloneExchange, CloneRoutes, SlotBuffers
from megacore.moe.dispatchers import (
    Capacity,
    Dispatcher,
    DispatchPlan,
    ExpertPlacement,
    Routing,
    StaticBudget,
)
from megacore.moe.dispatchers.capacity import place_in_expert
from megacore.moe.experts import GroupedExperts
from megacore.moe.offload_plan import Counts, OffloadPlan, plan_offload
from megacore.moe.reroute import RerouteTable, reroute_ids
from megacore.ops.permutation import sort_by_expert
from megacore.parallel.collectives import all_gather
from megacore.parallel.process_groups import Group


@dataclass(frozen=True, kw_only=True)
class EchoOptions:
    """What :func:`megacore.moe.plan_offload` is given; see there."""

    num_spare_slots: int
    method: Literal["balanced", "echo"] = "balanced"
    tolerance: float = 0.01
    min_imbalance: float = 1.0
    domain_size: int | None = None

    def guaranteed_factor(self, experts_per_rank: int) -> float | None:
        """Highest load over the mean that no routing can exceed; ``None`` where nobody knows.

        With fewer slots than experts per rank it is the load that no planner can prevent, which the
        balanced one comes within a few percent of.

        Example:
            >>> EchoOptions(num_spare_slots=4).guaranteed_factor(4)
            1.01
            >>> EchoOptions(num_spare_slots=1).guaranteed_factor(4)
            1.5625
        """
        if self.method != "balanced" or self.num_spare_slots == 0:
            return None
        share = min(1.0, self.num_spare_slots / experts_per_rank)
        worst = (1.0 + share) ** 2 / (4.0 * share)
        return max(1.0 + self.tolerance if share == 1.0 else worst, self.min_imbalance)


@dataclass(kw_only=True)
class EchoCounts:
    """Sums over the plans of a layer since they were reset, on this rank.

    Attributes:
        num_plans: Plans made, one per forward pass.
        highest_before: Load of the fullest rank without the plan.
        highest_after: Load of the fullest rank with it.
        mean_load: Load of each rank if all had the same.
        num_clones: Experts cloned.
        num_moved: Copies of tokens computed by clones.
        bytes_sent: What this rank sent for clones: weights, in both passes, and gradients.
        plan_us: Time to plan, microseconds.
    """

    num_plans: float = 0.0
    highest_before: float = 0.0
    highest_after: float = 0.0
    mean_load: float = 0.0
    num_clones: float = 0.0
    num_moved: float = 0.0
    bytes_sent: float = 0.0
    plan_us: float = 0.0

    def add(self, plan: OffloadPlan, plan_us: float) -> None:
        """Count one plan."""
        self.num_plans += 1
        self.highest_before += int(plan.load_before.max())
        self.highest_after += plan.max_load
        self.mean_load += plan.mean_load
        self.num_clones += plan.num_clones
        self.num_moved += plan.num_moved_tokens
        self.plan_us += plan_us

    @property
    def imbalance_before(self) -> float:
        """Highest load over the mean without clones, over all plans."""
        return self.highest_before / self.mean_load if self.mean_load else 1.0

    @property
    def imbalance_after(self) -> float:
        """Highest load over the mean with clones, over all plans."""
        return self.highest_after / self.mean_load if self.mean_load else 1.0

    def as_record(self) -> dict[str, float]:
        """What ``metrics.jsonl`` says of a layer, from sums over all ranks.

        Example:
            >>> EchoCounts(num_plans=2, highest_before=30, highest_after=20, mean_load=20,
            ...            num_clones=3).as_record()["imbalance_before"]
            1.5
        """
        plans = max(1.0, self.num_plans)
        return {
            "imbalance_before": self.imbalance_before,
            "imbalance_after": self.imbalance_after,
            "num_clones": self.num_clones / plans,
            "num_moved_copies": self.num_moved / plans,
            "bytes_sent": self.bytes_sent,
            "plan_us": self.plan_us / plans,
        }

    def as_list(self) -> list[float]:
        """The values in the order of the attributes."""
        return [getattr(self, each.name) for each in fields(self)]

    @classmethod
    def of_list(cls, values: list[float]) -> EchoCounts:
        """From :meth:`as_list`, perhaps summed over ranks."""
        return cls(**{each.name: value for each, value in zip(fields(cls), values, strict=True)})


class ReceiveBudget:
    """Rows that a rank keeps for its experts with the ``static`` dispatcher.

    Args:
        factor: Rows as a multiple of the mean load of a rank.
        growth: The budget that grows when a step that ran over is run again.
    """

    def __init__(self, factor: float, growth: StaticBudget) -> None:
        self.factor = factor
        self._growth = growth

    def rows(self, *, num_tokens: int, top_k: int, placement: ExpertPlacement) -> int:
        """Rows for all that comes from all members; never more than can come.

        Args:
            num_tokens: Tokens of each member.
            top_k: Copies of each token.
            placement: Where the places are.
        """
        copies = num_tokens * placement.group.size
        factor = self.factor * self._growth.growth
        # Slightly less before rounding up, so that 1.01 x 100 is 101.
        wanted = math.ceil(factor * copies * top_k / placement.ep_size - 1e-6)
        return min(wanted, copies * min(top_k, placement.num_local))


@dataclass(frozen=True, kw_only=True, eq=False)
class Rerouted:
    """Where the copies of one forward pass go: what a dispatcher is given.

    Attributes:
        probs: Weight of each copy, ``(T, k)``, float32.
        expert_ids: Place of each copy, ``(T, k)``, int64; -1 for copies that are not sent.
    """

    probs: Tensor
    expert_ids: Tensor


@dataclass(frozen=True, kw_only=True)
class EchoPlan(DispatchPlan):
    """A dispatcher's plan with the clones that it sends tokens to.

    Attributes:
        offload: The clones, the same on all members of the group.
        routes: This rank's part of them.
    """

    offload: OffloadPlan
    routes: CloneRoutes


class Echo:
    """Clones for one layer.

    Args:
        placement: Where home experts are.
        options: For the planner.
        ep: The ranks of a plan: one of each part of the experts, this rank among them.
        slots: Memory for clones, which layers share.
        capacity: Limit of the copies per expert, before any is rerouted.
        budget: Limit of the rows that a rank can take; ``None`` for no limit.

    Attributes:
        slots: Memory for clones.
        counts: What has happened since :meth:`reset_counts`.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        options: EchoOptions,
        *,
        ep: Group,
        slots: SlotBuffers,
        capacity: Capacity | None = None,
        budget: ReceiveBudget | None = None,
    ) -> None:
        self.placement = placement
        self.places = placement.with_slots(options.num_spare_slots)
        self.options = options
        self.counts = EchoCounts()
        self._ep = ep
        self.slots = slots
        self._capacity = capacity
        self._budget = budget

    def plan(self, routing: Routing, dispatcher: Dispatcher) -> EchoPlan:
        """Choose clones, send copies to them, and let the dispatcher plan the way.

        Sync:
            Gathers counts over the group. Waits for the device: clones are chosen on the host.
        """
        offload, wanted, place_ids = self._choose(routing)
        plan = dispatcher.preprocess(Rerouted(probs=routing.probs, expert_ids=place_ids))
        values = {each.name: getattr(plan, each.name) for each in fields(plan)}
        expert_of_place = _expert_of_place(offload).to(place_ids.device)
        # Losses and metrics know experts, not places; the last entry is that of unused slots.
        counts = place_ids.new_zeros(offload.num_experts + 1)
        counts.scatter_add_(0, expert_of_place, plan.tokens_per_expert)
        values["tokens_per_expert"] = counts[:-1]
        no_room = (wanted >= 0).sum() - (place_ids >= 0).sum()
        values["num_over_budget"] = plan.num_over_budget + no_room
        return EchoPlan(**values, offload=offload, routes=CloneRoutes.of(offload, self._ep))

    def clones(self, experts: GroupedExperts, plan: EchoPlan) -> CloneExchange:
        """The exchange of weights and gradients of a forward pass that goes by ``plan``."""
        return CloneExchange(
            self.slots,
            plan.routes,
            owner=plan.offload,
            fc1=experts.fc1,
            fc2=experts.fc2,
            on_sent=self._count_bytes,
        )

    def reset_counts(self) -> None:
        """Start counting anew."""
        self.counts = EchoCounts()

    @property
    def receive_rows(self) -> Callable[[int, int], int] | None:
        """From tokens of a member and copies of each to the rows of a rank; ``None``: no limit."""
        budget = self._budget
        if budget is None:
            return None
        return lambda num_tokens, top_k: budget.rows(
            num_tokens=num_tokens, top_k=top_k, placement=self.places
        )

    @torch.no_grad()
    def _choose(self, routing: Routing) -> tuple[OffloadPlan, Tensor, Tensor]:
        """Clones, the place of each copy, and the same without copies that find no room there."""
        ids_Tk = routing.expert_ids
        if self._capacity is not None:
            ids_Tk = self._capacity.limit(
                ids_Tk, routing.probs, num_experts=self.placement.num_experts
            )
        counts_GE = self._gather(sort_by_expert(ids_Tk, self.placement.num_experts)[1])
        members = [list(part) for part in self.placement.members]
        counts_RE = np.stack([counts_GE[part].sum(0) for part in members])
        start = time.perf_counter()
        plan = plan_offload(
            counts_RE,
            num_spare_slots=self.options.num_spare_slots,
            method=self.options.method,
            tolerance=self.options.tolerance,
            min_imbalance=self.options.min_imbalance,
            domain_size=self.options.domain_size,
        )
        self.counts.add(plan, (time.perf_counter() - start) * 1e6)
        me = self.placement.ep_position
        earlier = members[me][: members[me].index(self.placement.group.position)]
        table = RerouteTable.of(plan, me, counts_RE[me], counts_GE[earlier].sum(0))
        place_ids = reroute_ids(ids_Tk, table)
        return plan, place_ids, self._fit(place_ids, plan)

    def _count_bytes(self, num_bytes: int) -> None:
        self.counts.bytes_sent += num_bytes

    def _gather(self, counts: Tensor) -> Counts:
        """Counts of all members, ``(G, number)``, on the host."""
        group = self.placement.group
        gathered = counts.new_empty(group.size * counts.shape[0])
        all_gather(gathered, counts, group)
        array: Counts = gathered.view(group.size, -1).cpu().numpy()
        return array

    def _fit(self, place_ids: Tensor, plan: OffloadPlan) -> Tensor:
        """Leave out copies that their rank has no row for: of the last places the last copies."""
        if self.receive_rows is None:
            return place_ids
        rows = self.receive_rows(*place_ids.shape)
        if plan.max_load <= rows:  # known to all members, so all or none go on
            return place_ids
        group = self.places.group
        counts_GP = self._gather(sort_by_expert(place_ids, self.places.num_experts)[1])
        counts_RLG = counts_GP.reshape(group.size, self.places.ep_size, -1).transpose(1, 2, 0)
        flat = counts_RLG.reshape(self.places.ep_size, -1)
        before = flat.cumsum(1) - flat
        kept = np.clip(rows - before, 0, flat).reshape(counts_RLG.shape)
        own = torch.from_numpy(np.ascontiguousarray(kept[:, :, group.position]).reshape(-1))
        limit = own.to(place_ids.device)[place_ids.clamp(min=0)]
        return place_ids.masked_fill(place_in_expert(place_ids, None) >= limit, -1)


def _expert_of_place(plan: OffloadPlan) -> Tensor:
    home = np.arange(plan.num_experts).reshape(plan.num_ranks, -1)
    slots = np.where(plan.slot_expert < 0, plan.num_experts, plan.slot_expert)
    return torch.from_numpy(np.concatenate([home, slots], axis=1).reshape(-1))
