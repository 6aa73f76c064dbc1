"""Time of a training step: the schedule of stages, exchanges of gradients, the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megacore.pipeline import Costs, Schedule, Timeline
from megatrain.config.pipeline import schedule_info
from megatrain.plan.adapters import adapter_params
from megatrain.plan.cost import Cost, LayerCosts
from megatrain.plan.device import Device
from megatrain.plan.link import Link, link
from megatrain.plan.matrix_time import matrix_time
from megatrain.plan.schedules import cached_schedule, schedule_shape
from megatrain.plan.spec import ModelSpec, RunSpec


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted time of a step.

    Attributes:
        seconds: The whole step.
        parts: The same time by kind, on the busiest pipeline rank; ``bubble`` is what it waits.
        stages: Cost of one microbatch in each stage.
        schedule: The schedule that was simulated.
        costs: Its costs in seconds.
    """

    seconds: float
    parts: dict[str, float]
    stages: tuple[Cost, ...]
    schedule: Schedule
    costs: Costs

    def timeline(self) -> Timeline:
        """Simulate the schedule with these costs."""
        return self.schedule.simulate(self.costs)


def stage_layers(model: ModelSpec, spec: RunSpec, layers: LayerCosts) -> tuple[int, ...]:
    """Return the layers of each stage; unless they are given, the slowest stage is short.

    The embedding belongs to the first stage, layers for multi-token prediction and the output
    layer to the last one.
    """
    if spec.stages:
        return spec.stages
    num_stages = spec.pp * spec.chunks
    even, rest = divmod(model.num_layers, num_stages)
    if rest == 0 and not model.num_mtp_layers:
        return (even,) * num_stages
    weights = [layers.layer(i, is_first_stage=False).total for i in range(model.num_layers)]
    typical = max(weights)
    end = layers.head.total * (1 + model.num_mtp_layers) + model.num_mtp_layers * typical
    low, high = max(weights), sum(weights) + end
    for _ in range(24):
        limit = (low + high) / 2
        if _fill(weights, end, limit, num_stages) is None:
            low = limit
        else:
            high = limit
    counts = _fill(weights, end, high, num_stages)
    assert counts is not None
    return tuple(counts)


def _fill(weights: Sequence[float], end: float, limit: float, stages: int) -> list[int] | None:
    """Cut the layers into stages of at most ``limit``; the last one also holds ``end``."""
    counts, position = [0] * stages, len(weights)
    room = limit - end
    for stage in range(stages - 1, -1, -1):
        # An even share: taking as many as fit would leave the first stages empty.
        share = -(-position // (stage + 1))
        while position and counts[stage] < share and weights[position - 1] <= room * (1 + 1e-9):
            position -= 1
            room -= weights[position]
            counts[stage] += 1
        room = limit
    return counts if position == 0 and (end <= limit or stages == 1) else None


def stage_costs(
    model: ModelSpec, spec: RunSpec, layers: LayerCosts, counts: Sequence[int]
) -> list[Cost]:
    """Return the cost of one microbatch in each stage, with messages that are not hidden."""
    device, stages, first = layers.device, [], 0
    transfer = p2p_link(spec, device)
    num_bytes = 2 * layers.tokens * model.hidden_size / spec.tp
    message = num_bytes / transfer.bandwidth + transfer.latency if spec.pp > 1 else 0.0
    info = schedule_info(spec.schedule)
    splits_backward = spec.pairs == "split" or (info is not None and info.splits_backward)
    if spec.schedule_file is not None:
        splits_backward = spec.schedule_file.splits_backward
    for stage, count in enumerate(counts):
        cost = Cost()
        for index in range(first, first + count):
            cost.plus(layers.layer(index, is_first_stage=stage == 0))
        first += count
        if stage == 0:
            cost.plus(layers.embedding)
        if stage == len(counts) - 1:
            cost.plus(layers.head, 1 + model.num_mtp_layers)
            if splits_backward:
                cost.add("head", 0.0, 0.0, (1 + model.num_mtp_layers) * layers.logits_again)
            for index in range(model.num_layers, len(model.moe_layers)):
                cost.plus(layers.layer(index, is_first_stage=False))
        if spec.pp > 1 and "pp" not in spec.overlap:
            shown = device.exposed_pp * message
            cost.add("pp", shown, shown)
        stages.append(cost)
    return stages


def p2p_link(spec: RunSpec, device: Device) -> Link:
    """Describe the link between neighbours of a pipeline."""
    if spec.strides["pp"] < device.link_domain:
        return Link(
            2, 2, device.link_nvlink * device.link_nvlink_efficiency, device.link_nvlink_us * 1e-6
        )
    return Link(2, 1, device.link_nic * device.link_nic_efficiency, device.link_nic_us * 1e-6)


def step_time(
    model: ModelSpec, spec: RunSpec, device: Device, layers: LayerCosts | None = None
) -> StepTime:
    """Predict the time of a step by simulating its schedule."""
    layers = LayerCosts(model, spec, device) if layers is None else layers
    counts = stage_layers(model, spec, layers)
    stages = stage_costs(model, spec, layers, counts)
    schedule = cached_schedule(schedule_shape(spec, spec.microbatches))
    transfer = p2p_link(spec, device)
    send = 2 * layers.tokens * model.hidden_size / spec.tp / transfer.bandwidth + transfer.latency
    costs = Costs(
        forward=_chains([cost.forward for cost in stages], schedule),
        backward_input=_chains([cost.backward_input for cost in stages], schedule),
        backward_weight=_chains([cost.backward_weight for cost in stages], schedule),
        send=send if spec.pp > 1 else 0.0,
    )
    timeline = schedule.simulate(costs)
    busiest = max(range(spec.pp), key=timeline.busy.__getitem__)
    parts: defaultdict[str, float] = defaultdict(float)
    length = schedule.num_stages // schedule.num_chains
    for stage in schedule.stages(busiest):
        for kind, value in stages[stage % length].parts.items():
            parts[kind] += value * spec.microbatches / schedule.num_chains
    parts["bubble"] = timeline.makespan - timeline.busy[busiest]
    if 0 < device.peak_at_once < spec.gpus:
        shared = time_on_cores(timeline, spec.gpus / spec.pp / device.peak_at_once)
        parts["bubble"] += shared - timeline.makespan
    rank_stages = [stage % length for stage in schedule.stages(busiest)]
    for kind, value in per_step(model, spec, device, counts, stages, rank_stages).items():
        parts[kind] = value
    return StepTime(
        seconds=sum(parts.values()),
        parts=dict(parts),
        stages=tuple(stages),
        schedule=schedule,
        costs=costs,
    )


def time_on_cores(timeline: Timeline, share: float) -> float:
    """Return the makespan if ranks share cores: all that compute at a moment are equally slow.

    Args:
        timeline: Simulation with a core for each rank.
        share: Pipelines per core.
    """
    changes = [(event.start, 1) for event in timeline.events]
    changes += [(event.end, -1) for event in timeline.events]
    time = before = 0.0
    computing = 0
    for moment, change in sorted(changes):
        time += (moment - before) * max(1.0, computing * share)
        before = moment
        computing += change
    return time


def _chains(costs: list[float], schedule: Schedule) -> list[float]:
    return costs * schedule.num_chains


def stage_params(
    model: ModelSpec, spec: RunSpec, counts: Sequence[int], stage: int, *, trained: bool = False
) -> tuple[float, float]:
    """Return the weights of a stage on a rank: those of all tokens, and those of experts.

    Args:
        model: Shape of the model.
        spec: Layout.
        counts: Layers of each stage.
        stage: The stage.
        trained: Leave out frozen ones, and add adapters.
    """
    updates = spec.updates if trained else None
    dense = experts = 0.0
    matrix = model.padded_vocab_size * model.hidden_size / spec.tp
    by_kind = {
        moe: model.layer_params(moe, spec.tp, spec.ep * spec.etp) for moe in set(model.moe_layers)
    }
    for index in layers_of_stage(model, counts, stage):
        shared, own = by_kind[model.moe_layers[index]]
        part = None if updates is None else updates.layers[index]
        dense += shared * (1.0 if part is None else part.dense)
        experts += own * (1.0 if part is None else part.experts)
        if part is not None:
            more = adapter_params(part.adapters, spec)
            dense, experts = dense + more[0], experts + more[1]
    if stage == 0:
        dense += matrix * (1.0 if updates is None else updates.embedding.dense)
    if stage == len(counts) - 1:
        share = 1.0 if updates is None else updates.head.dense
        dense += model.hidden_size + model.num_mtp_layers * model.mtp_params
        if not model.tie_embeddings or len(counts) > 1:
            dense += matrix * share
    return dense, experts


def layers_of_stage(model: ModelSpec, counts: Sequence[int], stage: int) -> Sequence[int]:
    """Return the layers of a stage; those for multi-token prediction are on the last one."""
    first = sum(counts[:stage])
    is_last = stage == len(counts) - 1
    more = range(model.num_layers, len(model.moe_layers)) if is_last else range(0)
    return [*range(first, min(first + counts[stage], model.num_layers)), *more]


def per_step(
    model: ModelSpec,
    spec: RunSpec,
    device: Device,
    counts: Sequence[int],
    stages: Sequence[Cost],
    rank_stages: Sequence[int],
) -> dict[str, float]:
    """Return the times that a pipeline rank spends once per step, outside of its schedule."""
    sizes = [stage_params(model, spec, counts, stage, trained=True) for stage in rank_stages]
    dense, experts = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    groups = (
        (dense, link(device, spec.dp * spec.cp, min(spec.strides["cp"], spec.strides["dp"]))),
        (experts, link(device, spec.edp, spec.strides["edp"])),
    )
    backward = sum(stages[stage].total - stages[stage].forward for stage in rank_stages)
    forward = sum(stages[stage].forward for stage in rank_stages)
    if spec.zero == 3:
        busy = (forward + backward) * spec.microbatches
        exposed = _sharded_exchange(spec, device, groups, busy, sum(counts))
    else:
        scatter = sum(group.ring(size * spec.grad_bytes) for size, group in groups)
        gather = sum(group.ring(size * spec.param_bytes) for size, group in groups)
        if spec.zero == 0:
            gather = scatter  # an all-reduce scatters and gathers gradients
        hides_grads = not spec.overlap.isdisjoint({"dp", "grads"})
        hides_params = not spec.overlap.isdisjoint({"dp", "params"}) if spec.zero else hides_grads
        behind_grads, behind_params = backward, forward
        if spec.zero == 0:  # all of the all-reduce, during the backward pass
            behind_grads, behind_params = backward - gather, gather
        exposed = sum(
            max(device.exposed_dp * each, each - behind) if is_hidden else each
            for each, behind, is_hidden in (
                (scatter, behind_grads, hides_grads),
                (gather, behind_params, hides_params),
            )
        )
    owned = spec.owned(dense, experts)
    resident = owned if spec.zero == 3 else dense + experts
    # Weight, 16-bit copy and gradient, and the state: 32 bytes with AdamW.
    per_weight = 32 if spec.updates is None else 16 + 2 * spec.updates.bytes_per_weight
    traffic = owned * per_weight + resident * 2 * spec.grad_bytes
    bandwidth = device.peak_hbm * device.memory_bound_optimizer
    optimizer = traffic / bandwidth
    layers = [i for stage in rank_stages for i in layers_of_stage(model, counts, stage)]
    optimizer += matrix_time(spec, device, layers)
    return {
        "dp": exposed,
        "optimizer": optimizer,
        "host_step": device.host_step_ms * 1e-3,
    }


def _sharded_exchange(
    spec: RunSpec,
    device: Device,
    groups: Sequence[tuple[float, Link]],
    busy: float,
    num_layers: int,
) -> float:
    """Return the exposed time to gather weights twice and scatter gradients per microbatch."""
    times = spec.microbatches if spec.pp == 1 else 1
    total = 0.0
    for size, group in groups:
        if "dp" not in spec.overlap and group.inside < group.size:
            # Exchanges of one parameter after the other keep one network interface busy.
            group = replace(group, bandwidth=min(group.bandwidth, device.link_nic))
        gathers = 2 * group.ring(size * 2, num_layers)
        total += times * (gathers + group.ring(size * spec.grad_bytes, num_layers))
    if "dp" not in spec.overlap:
        return total
    return max(device.exposed_fsdp * total, total - 0.9 * busy)
