"""What one rank needs of a plan of clones, as nested lists to compare."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from megacore.moe import OffloadPlan
from megacore.moe.echo.device_plan import DevicePlan


def numbers_of(plan: DevicePlan) -> dict[str, Any]:
    """The tensors of a rank's plan, without the time."""
    tensors = {name: each for name, each in vars(plan).items() if isinstance(each, Tensor)}
    return {name: each.tolist() for name, each in tensors.items() if name != "elapsed_ns"}


def part_of_rank(plan: OffloadPlan, counts: Tensor, rank: int) -> dict[str, Any]:
    """The same numbers from the whole plan."""
    local = plan.num_experts // plan.num_ranks
    home = counts[:, rank * local : (rank + 1) * local].numpy().copy()
    for (holder, slot), expert in np.ndenumerate(plan.slot_expert):
        if expert >= 0 and expert // local == rank:
            home[:, expert % local] -= plan.rerouted[:, holder, slot]
    summary = [plan.max_load, plan.num_clones, plan.bound, plan.bound_holds, True]
    return {
        "slot_expert": plan.slot_expert.tolist(),
        "sent": plan.rerouted[rank].tolist(),
        "arriving": np.concatenate([home, plan.rerouted[:, rank]], axis=1).tolist(),
        "load_before": plan.load_before.tolist(),
        "load_after": plan.load_after.tolist(),
        "summary": [*map(int, summary), plan.num_moved_tokens],
    }
