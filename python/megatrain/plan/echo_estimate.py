"""Predicted memory, traffic and load bound of expert clones in a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megacore.parallel import Topology
from megatrain.config import EchoConfig, ResolvedConfig
from megatrain.plan.spec_from_config import model_spec


@dataclass(frozen=True, kw_only=True)
class EchoEstimate:
    """Memory, traffic and load bound of each rank.

    Attributes:
        num_spare_slots: Slots of a rank, shared by all its layers.
        num_slot_sets: Sets of slots for weights: 2 if two microbatches are interleaved.
        slot_weight_bytes: Weights in all sets of slots of a rank.
        slot_grad_bytes: Gradients of one set, float32, shared by all sets.
        clone_traffic_bytes: Traffic of one clone in one microbatch: weights in both passes, and its
            gradient.
        mean_rows: Mean rows per rank and microbatch.
        guaranteed_rows: Bound of the rows of a rank for any routing; the size of a static buffer.
            With fewer slots than experts per rank, the smallest bound of any planner.
        guaranteed_factor: ``guaranteed_rows`` over the mean. Both are ``None`` for a planner
            without a bound.
        is_theorem: Whether the bound is proved: there is a slot for every expert of a rank.
        text: Summary for display.
    """

    num_spare_slots: int
    num_slot_sets: int
    slot_weight_bytes: int
    slot_grad_bytes: int
    clone_traffic_bytes: int
    mean_rows: float
    guaranteed_rows: int | None
    guaranteed_factor: float | None
    is_theorem: bool
    text: str


def estimate_echo(config: ResolvedConfig, topology: Topology) -> EchoEstimate:
    """Estimate what the clones of a resolved configuration need.

    Raises:
        ValueError: If the configuration has no spare slots, or no expert parallelism.
    """
    moe, echo, parallel = config.moe, config.moe.echo, config.parallel
    if echo.num_spare_slots == 0:
        raise ValueError("moe.echo.num_spare_slots = 0, so nothing is cloned; set it to 1 or more")
    if topology.ep == 1:
        raise ValueError("parallel.ep = 1, so there is no other rank to clone experts to; raise it")
    etp, local = parallel.etp, moe.num_experts // topology.ep
    numel = model_spec(config.model, moe).expert_params // etp
    width = 4 if config.train.dtype == "float32" else 2
    tokens = config.train.microbatch_size * config.model.seq_length // (parallel.cp * parallel.tp)
    mean = float(tokens * etp * moe.top_k)
    factor = echo.options().guaranteed_factor(local)
    planned = EchoEstimate(
        num_spare_slots=echo.num_spare_slots,
        num_slot_sets=config.num_slot_sets,
        slot_weight_bytes=config.num_slot_sets * echo.num_spare_slots * numel * width,
        slot_grad_bytes=echo.num_spare_slots * numel * 4,
        clone_traffic_bytes=numel * (2 * width + 4),
        mean_rows=mean,
        guaranteed_rows=None if factor is None else math.ceil(factor * mean - 1e-6),
        guaranteed_factor=factor,
        is_theorem=factor is not None and echo.num_spare_slots >= local,
        text="",
    )
    return replace(planned, text=_text(planned, echo, local))


def _text(planned: EchoEstimate, echo: EchoConfig, local: int) -> str:
    mib = 1 << 20
    times = f"{planned.guaranteed_factor or 0:.3f} times the mean of {planned.mean_rows:,.0f}"
    slots = "slot" if echo.num_spare_slots == 1 else "slots"
    in_turns = ", weights in two sets (overlap_moe)" if planned.num_slot_sets > 1 else ""
    lines = [
        f"{echo.num_spare_slots} spare {slots} per rank{in_turns}, {echo.planner} planner, "
        f"tolerance {echo.tolerance:.1%}; {local} experts per rank",
        f"slot memory per rank, shared by all layers: {planned.slot_weight_bytes / mib:.2f} MiB of "
        f"weights and {planned.slot_grad_bytes / mib:.2f} MiB of gradients",
        f"traffic of a clone in a microbatch: {planned.clone_traffic_bytes / mib:.2f} MiB, forward "
        "and backward",
    ]
    if planned.guaranteed_rows is None:
        lines.append(f"no bound: the {echo.planner} planner promises none")
    elif planned.is_theorem:
        lines.append(
            f"guaranteed: no rank computes more than {planned.guaranteed_rows:,} rows in a "
            f"microbatch, {times}"
        )
    else:
        lines.append(
            f"bound: {planned.guaranteed_rows:,} rows of a rank in a microbatch, {times}; the "
            f"worst router can force this much, and {local} slots would guarantee "
            f"{1 + echo.tolerance:.3f}"
        )
    return "\n".join(lines)
