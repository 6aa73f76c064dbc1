"""Rerouting of token copies from home experts to clones according to a plan.

With a plan every rank has ``L + S`` *places* for experts: its L home experts, then its S spare
slots. Places are numbered rank by rank: home expert e is place ``e // L * (L + S) + e % L``, slot s
of rank p is place ``p * (L + S) + L + s``.

Shapes: T tokens, k choices per token, R ranks, S slots of a rank, E experts, L = E / R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megacore import host_values
from megacore.moe.echo.plan import OffloadPlan
from megacore.ops import cuda_kernels
from megacore.ops.permutation import sort_by_expert
from megacore.ops.register import define_compiled


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceRow:
    """Row of a plan for one source rank. All int64, on one device.

    Attributes:
        total: Copies of the source rank for each expert, ``(E,)``.
        first: Offset of this rank's copies within the source rank's copies, ``(E,)``: if several
            ranks form one source rank, the number of copies of the preceding ranks.
        slot_expert: The expert cloned into each slot, ``(R, S)``; -1 where a slot is unused.
        tokens: Copies of this source rank that go to each slot, ``(R, S)``.
    """

    total: Tensor
    first: Tensor
    slot_expert: Tensor
    tokens: Tensor


def reroute(expert_ids: Tensor, probs: Tensor, row: SourceRow) -> tuple[Tensor, Tensor]:
    """Compute the place of each copy; weights keep their positions.

    Copies of an expert are counted in the order of ``expert_ids``, and the copies for each clone
    are spread evenly over that order. Weights without a copy become 0.

    Args:
        expert_ids: Expert of each copy, ``(T, k)``, int64; -1 for no copy.
        probs: Weight of each copy, ``(T, k)``.
        row: The plan's row for this source rank.

    Returns:
        Places, ``(T, k)`` int64, -1 for no copy; and weights, ``(T, k)``, zero for no copy.

    Raises:
        ValueError: On the CPU, if an expert does not exist or has more copies than the row says, or
            if the row moves more copies than there are. On CUDA such copies are not sent.

    Sync:
        None: on CUDA kernels on the current stream, which may be captured. Where no kernel supports
        the GPU, it waits for the device once, unless a graph is captured.

    Example:
        >>> row = SourceRow(total=torch.tensor([4, 0]), first=torch.tensor([0, 0]),
        ...                 slot_expert=torch.tensor([[-1], [0]]), tokens=torch.tensor([[0], [2]]))
        >>> places, _ = reroute(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1), row)
        >>> places.flatten().tolist()  # place 3: slot 0 of rank 1
        [0, 3, 0, 3]
    """
    places: Tensor = _reroute(expert_ids, row.total, row.first, row.slot_expert, row.tokens)
    return places, probs.masked_fill(places < 0, 0.0)


def reroute_ids_reference(
    expert_ids: Tensor, total: Tensor, first: Tensor, slot_expert: Tensor, tokens: Tensor
) -> Tensor:
    """Find the places of :func:`reroute` with torch operations, on any device.

    Sync:
        Waits for the device, except while a CUDA graph is captured, which then holds the operations
        for as many clones of one expert as there are slots.
    """
    num_experts, (num_ranks, num_slots) = total.numel(), slot_expert.shape
    local = num_experts // num_ranks
    row_map, counts = sort_by_expert(expert_ids, num_experts)
    expert = expert_ids.clamp(min=0)
    index = row_map - (counts.cumsum(0) - counts)[expert] + first[expert]
    left = total[expert]
    place = expert // local * (local + num_slots) + expert % local
    taken = expert_ids < 0
    # Slots that get copies, by expert: those of expert e are [begin[e], end[e]) of `by_expert`.
    wanted_of = tokens.flatten()
    cloned = slot_expert.flatten().masked_fill(wanted_of <= 0, -1)
    sorted_experts, by_expert = cloned.sort(stable=True)
    experts = torch.arange(num_experts, device=cloned.device)
    begin = torch.searchsorted(sorted_experts, experts)
    end = torch.searchsorted(sorted_experts, experts, right=True)
    # Each clone takes its share of the copies that the preceding clones of the expert have left.
    for number in range(_most_clones(end - begin, cloned.numel())):
        at = (begin + number)[expert]
        slot = by_expert[at.clamp(max=cloned.numel() - 1)]
        wanted = wanted_of[slot].masked_fill(at >= end[expert], 0)
        before = index * wanted // left.clamp(min=1)
        goes = ((index + 1) * wanted // left.clamp(min=1) > before) & ~taken
        at_slot = slot // num_slots * (local + num_slots) + local + slot % num_slots
        place = torch.where(goes, at_slot, place)
        taken = taken | goes
        index, left = index - before, left - wanted
    return place.masked_fill(expert_ids < 0, -1)


def _most_clones(num_clones: Tensor, num_slots: int) -> int:
    """Return the most clones that any expert has; an upper limit while a graph is captured."""
    if num_slots == 0 or (num_clones.is_cuda and torch.cuda.is_current_stream_capturing()):
        return num_slots
    most: int = host_values.read(
        num_clones.max(), "clones of one expert", assumed=lambda: num_slots
    )
    return most


def reroute_tokens(
    routing_map: Tensor, probs: Tensor, plan: OffloadPlan, ep_rank: int
) -> tuple[Tensor, Tensor]:
    """Reroute the tokens of one source rank; differentiable with respect to ``probs``.

    Args:
        routing_map: Either the chosen experts, ``(T, k)`` int64, -1 for no choice, or for each
            token and expert whether it was chosen, ``(T, E)`` bool.
        probs: Weights in the same shape.
        plan: Plan from the counts of all ranks.
        ep_rank: Source rank of these tokens in the plan.

    Returns:
        Map and weights with places instead of experts: ``(T, k)`` ids and weights, or
        ``(T, R * (L + slots))`` bool and weights; weights without a copy are zero.

    Raises:
        ValueError: If shapes are inconsistent, or the plan was made for other counts.

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
        return reroute(routing_map, probs, _row_for(routing_map, plan, ep_rank))
    if routing_map.shape[1] != plan.num_experts:
        raise ValueError(
            f"routing_map has {routing_map.shape[1]} columns, but the plan is for "
            f"{plan.num_experts} experts"
        )
    experts = torch.arange(plan.num_experts, device=routing_map.device)
    ids = torch.where(routing_map, experts, -1)
    places, weights = reroute(ids, probs, _row_for(ids, plan, ep_rank))
    num_places = num_places_of(plan)
    # Missing choices are scattered into an additional last column, which is removed below.
    column = torch.where(places < 0, num_places, places)
    shape = (routing_map.shape[0], num_places + 1)
    rerouted_map = routing_map.new_zeros(shape).scatter(1, column, routing_map)
    rerouted_probs = probs.new_zeros(shape).scatter(1, column, weights)
    return rerouted_map[:, :num_places], rerouted_probs[:, :num_places]


def num_places_of(plan: OffloadPlan) -> int:
    """Count the home experts and spare slots of all ranks."""
    return plan.num_experts + plan.num_ranks * plan.num_spare_slots


def _row_for(expert_ids: Tensor, plan: OffloadPlan, ep_rank: int) -> SourceRow:
    if not 0 <= ep_rank < plan.num_ranks:
        raise ValueError(f"ep_rank is {ep_rank}; the plan has the ranks 0 to {plan.num_ranks - 1}")
    _, counts = sort_by_expert(expert_ids, plan.num_experts)
    return SourceRow(
        total=counts,
        first=torch.zeros_like(counts),
        slot_expert=torch.tensor(plan.slot_expert, device=counts.device),
        tokens=torch.tensor(plan.rerouted[ep_rank], device=counts.device),
    )


def _fits(expert_ids: Tensor, total: Tensor, *rest: Tensor) -> bool:
    """Return whether the GPU's kernel supports the sizes."""
    del rest
    limit: int = cuda_kernels().MAX_SORTED_EXPERTS
    return total.numel() <= limit and expert_ids.numel() < 2**31


def _fake(expert_ids: Tensor, *row: Tensor) -> Tensor:
    del row
    return torch.empty_like(expert_ids, memory_format=torch.contiguous_format)


_reroute = define_compiled(
    "reroute(Tensor expert_ids, Tensor total, Tensor first, Tensor slot_expert, Tensor tokens)"
    " -> Tensor",
    reference=reroute_ids_reference,
    cuda_fits=_fits,
    dtypes=(torch.int64,),
    fake=_fake,
)
