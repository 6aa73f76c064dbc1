"""Offload planning on the device of the counts, without host sync.

:func:`plan_offload_on_device` computes the plan of :func:`megacore.moe.plan_offload` from counts on
a GPU and leaves it on the GPU, for subsequent kernels on the same stream. It computes what one rank
needs: O(R) numbers, where the whole plan has O(R^2).

Shapes: R ranks, E experts, L = E / R home experts of a rank, k spare slots per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megacore import _core, host_values
from megacore.moe.echo.plan import plan_offload, require_options
from megacore.ops.cuda_module import cuda_kernels, device_facts
from megacore.ops.register import define_compiled, describe

# Entries of `DevicePlan.summary`, as PlanSummary of cpp/include/megacore/moe/plan_spec.h.
NUM_SUMMARY = 6
_IS_VALID = 4


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """Offload plan of one rank in tensors, all int64 and on the device of the counts.

    Attributes:
        planner: ``"balanced"`` or ``"echo"``.
        num_experts: E.
        slot_expert: The expert cloned into each slot, ``(R, k)``; -1 where a slot is unused.
        sent: Tokens of this rank that go to each slot, ``(R, k)``.
        arriving: Tokens that each rank sends to this rank's home experts and slots, ``(R, L + k)``.
        load_before: Tokens per rank without the plan, ``(R,)``.
        load_after: Tokens per rank with the plan, ``(R,)``.
        summary: ``(6,)``: the highest load, the number of clones, the bound of
            :class:`megacore.moe.OffloadPlan`, whether it holds, whether the counts were valid (1 or
            0), and the number of tokens computed by clones. A plan from invalid counts has no
            clones.
        elapsed_ns: Planning time, nanoseconds, ``(1,)``.
    """

    planner: str
    num_experts: int
    slot_expert: Tensor
    sent: Tensor
    arriving: Tensor
    load_before: Tensor
    load_after: Tensor
    summary: Tensor
    elapsed_ns: Tensor

    def read_slots(self) -> npt.NDArray[np.int64]:
        """Copy ``slot_expert`` to the host.

        Raises:
            ValueError: If the counts were invalid.

        Sync:
            Waits for the device.
        """
        slots = self.slot_expert
        numbers = torch.cat((slots.flatten(), self.summary))
        numbers = host_values.to_host(numbers, "plan of clones", assumed=self._assumed_numbers)
        if not numbers[slots.numel() + _IS_VALID]:
            raise ValueError(
                "the plan was made from invalid counts: one is negative, or an expert has more "
                "than 2^31 - 1 tokens"
            )
        return numbers[: slots.numel()].view(slots.shape).numpy()

    def _assumed_numbers(self) -> list[int]:
        """Return slots and summary for loads that fall from the first expert to the last one.

        Equal loads would need no clones.
        """
        num_ranks, num_slots = self.slot_expert.shape
        counts = [list(range(self.num_experts, 0, -1))] * num_ranks
        plan = plan_offload(counts, num_spare_slots=num_slots)
        return [*plan.slot_expert.flatten().tolist(), *[1] * NUM_SUMMARY]


def plan_offload_on_device(
    tokens_from_rank_to_expert: Tensor,
    *,
    rank: int,
    num_spare_slots: int,
    planner: Literal["balanced", "echo"] = "balanced",
    tolerance: float = _core.DEFAULT_TOLERANCE,
    min_imbalance: float = 1.0,
    domain_size: int | None = None,
) -> DevicePlan:
    """Plan on the device of the counts, for one rank; the plan is that of ``plan_offload``.

    Args:
        tokens_from_rank_to_expert: ``(R, E)``, int64; E a multiple of R.
        rank: Row of the rank that plans, in [0, R).
        num_spare_slots: k. On CUDA one block plans, if its shared memory is large enough for R, E
            and k: on an H100, 64 ranks, 512 experts and 16 slots fit.
        planner: As for ``plan_offload``, like the arguments below.
        tolerance: Allowed excess over the average with the balanced planner, as a fraction of it.
        min_imbalance: Make no clones while max load over mean load is at most this.
        domain_size: Size n of the domains ``[0, n), [n, 2n) ...`` of fast interconnect; balanced
            planner only.

    Returns:
        What ``rank`` needs of the plan, on the device of the counts.

    Raises:
        ValueError: If the counts have another shape or dtype, or an option is out of range. Where
            the CPU plans, also if a count is invalid.

    Sync:
        None on CUDA: one kernel on the current stream, which may be captured. Without CUDA kernels,
        or without the memory for them, CUDA tensors are copied to the CPU planner: a host sync.

    Example:
        >>> counts = torch.tensor([[30, 10], [50, 10]])
        >>> plan = plan_offload_on_device(counts, rank=1, num_spare_slots=1, tolerance=0.0)
        >>> plan.slot_expert.tolist(), plan.load_after.tolist(), plan.summary.tolist()
        ([[-1], [0]], [50, 50], [50, 1, 50, 1, 1, 30])
        >>> plan.sent.tolist(), plan.arriving.tolist()  # rank 1 serves its own tokens first
        ([[0], [30]], [[10, 0], [10, 30]])
    """
    counts = tokens_from_rank_to_expert
    require_options(planner, tolerance, min_imbalance, domain_size)
    if counts.dim() != 2 or counts.dtype != torch.int64:
        raise ValueError(f"the counts {describe(counts)} must be (R, E) int64")
    if num_spare_slots < 0:
        raise ValueError(f"num_spare_slots must be at least 0, got {num_spare_slots}")
    return DevicePlan(
        planner,
        counts.shape[1],
        *_plan_offload(
            counts,
            rank,
            num_spare_slots,
            planner == "balanced",
            round(tolerance * 1e6),
            round(min_imbalance * 1e6),
            domain_size or 0,
        ),
    )


def _plan_on_host(counts: Tensor, *options: int) -> tuple[Tensor, ...]:
    """Plan by the CPU's kernel, which is the reference of all others."""
    plan = torch.ops.megacore._plan_offload(counts.cpu(), *options)
    return tuple(each.to(counts.device) for each in plan)


def _cuda_fits(counts: Tensor, rank: int, num_spare_slots: int, *options: int) -> bool:
    """Return whether a block of the GPU has the memory for a plan."""
    del rank, options
    available = device_facts(counts.device).shared_bytes
    num_ranks, num_experts = counts.shape
    needed: int = cuda_kernels().plan_offload_bytes(
        num_ranks=num_ranks, num_experts=num_experts, num_spare_slots=num_spare_slots
    )
    return available is None or needed <= available


def _plan_fake(
    counts: Tensor, rank: int, num_spare_slots: int, *options: int
) -> tuple[Tensor, ...]:
    del rank, options
    num_ranks, num_experts = counts.shape
    return (
        counts.new_empty(num_ranks, num_spare_slots),
        counts.new_empty(num_ranks, num_spare_slots),
        counts.new_empty(num_ranks, num_experts // num_ranks + num_spare_slots),
        counts.new_empty(num_ranks),
        counts.new_empty(num_ranks),
        counts.new_empty(NUM_SUMMARY),
        counts.new_empty(1),
    )


_plan_offload = define_compiled(
    "plan_offload(Tensor counts, SymInt rank, SymInt num_spare_slots, bool is_balanced,"
    " int tolerance, int min_imbalance, int domain_size)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_plan_on_host,
    cuda_fits=_cuda_fits,
    dtypes=(torch.int64,),
    fake=_plan_fake,
)
