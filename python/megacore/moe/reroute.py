"""Send copies of tokens to clones instead of to the home of their expert, as a plan says.

With a plan every rank has ``L + k`` *places* for experts: its L home experts, then its k spare
slots. Places are numbered rank by rank: home expert e is place ``e // L * (L + k) + e % L``, slot s
of rank p is place ``p * (L + k) + L + s``.

Shapes: T tokens, k choices or k slots, R ranks, E experts, L = E / R.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megacore import _core
from megacore.moe.offload_plan import Counts, OffloadPlan
from megacore.ops.permutation import sort_by_expert


@dataclass(frozen=True, kw_only=True, eq=False)
class RerouteTable:
    """What one source rank does with its copies: a row of a plan, sorted by expert.

    Attributes:
        home: Place of each expert, ``(E,)``, int64 like the rest.
        total: Copies of the source rank for each expert, ``(E,)``.
        first: How many of them come before those that are rerouted now, ``(E,)``: where several
            ranks make up one source rank, those of the ones before.
        first_part: Parts ``[first_part[e], first_part[e + 1])`` are those of expert e,
            ``(E + 1,)``.
        destination: Place of the clone of each part, ``(parts,)``.
        tokens: Copies that go there, ``(parts,)``.
    """

    home: Tensor
    total: Tensor
    first: Tensor
    first_part: Tensor
    destination: Tensor
    tokens: Tensor

    @classmethod
    def of(
        cls, plan: OffloadPlan, ep_rank: int, total: Counts, first: Counts | None = None
    ) -> RerouteTable:
        """The table of source rank ``ep_rank``, which has ``total`` copies for each expert.

        Raises:
            ValueError: If the plan moves more copies than there are.
        """
        rank, slot = np.nonzero(plan.rerouted[ep_rank])
        expert = plan.slot_expert[rank, slot]
        order = np.argsort(expert, kind="stable")
        rank, slot, expert = rank[order], slot[order], expert[order]
        tokens = plan.rerouted[ep_rank, rank, slot]
        moved = np.bincount(expert, weights=tokens, minlength=plan.num_experts).astype(np.int64)
        if (moved > total).any():
            worst = int(np.argmax(moved - total))
            raise ValueError(
                f"the plan moves {moved[worst]} copies of source rank {ep_rank} for expert {worst},"
                f" which has {total[worst]}; give the tokens that the plan was made for"
            )
        local = plan.num_experts // plan.num_ranks
        places = local + plan.num_spare_slots
        experts = np.arange(plan.num_experts)
        return cls(
            home=torch.from_numpy(experts // local * places + experts % local),
            total=torch.from_numpy(np.array(total, np.int64)),
            first=torch.from_numpy(np.zeros_like(experts) if first is None else np.array(first)),
            first_part=torch.from_numpy(np.searchsorted(expert, np.arange(plan.num_experts + 1))),
            destination=torch.from_numpy(rank * places + local + slot),
            tokens=torch.from_numpy(np.ascontiguousarray(tokens)),
        )


def reroute_ids(expert_ids: Tensor, table: RerouteTable) -> Tensor:
    """The place that computes each copy.

    Copies of an expert are counted in the order of ``expert_ids``, and those that go to a clone are
    spread evenly among them.

    Args:
        expert_ids: Expert of each copy, ``(T, k)``, int64; -1 for no copy.
        table: What this rank does with its copies.

    Returns:
        ``(T, k)``, int64; -1 for no copy.

    Raises:
        ValueError: On the CPU, if an expert does not exist or has more copies than the table says.

    Sync:
        None. On CUDA, small copies from the host.
    """
    if expert_ids.device.type != "cpu":
        return reroute_ids_reference(expert_ids, table)
    expert_ids = expert_ids.contiguous()
    places = torch.empty_like(expert_ids)
    _core.reroute_copies(
        expert_of=expert_ids.data_ptr(),
        numel=expert_ids.numel(),
        home=table.home.data_ptr(),
        total=table.total.data_ptr(),
        first=table.first.data_ptr(),
        first_part=table.first_part.data_ptr(),
        destination=table.destination.data_ptr(),
        tokens=table.tokens.data_ptr(),
        num_experts=table.home.numel(),
        physical=places.data_ptr(),
    )
    return places


def reroute_ids_reference(expert_ids: Tensor, table: RerouteTable) -> Tensor:
    """Do what :func:`reroute_ids` does, with torch operations, on any device."""
    num_experts, device = table.home.numel(), expert_ids.device
    row_map, counts = sort_by_expert(expert_ids, num_experts)
    expert = expert_ids.clamp(min=0)
    home, total, first = (t.to(device)[expert] for t in (table.home, table.total, table.first))
    start = (counts.cumsum(0) - counts)[expert]
    index = row_map - start + first
    place, taken = home, expert_ids < 0
    num_parts = table.first_part.diff()
    for part in range(int(num_parts.max()) if num_experts else 0):
        exists = (part < num_parts).to(device)[expert]
        at = (table.first_part[:-1] + part).clamp(max=max(0, table.tokens.numel() - 1)).to(device)
        tokens = table.tokens.to(device)[at[expert]] * exists
        before = index * tokens // total.clamp(min=1)
        goes = ((index + 1) * tokens // total.clamp(min=1) > before) & ~taken
        place = torch.where(goes, table.destination.to(device)[at[expert]], place)
        taken = taken | goes
        index, total = index - before, total - tokens
    return place.masked_fill(expert_ids < 0, -1)


def reroute_tokens(
    routing_map: Tensor, probs: Tensor, plan: OffloadPlan, ep_rank: int
) -> tuple[Tensor, Tensor]:
    """Reroute the tokens of one source rank; the gradient of ``probs`` goes back the same way.

    Args:
        routing_map: Either the chosen experts, ``(T, k)`` int64, -1 for no choice, or for each
            token and expert whether it was chosen, ``(T, E)`` bool.
        probs: Weights in the same shape.
        plan: Made from the counts of all ranks.
        ep_rank: Which source rank of the plan these tokens are.

    Returns:
        The same with places instead of experts: ``(T, k)`` ids and the very same weights, or
        ``(T, R * (L + slots))`` bool and weights, zero where no copy goes.

    Raises:
        ValueError: If shapes do not fit, or the plan was made for other counts.

    Example:
        >>> from megacore.moe import plan_offload
        >>> plan = plan_offload([[4, 0], [0, 0]], num_spare_slots=1, tolerance=0.0)
        >>> ids, probs = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        >>> reroute_tokens(ids, probs, plan, 0)[0].flatten().tolist()  # place 3: slot 0 of rank 1
        [0, 3, 0, 3]
    """
    if routing_map.shape != probs.shape or routing_map.dim() != 2:
        raise ValueError(
            f"routing_map has shape {tuple(routing_map.shape)} and probs {tuple(probs.shape)}; "
            "both must be (tokens, choices) or (tokens, experts)"
        )
    if routing_map.dtype != torch.bool:
        return reroute_ids(routing_map, _table_for(routing_map, plan, ep_rank)), probs
    if routing_map.shape[1] != plan.num_experts:
        raise ValueError(
            f"routing_map has {routing_map.shape[1]} columns, but the plan is for "
            f"{plan.num_experts} experts"
        )
    experts = torch.arange(plan.num_experts, device=routing_map.device)
    ids = torch.where(routing_map, experts, -1)
    places = reroute_ids(ids, _table_for(ids, plan, ep_rank))
    num_places = num_places_of(plan)
    # Choices that do not exist share one more column at the end, which is cut off.
    column = torch.where(places < 0, num_places, places)
    shape = (routing_map.shape[0], num_places + 1)
    rerouted_map = routing_map.new_zeros(shape).scatter(1, column, routing_map)
    rerouted_probs = probs.new_zeros(shape).scatter(1, column, probs)
    return rerouted_map[:, :num_places], rerouted_probs[:, :num_places]


def num_places_of(plan: OffloadPlan) -> int:
    """Home experts and spare slots of all ranks."""
    return plan.num_experts + plan.num_ranks * plan.num_spare_slots


def _table_for(expert_ids: Tensor, plan: OffloadPlan, ep_rank: int) -> RerouteTable:
    if not 0 <= ep_rank < plan.num_ranks:
        raise ValueError(f"ep_rank is {ep_rank}; the plan has the ranks 0 to {plan.num_ranks - 1}")
    _, counts = sort_by_expert(expert_ids, plan.num_experts)
    return RerouteTable.of(plan, ep_rank, counts.cpu().numpy())
