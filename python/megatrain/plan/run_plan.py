"""Static plan of a run on every rank, computed without starting the run.

The numbers are not estimates: layers, parameters, buffers and schedule are computed by the planners
that the ranks use. Parameters are counted on a model on torch's meta device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megacore.buffers import BufferPlan
from megacore.errors import ConfigError
from megacore.optim.param_group import group_of
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.param_info import ParamInfo
from megacore.pipeline import ActionKind, Program
from megatrain.config import ResolvedConfig, layers_of_stages, mtp_stage, stages_of_ranks
from megatrain.models.build import build_stages
from megatrain.plan.device import load_device
from megatrain.plan.graph_memory import GraphBytes, predict_graphs
from megatrain.plan.layout import make_topology, train_recompute, train_schedule
from megatrain.plan.routing import check_routing
from megatrain.plan.state import check_param_groups, local_numel, plan_state, rule_of


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """Plan of one rank; ranks of a pipeline position are equal except for shard padding.

    Attributes:
        pp_rank: Position on the pipeline axis.
        layers: Layers of each model chunk of the rank, half open.
        mtp_layers: Multi-token prediction layers of each model chunk.
        num_params: Parameters of the rank (after tensor parallelism).
        param_bytes: Parameter buffer, with padding.
        grad_bytes: Gradient buffer, with padding.
        optimizer_bytes: Moments, and main parameters unless the parameters are float32, of the
            rank's shard.
        bucket_numels: Elements of each gradient bucket, with padding, in the order of the backward
            pass.
        peak_in_flight: Largest number of microbatches in flight, counted per chunk.
        peak_kept: Largest number of those that keep all activations; the others are recomputed.
        busy_fraction: Fraction of a step's makespan in which the rank computes.
        graphs: Memory of the rank's CUDA graphs; ``None`` without graphs.
    """

    pp_rank: int
    layers: tuple[range, ...]
    mtp_layers: tuple[range, ...]
    num_params: int
    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    bucket_numels: tuple[int, ...]
    peak_in_flight: int
    peak_kept: int
    busy_fraction: float
    graphs: GraphBytes | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state."""
        return self.param_bytes + self.grad_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Plan of a whole run.

    Attributes:
        topology: Layout of the ranks.
        num_params: Parameters of the model, each counted once.
        num_active_params: Active parameters per token; fewer than ``num_params`` with experts.
        num_microbatches: Microbatches per data-parallel rank and step.
        bubble_fraction: Idle fraction of the pipeline ranks' time, if a backward pass takes twice
            as long as a forward pass and messages take no time.
        ranks: One entry per pipeline position.
    """

    topology: Topology
    num_params: int
    num_active_params: int
    num_microbatches: int
    bubble_fraction: float
    ranks: tuple[RankPlan, ...]


def plan_run(config: ResolvedConfig, world_size: int) -> RunPlan:
    """Plan a run of a resolved configuration.

    Raises:
        ValueError: If the layout, the layers or the schedule are invalid.
    """
    topology = make_topology(config.parallel, world_size)
    schedule = train_schedule(config, world_size)
    timeline = schedule.simulate()
    recompute = train_recompute(config.train)
    stages, further = layers_of_stages(config), mtp_stage(config)
    pp = config.parallel.pp
    infos_of = [_param_infos(config, mine) for mine in stages_of_ranks(config.pipeline, pp)]
    names = {info.name for infos in infos_of for info in infos}
    check_param_groups(config, names)
    ranks, num_params, num_idle = [], 0, 0
    for pp_rank, mine in enumerate(stages_of_ranks(config.pipeline, pp)):
        program = schedule.program(pp_rank, recompute=recompute)
        infos = infos_of[pp_rank]
        if pp_rank < pp // config.pipeline.copies:  # the other ranks hold the second copy
            own = [info for info in infos if not info.is_shared_copy]
            num_params += sum(math.prod(info.full_shape) for info in own)
            experts = sum(math.prod(info.full_shape) for info in own if info.expert)
            num_idle += experts - experts * config.moe.top_k // max(1, config.moe.num_experts)
        state = plan_state(config, world_size, infos)
        ranks.append(
            RankPlan(
                pp_rank=pp_rank,
                layers=tuple(stages[stage] for stage in mine),
                mtp_layers=tuple(
                    config.model.mtp_layers if stage == further else range(0) for stage in mine
                ),
                num_params=sum(local_numel(config.parallel, info) for info in infos),
                param_bytes=state.param_bytes,
                grad_bytes=state.grad_bytes,
                optimizer_bytes=state.optimizer_bytes,
                bucket_numels=tuple(
                    bucket.numel for _, plan in state.buffers for bucket in plan.buckets
                ),
                peak_in_flight=timeline.peak_in_flight[pp_rank],
                peak_kept=_peak_kept(program),
                graphs=(None if config.graphs.mode == "off" else predict_graphs(config, program)),
                busy_fraction=timeline.busy[pp_rank] / timeline.makespan,
            )
        )
    return RunPlan(
        topology=topology,
        num_params=num_params,
        num_active_params=num_params - num_idle,
        num_microbatches=config.num_microbatches(world_size),
        bubble_fraction=timeline.bubble_fraction,
        ranks=tuple(ranks),
    )


def _peak_kept(program: Program) -> int:
    """Count the largest number of microbatches with all activations at once."""
    dropped = {
        (action.stage, action.microbatch)
        for action in program.actions
        if action.kind == ActionKind.RECOMPUTE
    }
    held = most = 0
    for action in program.actions:
        if (action.stage, action.microbatch) in dropped:
            continue
        if action.kind == ActionKind.FORWARD:
            held += 1
            most = max(most, held)
        elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            held -= 1
    return most


def buffer_layouts(
    config: ResolvedConfig, world_size: int, *, shard: int | None = None
) -> list[str]:
    """Format the parameter layout of the buffers of each pipeline position.

    Args:
        config: Resolved configuration.
        world_size: Number of ranks.
        shard: List only the ranges of this shard of each buffer; ``None`` for all parameters.

    Raises:
        ConfigError: If no buffer has that many shards.
        ValueError: If the layout or the layers are invalid.
    """
    texts, most, rule_of_info = [], 0, rule_of(config.optimizer)
    has_rules = bool(config.optimizer.groups) or len(config.optimizer.rule().rules_by_kind()) > 1
    for pp_rank, mine in enumerate(stages_of_ranks(config.pipeline, config.parallel.pp)):
        infos = _param_infos(config, mine)
        state = plan_state(config, world_size, infos)
        for positions, plan in state.buffers:
            members = [infos[position] for position in positions]
            kind = "expert" if members[0].expert else "dense"
            rule = f" of {type(rule_of_info(members[0])).__name__}" if has_rules else ""
            partial = ", partial over tp" if members[0].sequence_parallel else ""
            head = (
                f"pp {pp_rank}, {kind} parameters{rule}{partial}: {plan.numel:,} elements, "
                f"{plan.shard_numel:,} on each of {plan.dp_size} ranks"
            )
            lines = _bucket_lines(members, plan)
            if shard is not None:
                lines = _shard_lines(members, plan, shard)
            texts.append("\n".join([head, *lines]))
            most = max(most, plan.dp_size)
        groups = config.param_groups()
        frozen = [info for info in infos if group_of(info.name, groups).frozen]
        if frozen and shard is None:
            numel = sum(local_numel(config.parallel, info) for info in frozen)
            head = f"pp {pp_rank}, frozen parameters: {numel:,} elements on each rank"
            texts.append("\n".join([head, *(f"    {info.name}" for info in frozen)]))
    if shard is not None and not 0 <= shard < most:
        raise ConfigError(f"--shard {shard}: {most} ranks share a buffer, 0 to {most - 1}")
    return texts


def _bucket_lines(members: list[ParamInfo], plan: BufferPlan) -> list[str]:
    lines = []
    for number, bucket in enumerate(plan.buckets):
        used = sum(end - start for start, end in map(plan.param_range, bucket.param_indices))
        lines.append(
            f"  bucket {number} [{bucket.start:,}, {bucket.end:,}), "
            f"{bucket.numel - used:,} of {bucket.numel:,} padding"
        )
        for index in bucket.param_indices:
            start, end = plan.param_range(index)
            lines.append(f"    [{start:,}, {end:,}) {members[index].name}")
    return lines


def _shard_lines(members: list[ParamInfo], plan: BufferPlan, shard: int) -> list[str]:
    pieces = plan.shard(shard) if 0 <= shard < plan.dp_size else []
    return [
        f"  rank {shard}: world [{piece.world_start:,}, {piece.world_end:,}) "
        f"bucket {piece.bucket} [{piece.bucket_start:,}, {piece.bucket_end:,}) "
        f"local [{piece.local_start:,}, {piece.local_end:,}) "
        f"param [{piece.param_start:,}, {piece.param_end:,}) {members[piece.param_index].name}"
        for piece in pieces
    ] or [f"  rank {shard} owns nothing but padding"]


def check_plan(config: ResolvedConfig, world_size: int) -> None:
    """Build layout, layer partition and schedule once, to detect errors before ranks start.

    Raises:
        ConfigError: With the message of the planner that failed, or an unknown calibration.
    """
    if config.run.calibration is not None:
        load_device(config.run.calibration)
    try:
        make_topology(config.parallel, world_size)
        layers_of_stages(config)
        train_schedule(config, world_size)
        if config.moe.num_experts > 0:
            check_routing(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _param_infos(config: ResolvedConfig, mine: list[int]) -> list[ParamInfo]:
    """List the parameter infos of one pipeline rank, in order, on the meta device."""
    chunks = build_stages(config, sorted(mine), ProcessGroups.single(), device="meta")
    return [info for chunk in chunks for info, _ in chunk.param_infos()]
