"""Memory of a rank by kind: state, kept activations in flight, logits, buffers, overheads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megacore.pipeline import ActionKind
from megatrain.config.pipeline import SEARCHED
from megatrain.plan.adapters import WIDE, adapter_params, adding_bytes, kept_bytes
from megatrain.plan.device import Device
from megatrain.plan.matrix_time import matrix_bytes
from megatrain.plan.schedules import ScheduleShape, cached_schedule, schedule_shape
from megatrain.plan.spec import ModelSpec, RunSpec, loss_columns
from megatrain.plan.step_time import layers_of_stage, stage_params

GIB = float(1 << 30)
# Kinds of memory that is free outside of forward and backward passes.
_OF_PASSES = ("activations", "logits", "transient", "tp buffers")


def memory_unit(largest: float) -> tuple[str, int]:
    """Return name and bytes of the largest unit in which ``largest`` is at least 1 (or KiB).

    Example:
        >>> memory_unit(3 << 20), memory_unit(1000)
        (('MiB', 1048576), ('KiB', 1024))
    """
    units = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20))
    return next((unit for unit in units if largest >= unit[1]), ("KiB", 1 << 10))


def memory_text(num_bytes: float, *, sign: str = "") -> str:
    """Format bytes; with the sign ``"+"``, a difference.

    Example:
        >>> memory_text(1.5 * GIB), memory_text(-(3 << 20), sign="+"), memory_text(0)
        ('1.5 GiB', '-3.0 MiB', '0.0 KiB')
    """
    unit, size = memory_unit(abs(num_bytes))
    return f"{num_bytes / size:{sign}.1f} {unit}"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Predicted memory of the ranks at a pipeline position, in bytes.

    Attributes:
        pp_rank: Position on the pipeline axis.
        layers: Layers of each of its stages.
        parts: Bytes by kind, allocated by the program.
        outside: Bytes by kind outside of tensors: fragmentation, context, communicators.
    """

    pp_rank: int
    layers: tuple[int, ...]
    parts: dict[str, float]
    outside: dict[str, float]

    @property
    def allocated(self) -> float:
        """Bytes of tensors at the peak."""
        return sum(self.parts.values())

    @property
    def reserved(self) -> float:
        """Bytes of tensors with fragmentation."""
        return self.allocated + self.outside["fragmentation"]

    @property
    def total(self) -> float:
        """Bytes that the device must have."""
        return self.allocated + sum(self.outside.values())


def layer_bytes(model: ModelSpec, spec: RunSpec, moe: bool) -> tuple[float, float]:
    """Return the bytes per token that a layer keeps for its backward pass, and without recompute.

    Source: Korthikanti et al., arXiv:2205.05198, extended to grouped queries, latent attention,
    experts and 8-bit products.
    """
    wide, split = spec.width, spec.token_split
    saved = 1 if spec.is_fp8 else wide  # input of a matrix product
    h, t = model.hidden_size, spec.tp
    norm_inputs = 2 * wide * h / split
    keeps = spec.kept_inputs
    norm_outputs = keeps.qkv + (keeps.router if moe else keeps.up)
    norm_outputs *= saved * h / (1 if spec.plain_autograd else split)
    up, core, out = 0.0, 0.0, 0.0
    if model.mla.kv_rank:
        latent = wide * (2 * model.mla.q_rank + 2 * model.mla.kv_rank + model.mla.rope_head_dim)
        query, value = model.head_dims
        up = (2 * model.num_heads * query + model.num_heads * value) * wide / t
        core, out = latent, saved * model.num_heads * value / t
    else:
        core = wide * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim / t
        out = saved * model.num_heads * model.head_dim / t
    log_sums = 4 * model.num_heads / t
    scores = 5 * model.num_heads * model.seq_length / t if spec.attention == "unfused" else 0.0
    masks = h / split * 2 if spec.attention == "unfused" else 0.0
    if moe:
        copies = model.moe.top_k / spec.tp * spec.load(model.moe.num_experts)
        inner = 2 if model.moe.gated else 1
        experts = copies * (keeps.up * saved * h + wide * inner * model.expert_width)
        activation = keeps.down * copies * saved * model.expert_width
        permuted = copies * wide * h if spec.keeps_permuted else 0.0
        shared_inner = 2 * wide if model.gated else wide
        shared = (shared_inner + saved) * model.moe.shared_ffn_hidden_size / t
        mlp = experts + permuted + shared
    else:
        mlp = (2 * wide if model.gated else wide) * model.ffn_hidden_size / t
        activation = keeps.down * saved * model.ffn_hidden_size / t
    gathered, passing = context_bytes(model, spec)
    kept = norm_inputs + norm_outputs + core + up + out + log_sums + scores + masks
    kept += mlp + activation + gathered
    whole = kept + passing
    recompute = spec.recompute
    if "layer" in recompute:
        return wide * h / split, whole
    if "products" in recompute:
        return 0.55 * kept, whole
    if "attention" in recompute:  # with the output projection, whose input is not kept
        kept -= scores + out + log_sums + gathered
    elif "scores" in recompute:
        kept -= scores
    if "norm" in recompute:
        kept -= norm_outputs
    if ("moe" if moe else "mlp") in recompute:
        kept -= mlp + activation
    elif recompute & ({"expert_activation"} if moe else {"activation"}):
        kept -= activation
    if "kv_up" in recompute:
        kept -= up
    return kept, whole


def context_bytes(model: ModelSpec, spec: RunSpec) -> tuple[float, float]:
    """Return the bytes per token of other ranks' keys and values that attention keeps and passes.

    Gathered ones are those of the whole sequence, kept for the backward pass. A ring has two blocks
    in flight, and in the backward pass their gradients in float32.
    """
    if spec.cp == 1:
        return 0.0, 0.0
    wide = spec.width
    queries, values = model.head_dims
    kv_heads = model.num_heads if model.mla.kv_rank else model.num_kv_heads
    width = kv_heads * (queries + values) / spec.tp
    if spec.cp_comm == "ring":
        return 0.0, (2 * wide + 2 * 4) * width
    if spec.cp_comm == "a2a":
        return 0.0, wide * width
    if model.mla.kv_rank:
        width += model.mla.kv_rank + model.mla.rope_head_dim
    return (spec.cp - 1) * wide * width, 0.0


def mlp_width(model: ModelSpec, spec: RunSpec) -> float:
    """Return the inner width of an MLP or of the experts of a token on a rank."""
    experts = model.moe.top_k * model.expert_width + model.moe.shared_ffn_hidden_size
    return max(experts if any(model.moe_layers) else 0, model.ffn_hidden_size) / spec.tp


def passing_bytes(model: ModelSpec, spec: RunSpec, moe: bool) -> float:
    """Return the bytes per token that the backward pass of a layer takes beside what it keeps.

    The layer's recomputed activations, and the gradients inside of its MLP: of the output, and of
    the input of the activation; that of its output takes the place of the output itself.
    """
    kept, whole = layer_bytes(model, spec, moe)
    rows = 1 + (model.moe.top_k / spec.tp * spec.load(model.moe.num_experts) if moe else 0)
    gated = model.moe.gated if moe else model.gated
    inner = (2 if gated else 1) * mlp_width(model, spec)
    return whole - kept + spec.width * (rows * model.hidden_size + inner)


def pending_bytes(model: ModelSpec, spec: RunSpec, moe: bool) -> float:
    """Return the bytes per token of output gradients that a layer keeps between I and W.

    They are those of weights that are trained or have adapters.
    """
    keeps = spec.kept_inputs
    inner = keeps.qkv * sum(n / (spec.tp if split else 1) for n, _, split in model.qkv_matrices)
    if moe:
        copies = model.moe.top_k / spec.tp * spec.load(model.moe.num_experts)
        up, down = (2 if model.moe.gated else 1) * model.expert_width, model.hidden_size
        shared = (2 if model.gated else 1) * model.moe.shared_ffn_hidden_size / spec.tp
        inner += copies * (keeps.up * up + keeps.down * down) + keeps.up * shared
    else:
        inner += keeps.up * (2 if model.gated else 1) * model.ffn_hidden_size / spec.tp
    return spec.width * (inner + (keeps.out + keeps.down) * model.hidden_size)


def head_bytes(model: ModelSpec, spec: RunSpec) -> tuple[float, float]:
    """Return the bytes per token that the loss keeps, and those at its peak with the logits."""
    columns = model.padded_vocab_size / spec.tp
    block = loss_columns(model, spec)
    if block is not None:
        # The sum of exponentials and the labels; at the peak also the gradients of both inputs,
        # but that of the weight where products add it to a wider buffer.
        logits = 4 if spec.precision == "fp32" else 6
        tokens = spec.microbatch * model.seq_length / spec.cp
        weight = spec.width * columns * model.hidden_size / tokens
        if spec.width < spec.grad_bytes:
            weight = 0.0
        return 12, 12 + logits * block + 4 * model.hidden_size + weight
    peak = {"fused": 4, "unfused": 10, "eager": 14}[spec.loss]
    if spec.precision == "fp32" and spec.loss == "unfused":
        peak = 8  # the logits are not copied to float32
    return 4 * columns, peak * columns


def slot_bytes(model: ModelSpec, spec: RunSpec) -> float:
    """Return the bytes of a rank's slots for clones, shared by its layers.

    Weights once per microbatch that can be inside layers at the same time, and float32 gradients,
    unless the experts are frozen.
    """
    sets = 2 if "ep" in spec.overlap else 1
    numel = model.expert_params / spec.etp
    is_trained = spec.updates is None or any(part.experts for part in spec.updates.layers)
    return spec.slots * numel * (sets * spec.param_bytes + 4 * is_trained)


def footprints(
    model: ModelSpec,
    spec: RunSpec,
    device: Device,
    counts: Sequence[int],
    state: Sequence[Mapping[str, float]] | None = None,
) -> list[Footprint]:
    """Predict the memory of the ranks of each pipeline position.

    Args:
        model: Shape of the model.
        spec: Layout.
        device: Calibration.
        counts: Layers of each stage.
        state: Exact bytes of weights, gradients and optimizer state of each pipeline rank.
            Default: computed from the number of weights, without padding.
    """
    tokens = spec.microbatch * model.seq_length / spec.cp
    by_kind = {moe: layer_bytes(model, spec, moe) for moe in set(model.moe_layers)}
    by_layer = [
        tokens * by_kind[moe][0] + kept_by_adapters(model, spec, index, tokens)
        for index, moe in enumerate(model.moe_layers)
    ]
    kept = _by_stage(counts, model, by_layer)
    offload = max(0.0, 1 - spec.offload_layers / max(1, model.num_layers / spec.pp))
    kept = [each * offload for each in kept]
    kept[-1] += tokens * 4 * model.hidden_size / spec.token_split
    working = tokens * max(whole for _, whole in by_kind.values())
    if "layer" in spec.recompute:  # the recomputed layer and the gradients inside of its MLP
        working += tokens * 3 * spec.width * mlp_width(model, spec)
    # Elsewhere fewer bytes than with the output layer, where its gradients wait beside a layer's.
    passing = working
    if spec.plain_autograd:
        passing = min(working, tokens * max(passing_bytes(model, spec, moe) for moe in by_kind))
    if spec.updates is not None:
        adding = (adding_bytes(part.adapters, spec) for part in spec.updates.layers)
        passing = max(passing, tokens * max(adding))
    kept_by_loss, logits = (tokens * each for each in head_bytes(model, spec))
    kept[-1] += kept_by_loss
    pending = [0.0] * len(counts)
    if spec.plain_autograd:
        gradients = {moe: tokens * pending_bytes(model, spec, moe) for moe in by_kind}
        pending = _by_stage(counts, model, [gradients[moe] for moe in model.moe_layers])
        if spec.updates is None or spec.updates.head.is_trained:
            pending[-1] += kept_by_loss
    peaks = in_flight(spec, kept, pending)
    found = []
    stages_of = rank_stages(spec)
    for rank in range(spec.pp):
        mine = stages_of[rank]
        parts = dict(_state(model, spec, counts, mine) if state is None else state[rank])
        is_last = len(counts) - 1 in mine
        # Of the loss of one microbatch, all is counted as logits.
        parts["activations"] = peaks[rank] - (kept_by_loss if is_last else 0.0)
        parts["logits"] = max(0.0, logits - working) if is_last else 0.0
        parts["transient"] = working if is_last else passing
        if spec.plain_autograd and 0 in mine:
            # The embedding's gradient is made when the activations of its stage are gone.
            words = spec.param_bytes * model.padded_vocab_size * model.hidden_size / spec.tp
            parts["transient"] = max(parts["transient"], words - kept[0])
        if spec.tp > 1:  # gathered input, its gradient and the output before it is scattered
            parts["tp buffers"] = 3 * 2 * tokens * model.hidden_size
        if spec.slots:
            parts["slots of clones"] = slot_bytes(model, spec)
        layers = [i for stage in mine for i in layers_of_stage(model, counts, stage)]
        passes = sum(parts.get(kind, 0.0) for kind in _OF_PASSES)
        # The step of whole matrices runs when the activations are gone.
        parts["optimizer step"] = max(0.0, matrix_bytes(spec, layers) - passes)
        parts["workspace"] = device.memory_workspace * sum(parts.values())
        found.append(
            Footprint(
                pp_rank=rank,
                layers=tuple(counts[stage] for stage in mine),
                parts=parts,
                outside={
                    "fragmentation": device.memory_fragmentation * sum(parts.values()),
                    "context": device.memory_context_gib * GIB,
                    "communicators": device.memory_comm_gib * GIB * _communicators(spec),
                },
            )
        )
    return found


def _communicators(spec: RunSpec) -> int:
    return sum(size > 2 for size in (spec.tp, spec.cp, spec.dp, spec.ep, spec.pp))


def rank_stages(spec: RunSpec) -> list[list[int]]:
    """Return the stages of each pipeline rank."""
    schedule = cached_schedule(schedule_shape(spec, spec.microbatches))
    length = schedule.num_stages // schedule.num_chains
    return [[stage % length for stage in schedule.stages(rank)] for rank in range(spec.pp)]


def _state(
    model: ModelSpec, spec: RunSpec, counts: Sequence[int], mine: Sequence[int]
) -> dict[str, float]:
    sizes = [stage_params(model, spec, counts, stage) for stage in mine]
    both = sum(map(sum, sizes))
    sizes = [stage_params(model, spec, counts, stage, trained=True) for stage in mine]
    dense, experts = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    owned = spec.owned(dense, experts)
    layers = [index for stage in mine for index in layers_of_stage(model, counts, stage)]
    adapters = 0.0
    if spec.updates is not None:
        adapters = sum(
            sum(adapter_params(spec.updates.layers[index].adapters, spec)) for index in layers
        )
    if spec.zero < 3:
        return {
            "weights": spec.param_bytes * both + WIDE * adapters,
            "gradients": spec.grad_bytes * (dense + experts),
            "optimizer": spec.state_bytes * owned,
        }
    layer = sum(model.layer_params(any(model.moe_layers), spec.tp, spec.ep * spec.etp))
    words = model.padded_vocab_size * model.hidden_size / spec.tp
    unsharded = both if spec.pp > 1 else 2 * layer + words
    return {
        "weights": 4 * owned + 2 * unsharded,
        "gradients": 4 * owned + (4 * unsharded if spec.pp > 1 else 0.0),
        "optimizer": 8 * owned,
    }


def kept_by_adapters(model: ModelSpec, spec: RunSpec, layer: int, tokens: float) -> float:
    """Return the bytes that the adapters of a layer keep for its backward pass."""
    if spec.updates is None or "layer" in spec.recompute:
        return 0.0
    per_token, factors = kept_bytes(spec.updates.layers[layer].adapters, model, spec)
    return tokens * per_token + factors


def _by_stage(counts: Sequence[int], model: ModelSpec, by_layer: Sequence[float]) -> list[float]:
    """Sum a number over the layers of each stage; prediction layers are on the last one."""
    sums, first = [], 0
    for count in counts:
        sums.append(sum(by_layer[first : first + count]))
        first += count
    sums[-1] += sum(by_layer[model.num_layers :])
    return sums


def in_flight(spec: RunSpec, kept: Sequence[float], pending: Sequence[float]) -> list[float]:
    """Return the largest sum of kept activations on each pipeline rank over a step.

    Args:
        spec: Layout.
        kept: Bytes of each stage and microbatch from F to B or W.
        pending: Further bytes from I to W.
    """
    by_rank = _held(schedule_shape(spec, _enough(spec)))
    stages = rank_stages(spec)
    return [
        max(
            sum(
                held * kept[stage] + waiting * pending[stage]
                for (held, waiting), stage in zip(state, mine, strict=True)
            )
            for state in by_rank[rank]
        )
        for rank, mine in enumerate(stages)
    ]


def _enough(spec: RunSpec) -> int:
    """Return a number of microbatches that reaches the peaks of the schedule.

    A few whole groups, if more of them raise no peak; all, if peaks grow with the number of
    microbatches, or if a schedule of another number does not exist or is slow to find.
    """
    group = spec.group_size or 1
    few, more = (-(-times * max(spec.pp, group) // group) * group for times in (3, 5))
    if more > spec.microbatches or spec.schedule == SEARCHED or spec.schedule_file is not None:
        return spec.microbatches
    peaks = [_peaks(schedule_shape(spec, count)) for count in (few, more)]
    return few if peaks[0] == peaks[1] else spec.microbatches


@lru_cache(maxsize=512)
def _peaks(shape: ScheduleShape) -> list[int]:
    """Return the most activations that each rank holds."""
    return [max(sum(held for held, _ in state) for state in peaks) for peaks in _held(shape)]


_Held = tuple[tuple[int, int], ...]


@lru_cache(maxsize=512)
def _held(shape: ScheduleShape) -> list[set[_Held]]:
    """Return what each rank holds at its local peaks.

    For each of its stages: microbatches between F and the end of their backward pass, and those of
    them between I and W.
    """
    schedule = cached_schedule(shape)
    found = []
    for rank in range(shape.num_ranks):
        position = {stage: index for index, stage in enumerate(schedule.stages(rank))}
        held = [[0, 0] for _ in position]
        peaks: set[_Held] = set()
        rising = False
        for action in schedule.actions(rank):
            mine = held[position[action.stage]]
            if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT):
                mine[action.kind == ActionKind.BACKWARD_INPUT] += 1
                rising = True
                continue
            if rising:
                peaks.add(tuple((a, b) for a, b in held))
            mine[0] -= 1
            mine[1] -= action.kind == ActionKind.BACKWARD_WEIGHT
            rising = False
        found.append(peaks)
    return found
