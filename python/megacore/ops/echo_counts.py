"""Counters of a layer with clones, each updated by one operation.

Shapes: R ranks, E experts, k spare slots per rank, P places: of each rank its home experts, then
its slots.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megacore.ops.register import define_compiled

_DTYPES = (torch.float64,)


@dataclass(kw_only=True)
class EchoCounts:
    """Sums over the plans of a layer since the last reset, on this rank.

    The sums are accumulated on the device, in the order of the attributes, which is that of
    ``cpp/include/megacore/moe/echo_counts.h``, and read together with the other counters of a step.

    Attributes:
        num_plans: Number of plans, one per forward pass.
        highest_before: Max load over ranks without the plan.
        highest_after: Max load over ranks with the plan.
        mean_load: Mean load over ranks.
        num_clones: Number of clones.
        num_moved: Copies of tokens computed by clones.
        bytes_sent: Bytes that this rank sent for clones: weights, in both passes, and gradients.
        plan_us: Planning time, microseconds.
    """

    num_plans: float = 0.0
    highest_before: float = 0.0
    highest_after: float = 0.0
    mean_load: float = 0.0
    num_clones: float = 0.0
    num_moved: float = 0.0
    bytes_sent: float = 0.0
    plan_us: float = 0.0

    @property
    def imbalance_before(self) -> float:
        """Max load over mean load without clones, over all plans."""
        return self.highest_before / self.mean_load if self.mean_load else 1.0

    @property
    def imbalance_after(self) -> float:
        """Max load over mean load with clones, over all plans."""
        return self.highest_after / self.mean_load if self.mean_load else 1.0

    def as_record(self) -> dict[str, float]:
        """Convert sums over all ranks to the fields of a layer in ``metrics.jsonl``.

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

    @classmethod
    def of_list(cls, values: list[float]) -> EchoCounts:
        """Build counts from sums in the order of the attributes, of one rank or of all."""
        return cls(**dict(zip(ECHO_SUMS, values, strict=True)))


ECHO_SUMS = tuple(each.name for each in fields(EchoCounts))
BYTES_SENT = ECHO_SUMS.index("bytes_sent")


def count_plan_(
    sums: Tensor,
    slot_expert: Tensor,
    load_before: Tensor,
    summary: Tensor,
    elapsed_ns: Tensor,
    copies_of_place: Tensor,
    num_experts: int,
) -> Tensor:
    """Add a plan to the sums, and count the copies of each expert wherever they went.

    Args:
        sums: ``(8,)``, float64, in the order of `EchoCounts`; changed.
        slot_expert: ``(R, k)``, int64; as the next three from
            :class:`megacore.moe.echo.device_plan.DevicePlan`.
        load_before: ``(R,)``, int64.
        summary: ``(6,)``, int64.
        elapsed_ns: ``(1,)``, int64.
        copies_of_place: ``(P,)``, int64.
        num_experts: E.

    Returns:
        Copies of each expert, ``(E,)`` int64.

    Example:
        >>> sums = torch.zeros(8, dtype=torch.float64)
        >>> count_plan_(sums, torch.tensor([[-1], [0]]), torch.tensor([6, 2]),
        ...             torch.tensor([4, 1, 4, 1, 1, 3]), torch.tensor([3000]),
        ...             torch.tensor([3, 0, 2, 3]), 2).tolist()
        [6, 2]
        >>> sums.tolist()
        [1.0, 6.0, 4.0, 4.0, 1.0, 3.0, 0.0, 3.0]
    """
    plan = slot_expert, load_before, summary, elapsed_ns
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
    load_before, summary, elapsed_ns, copies_of_place, num_experts = args
    num_ranks = slot_expert.shape[0]
    total = load_before.sum()
    added = {
        "num_plans": torch.ones_like(total),
        "highest_before": load_before.max(),
        "highest_after": summary[0],
        "mean_load": total.double() / num_ranks,
        "num_clones": summary[1],
        "num_moved": summary[5],
        "bytes_sent": torch.zeros_like(total),
        "plan_us": elapsed_ns[0].double() / 1e3,
    }
    sums.add_(torch.stack([added[name].double() for name in ECHO_SUMS]))
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


def _count_plan_fake(sums: Tensor, *args: Any) -> Tensor:
    del sums
    copies_of_place, num_experts = args[-2:]
    copies: Tensor = copies_of_place.new_empty(num_experts)
    return copies


def _count_held_fake(sums: Tensor, *args: Any) -> None:
    del sums, args


_count_plan_ = define_compiled(
    "count_plan_(Tensor(a!) sums, Tensor slot_expert, Tensor load_before, Tensor summary,"
    " Tensor elapsed_ns, Tensor copies_of_place, SymInt num_experts) -> Tensor",
    reference=_count_plan_reference,
    dtypes=_DTYPES,
    fake=_count_plan_fake,
)
_count_held_ = define_compiled(
    "count_held_(Tensor(a!) sums, Tensor slot_expert, SymInt first, SymInt end, SymInt num_bytes)"
    " -> ()",
    reference=_count_held_reference,
    dtypes=_DTYPES,
    fake=_count_held_fake,
)
