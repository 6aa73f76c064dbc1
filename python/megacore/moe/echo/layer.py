"""ECHO in a layer: plan clones from this microbatch's counts and send tokens to them.

Every rank gathers the counts of all ranks, computes the same plan, and maps each of its copies to a
*place*: a home expert or a spare slot of some rank (see ``reroute.py``). A dispatcher treats places
as experts, ``L + S`` on each rank. All steps run on the device.

Shapes: T tokens of this rank, k choices per token, E experts, L experts and S slots of a rank, G
members of the group that shares the experts, R ep positions (``G / etp``), P places of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from megacore.moe.dispatchers import (
    Capacity,
    Dispatcher,
    DispatchPlan,
    ExpertPlacement,
    Routing,
    StaticBudget,
)
from megacore.moe.dispatchers.base import constant
from megacore.moe.echo.clone_rows import append_rows
from megacore.moe.echo.clones import LayerClones
from megacore.moe.echo.device_plan import DevicePlan, plan_offload_on_device
from megacore.moe.echo.reroute import SourceRow, reroute
from megacore.moe.echo.slots import CloneRoutes, SlotBuffers
from megacore.moe.echo.transports import MemoryClones, MessageClones
from megacore.moe.experts import GroupedExperts
from megacore.moe.options import EchoOptions
from megacore.ops.echo_counts import BYTES_SENT, ECHO_SUMS, count_held_, count_plan_
from megacore.ops.permutation import sort_by_expert
from megacore.parallel.collectives import all_gather
from megacore.parallel.process_groups import Group


@dataclass(frozen=True)
class ReceiveBudget:
    """Rows of a rank's expert input with the ``static`` dispatcher.

    Attributes:
        factor: Rows as a multiple of the mean load of a rank.
        budget: Budget that grows when a step that exceeded it is rerun.
    """

    factor: float
    budget: StaticBudget

    def rows(self, *, num_tokens: int, top_k: int, placement: ExpertPlacement) -> int:
        """Compute the rows for all members together, at most the largest possible number.

        Args:
            num_tokens: Tokens of each member.
            top_k: Copies of each token.
            placement: Placement of home experts and spare slots.
        """
        copies = num_tokens * placement.group.size
        factor = self.factor * self.budget.growth
        # Subtract an epsilon before rounding up, so that 1.01 x 100 is 101.
        wanted = math.ceil(factor * copies * top_k / placement.ep_size - 1e-6)
        return min(wanted, copies * min(top_k, placement.num_local))


@dataclass(frozen=True, kw_only=True, eq=False)
class Rerouted:
    """Routing of one forward pass in terms of places, the input of a dispatcher.

    Attributes:
        probs: Weight of each copy, ``(T, k)``, float32.
        expert_ids: Place of each copy, ``(T, k)``, int64; -1 for copies that are not sent.
        num_copies: Copies of tokens that are not padding, int64 scalar; ``None``: all.
    """

    probs: Tensor
    expert_ids: Tensor
    num_copies: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class EchoDispatchPlan(DispatchPlan):
    """Dispatch plan with the clones that receive tokens.

    Attributes:
        offload: The clones, the same on all members of the group.
    """

    offload: DevicePlan


class Echo:
    """Expert cloning for one layer.

    Args:
        placement: Placement of the home experts.
        options: Slots and planner.
        ep: The ranks of a plan: one per ep position, including this rank.
        slots: Memory for clones, shared by all layers.
        capacity: Limit of the copies per expert, applied before rerouting.
        budget: Limit of the rows that a rank can receive; ``None`` for no limit.
        tries_memory: Whether clones are exchanged through memory of all ranks, if they can access
            it. With a budget, the dispatcher uses that memory too and drops copies that exceed it.
        device: Device of the tokens.

    Attributes:
        slots: Memory for clones.
        sums: Sums since :meth:`reset_counts`, in the order of `EchoCounts`, float64.
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
        tries_memory: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.placement = placement
        self.places = placement.with_slots(options.num_spare_slots)
        self.options = options
        self.sums = torch.zeros(len(ECHO_SUMS), dtype=torch.float64, device=device)
        self._no_copies = torch.zeros(placement.num_experts, dtype=torch.int64, device=device)
        self._ep = ep
        self.slots = slots
        self._capacity = capacity
        self._budget = budget
        self._tries_memory = tries_memory

    def plan(self, routing: Routing, dispatcher: Dispatcher) -> EchoDispatchPlan:
        """Choose clones, reroute copies to them, and plan the dispatch.

        Sync:
            Gathers counts over the group; does not wait for the device.
        """
        offload, wanted, kept, arriving = self._choose(routing)
        if arriving is None:
            plan = dispatcher.preprocess(kept)
        else:
            plan = dispatcher.preprocess_counted(kept, arriving)
        values = {each.name: getattr(plan, each.name) for each in fields(plan)}
        # Losses and metrics are per expert, not per place.
        values["tokens_per_expert"] = count_plan_(
            self.sums,
            offload.slot_expert,
            offload.load_before,
            offload.summary,
            offload.elapsed_ns,
            plan.tokens_per_expert,
            offload.num_experts,
        )
        if kept.expert_ids is not wanted:
            no_room = (wanted >= 0).sum() - (kept.expert_ids >= 0).sum()
            earlier = plan.num_over_budget
            values["num_over_budget"] = no_room if earlier is None else earlier + no_room
        return EchoDispatchPlan(**values, offload=offload)

    def clones(self, experts: GroupedExperts, plan: EchoDispatchPlan) -> LayerClones:
        """Create the exchange of clone weights and gradients for a forward pass with ``plan``.

        Sync:
            Waits for the device if clones are sent as messages: if ranks cannot access each other's
            memory, and on GPUs with all dispatchers except ``static``.
        """
        if self._tries_memory:
            fc1, fc2 = (w.detach().flatten(1, -2) for w in (experts.fc1, experts.fc2))
            sets = self.slots.memory(self._ep, fc1, fc2)
            if sets:
                return MemoryClones(
                    sets,
                    plan.offload,
                    fc1=experts.fc1,
                    fc2=experts.fc2,
                    on_sent=partial(count_held_, self.sums),
                )
        return MessageClones(
            self.slots,
            CloneRoutes.of(plan.offload.read_slots(), self.placement.num_local, self._ep),
            owner=plan.offload,
            fc1=experts.fc1,
            fc2=experts.fc2,
            on_sent=self.sums[BYTES_SENT].add_,
        )

    def extension(self, plan: EchoDispatchPlan) -> Callable[[Tensor], Tensor]:
        """Return a function that appends rows of clones to rows of home experts, see `append_rows`.

        Sync:
            As `clones`.
        """
        return partial(
            append_rows,
            slots=self.slots.rows(),
            plan=plan.offload,
            ep=self._ep,
            tries_memory=self._tries_memory,
        )

    def reset_counts(self) -> None:
        """Reset the counters to zero."""
        self.sums.zero_()

    @property
    def receive_rows(self) -> Callable[[int, int], int] | None:
        """Map from (tokens of a member, copies per token) to a rank's rows; ``None``: no limit."""
        budget = self._budget
        if budget is None:
            return None
        return lambda num_tokens, top_k: budget.rows(
            num_tokens=num_tokens, top_k=top_k, placement=self.places
        )

    @torch.no_grad()
    def _choose(self, routing: Routing) -> tuple[DevicePlan, Tensor, Rerouted, Tensor | None]:
        """Choose clones, the place of each copy, and the copies that fit the budget.

        Returns:
            The clones; the places; the copies that fit; and, if the plan determines them, the
            copies that each member sends to each place of this rank, ``(G, L + S)``.
        """
        ids_Tk, placement = routing.expert_ids, self.placement
        if self._capacity is not None:
            ids_Tk = self._capacity.limit(
                ids_Tk,
                routing.probs,
                num_experts=placement.num_experts,
                num_copies=routing.num_copies,
            )
        counts_GE = self._gather(sort_by_expert(ids_Tk, placement.num_experts)[1])
        counts_RE, total, first = self._counts_of_sources(counts_GE)
        plan = plan_offload_on_device(
            counts_RE,
            rank=placement.ep_position,
            num_spare_slots=self.options.num_spare_slots,
            planner=self.options.planner,
            tolerance=self.options.tolerance,
            min_imbalance=self.options.min_imbalance,
            domain_size=self.options.domain_size,
        )
        row = SourceRow(
            total=total,
            first=first,
            slot_expert=plan.slot_expert,
            tokens=plan.sent,
        )
        place_ids, probs = reroute(ids_Tk, routing.probs, row)
        kept = Rerouted(probs=probs, expert_ids=self._fit(place_ids), num_copies=routing.num_copies)
        # The share of one of several members of a source depends on the order of its copies.
        return plan, place_ids, kept, plan.arriving if self._members_are_sources else None

    @property
    def _members_are_sources(self) -> bool:
        """True if each ep position has one member, so plans have a row per member."""
        placement = self.placement
        return placement.members == tuple((at,) for at in range(placement.ep_size))

    def _counts_of_sources(self, counts_GE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum counts over the members of each ep position, the sources of a plan.

        Returns:
            Counts of all sources ``(R, E)``, of this one ``(E,)``, and of its members before this
            one ``(E,)``.
        """
        placement, device = self.placement, counts_GE.device
        me, position = placement.ep_position, placement.group.position
        if self._members_are_sources:
            return counts_GE, counts_GE[me], self._no_copies
        members = constant(placement.members, device)
        mine = placement.members[me]
        earlier = constant(mine[: mine.index(position)], device)
        return (
            counts_GE[members].sum(1),
            counts_GE[members[me]].sum(0),
            counts_GE[earlier].sum(0),
        )

    def _gather(self, counts: Tensor) -> Tensor:
        """Gather the counts of all members, ``(G, number)``."""
        group = self.placement.group
        gathered = counts.new_empty(group.size * counts.shape[0])
        all_gather(gathered, counts, group)
        return gathered.view(group.size, -1)

    def _fit(self, place_ids: Tensor) -> Tensor:
        """Drop copies beyond their rank's rows: the last copies of the last places."""
        if self.receive_rows is None or self._tries_memory or self._always_fits:
            return place_ids
        rows = self.receive_rows(*place_ids.shape)
        group, places = self.places.group, self.places
        row_map, counts_P = sort_by_expert(place_ids, places.num_experts)
        counts_GP = self._gather(counts_P)
        # By place, then by member: the order in which a rank takes rows.
        counts_RLG = counts_GP.view(group.size, places.ep_size, -1).permute(1, 2, 0)
        flat = counts_RLG.reshape(places.ep_size, -1)
        room = rows - (flat.cumsum(1) - flat)
        kept_RLG = torch.minimum(room.clamp(min=0), flat).view(counts_RLG.shape)
        kept_P = kept_RLG[:, :, group.position].reshape(-1)
        first_P = counts_P.cumsum(0) - counts_P
        has_no_room = row_map >= (first_P + kept_P)[place_ids.clamp(min=0)]
        return place_ids.masked_fill(has_no_room, -1)

    @property
    def _always_fits(self) -> bool:
        """True if the planner's bound is proved and the budget covers it."""
        budget, local = self._budget, self.placement.num_local
        guaranteed = self.options.guaranteed_factor(local)
        return (
            budget is not None
            and guaranteed is not None
            and self.options.num_spare_slots >= local
            and budget.factor >= guaranteed
        )
