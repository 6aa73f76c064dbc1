"""Counters of a layer with clones, each updated by one operation.

Shapes: R ranks, E experts, k spare slots per rank, P places: of each rank its home experts, then
its slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacore.ops.library import define_op, native

# Order of the sums: cpp/include/megacore/moe/echo_counts.h.
BYTES_SENT = 6
_DTYPES = (torch.float64,)


def count_plan_(
    sums: Tensor,
    slot_expert: Tensor,
    rerouted: Tensor,
    load_before: Tensor,
    summary: Tensor,
    elapsed_ns: Tensor,
    copies_of_place: Tensor,
    num_experts: int,
) -> Tensor:
    """Add a plan to the sums, and count the copies of each expert wherever they went.

    Args:
        sums: ``(8,)``, float64, changed: plans, highest load before and after, mean load, clones,
            copies moved, bytes sent, microseconds of planning.
        slot_expert: ``(R, k)``, int64; as the next four from
            :class:`megacore.moe.echo.device_plan.DevicePlan`.
        rerouted: ``(R, R, k)``, int64.
        load_before: ``(R,)``, int64.
        summary: ``(5,)``, int64.
        elapsed_ns: ``(1,)``, int64.
        copies_of_place: ``(P,)``, int64.
        num_experts: E.

    Returns:
        Copies of each expert, ``(E,)`` int64.

    Example:
        >>> sums = torch.zeros(8, dtype=torch.float64)
        >>> count_plan_(sums, torch.tensor([[-1], [0]]), torch.tensor([[[0], [2]], [[0], [1]]]),
        ...             torch.tensor([6, 2]), torch.tensor([4, 1, 4, 1, 1]), torch.tensor([3000]),
        ...             torch.tensor([3, 0, 2, 3]), 2).tolist()
        [6, 2]
        >>> sums.tolist()
        [1.0, 6.0, 4.0, 4.0, 1.0, 3.0, 0.0, 3.0]
    """
    plan = slot_expert, rerouted, load_before, summary, elapsed_ns
    result: Tensor = _count_plan_(sums, *plan, copies_of_place, num_experts)
    return result


def count_held_(sums: Tensor, slot_expert: Tensor, first: int, end: int, num_bytes: int) -> None:
    """Add ``num_bytes`` to the bytes sent for each slot whose expert is in ``[first, end)``.

    Example:
        >>> sums = torch.zeros(8, dtype=torch.float64)
        >>> count_held_(sums, torch.tensor([[-1, 3], [0, 2]]), 2, 4, 100)
        >>> sums[6].item()
        200.0
    """
    _count_held_(sums, slot_expert, first, end, num_bytes)


def _count_plan_reference(sums: Tensor, slot_expert: Tensor, *args: Any) -> Tensor:
    """Compute :func:`count_plan_` with torch operations, on any device."""
    rerouted, load_before, summary, elapsed_ns, copies_of_place, num_experts = args
    num_ranks = slot_expert.shape[0]
    total = load_before.sum()
    values = (
        torch.ones_like(total),
        load_before.max(),
        summary[0],
        total.double() / num_ranks,
        summary[1],
        rerouted.sum(),
        torch.zeros_like(total),
        elapsed_ns[0].double() / 1e3,
    )
    sums.add_(torch.stack([value.double() for value in values]))
    home = torch.arange(num_experts, device=sums.device).view(num_ranks, -1)
    slots = torch.where(slot_expert < 0, num_experts, slot_expert)
    # The last entry is for unused slots.
    copies = copies_of_place.new_zeros(num_experts + 1)
    copies.scatter_add_(0, torch.cat([home, slots], dim=1).flatten(), copies_of_place)
    result: Tensor = copies[:-1].clone()
    return result


def _count_held_reference(
    sums: Tensor, slot_expert: Tensor, first: int, end: int, num_bytes: int
) -> None:
    sums[BYTES_SENT] += ((slot_expert >= first) & (slot_expert < end)).sum() * num_bytes


def _count_plan(
    kernel: Callable[..., None], sums: Tensor, slot_expert: Tensor, *args: Any
) -> Tensor:
    rerouted, load_before, summary, elapsed_ns, copies_of_place, num_experts = args
    tensors = {
        "slot_expert": slot_expert.contiguous(),
        "rerouted": rerouted.contiguous(),
        "load_before": load_before.contiguous(),
        "summary": summary.contiguous(),
        "elapsed_ns": elapsed_ns,
        "copies_of_place": copies_of_place.contiguous(),
        "copies": copies_of_place.new_empty(num_experts),
    }
    num_ranks, num_slots = slot_expert.shape
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    sizes = {"num_ranks": num_ranks, "num_slots": num_slots, "num_experts": num_experts}
    kernel(sums=sums.data_ptr(), **addresses, **sizes)
    copies: Tensor = tensors["copies"]
    return copies


def _count_held(
    kernel: Callable[..., None],
    sums: Tensor,
    slot_expert: Tensor,
    first: int,
    end: int,
    num_bytes: int,
) -> None:
    slot_expert = slot_expert.contiguous()
    kernel(
        sums=sums.data_ptr(),
        slot_expert=slot_expert.data_ptr(),
        numel=slot_expert.numel(),
        first=first,
        end=end,
        num_bytes=num_bytes,
    )


def _count_plan_fake(sums: Tensor, *args: Any) -> Tensor:
    del sums
    copies_of_place, num_experts = args[-2:]
    copies: Tensor = copies_of_place.new_empty(num_experts)
    return copies


def _count_held_fake(sums: Tensor, *args: Any) -> None:
    del sums, args


_count_plan_ = define_op(
    "count_plan_(Tensor(a!) sums, Tensor slot_expert, Tensor rerouted, Tensor load_before,"
    " Tensor summary, Tensor elapsed_ns, Tensor copies_of_place, SymInt num_experts) -> Tensor",
    **native("count_plan", _count_plan, _count_plan_reference, dtypes=_DTYPES),
    fake=_count_plan_fake,
)
_count_held_ = define_op(
    "count_held_(Tensor(a!) sums, Tensor slot_expert, SymInt first, SymInt end, SymInt num_bytes)"
    " -> ()",
    **native("count_held", _count_held, _count_held_reference, dtypes=_DTYPES),
    fake=_count_held_fake,
)
