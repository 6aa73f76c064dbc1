"""Search for the best layouts of a model on a number of devices.

Thousands of layouts are priced by closed forms of their schedules; the best are then simulated
exactly. Layouts that do not fit the memory are never ranked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from megatrain.plan.adapters import WIDE, adapter_params
from megatrain.plan.cost import Cost, LayerCosts
from megatrain.plan.device import Device
from megatrain.plan.footprint import (
    GIB,
    head_bytes,
    kept_by_adapters,
    layer_bytes,
    slot_bytes,
)
from megatrain.plan.forecast import TIGHT, Forecast, forecast
from megatrain.plan.spec import ModelSpec, RunSpec
from megatrain.plan.step_time import p2p_link, per_step

_RECOMPUTE = ("", "norm,activation", "norm,attention,activation", "mlp", "norm,mlp", "layer")
_RECOMPUTE_MOE = ("", "norm", "norm,attention,activation", "moe", "norm,mlp,moe", "layer")
# Uneven stages are tried if the busiest rank has at most this many times the mean work.
_UNEVEN = 1.25
# Layouts that are simulated of those with equal numbers but other chunks and schedules.
_ALIKE = 5
# Bubble in units of (pp - 1) times: forward and backward, minus this many weight gradients, over
# the chunks; and microbatches in flight on the first rank in units of the whole rank, plus a share.
_SCHEDULES = {
    "1f1b": (0, 1.0),
    "interleaved_1f1b": (0, 1.0),
    "zb_h1": (2, 1.0),
    "zb_h2": (3, 2.0),
    "zb_v": (2, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Best layouts.

    Attributes:
        tried: Number of layouts that were priced.
        fitting: Number of those that fit.
        simulated: Number of those that were simulated exactly.
        best: Predictions that fit, fastest first.
    """

    tried: int
    fitting: int
    simulated: int
    best: tuple[Forecast, ...]


def fastest_by_memory(found: Sequence[Forecast]) -> list[Forecast]:
    """Return the predictions of which no other one is both faster and smaller.

    Args:
        found: Predictions, fastest first.
    """
    front: list[Forecast] = []
    for each in found:
        if not front or each.fullest.total < front[-1].fullest.total:
            front.append(each)
    return front


def search(model: ModelSpec, base: RunSpec, device: Device, *, simulate: int = 200) -> SearchResult:
    """Find the fastest layouts that fit.

    Args:
        model: Shape of the model.
        base: Number of devices, batch and all choices that are not searched.
        device: Calibration.
        simulate: How many of the best layouts are simulated exactly.
    """
    tried, fitting = 0, []
    capacity = (1 - TIGHT) * device.peak_memory_gib * GIB
    for spec, costs in _layer_setups(model, base, device):
        pricer = _Pricer(model, spec, device, costs)
        for each in _pipelines(model, spec, pricer.ends):
            tried += 1
            seconds, num_bytes = pricer.price(each)
            if num_bytes <= capacity:
                fitting.append((seconds, tried, each))
    fitting.sort(key=lambda item: item[:2])
    found = []
    for spec in islice(_varied(each for *_, each in fitting), simulate):
        try:
            found.append(forecast(model, spec, device))
        except ValueError:
            continue
    best = sorted((each for each in found if each.verdict == "fits"), key=lambda f: f.step.seconds)
    return SearchResult(tried=tried, fitting=len(fitting), simulated=len(found), best=tuple(best))


def _varied(specs: Iterable[RunSpec]) -> Iterator[RunSpec]:
    """Yield layouts in order, at most a few that differ only in chunks and schedule.

    The closed forms hardly differ between these, so they would leave no room for other layouts. The
    first layout of each schedule is always among them.
    """
    count: Counter[RunSpec] = Counter()
    for spec in specs:
        same_schedule = replace(spec, chunks=1)
        key = replace(same_schedule, schedule="")
        count.update((same_schedule, key))
        if count[key] <= _ALIKE or count[same_schedule] == 1:
            yield spec


def _powers(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2


def _layer_setups(
    model: ModelSpec, base: RunSpec, device: Device
) -> Iterator[tuple[RunSpec, LayerCosts]]:
    """Yield the layouts of layers with their costs; the pipeline is left at one stage."""
    moe = any(model.moe_layers)
    recomputes = [
        frozenset(filter(None, text.split(","))) for text in (_RECOMPUTE_MOE if moe else _RECOMPUTE)
    ]
    for tp in _powers(min(device.link_domain, base.gpus)):
        heads = (model.num_heads, model.num_kv_heads)
        if any(size % tp for size in (*heads, model.ffn_hidden_size, model.padded_vocab_size)):
            continue
        for cp in _powers(max(1, model.seq_length // 4096)):
            if base.gpus % (tp * cp):
                continue
            for (ep, etp), microbatch, parts in product(
                _expert_axes(model, base, tp), (1, 2, 4, 8), recomputes
            ):
                if base.global_batch % microbatch:
                    continue
                given = base.overlap - {"grads", "params"}
                overlaps = [given | {"dp"}]
                if ep > 1 and not parts & {"moe", "layer"}:
                    overlaps.append(given | {"dp", "ep"})
                for overlap in overlaps:
                    spec = replace(
                        base,
                        tp=tp,
                        sequence_parallel=tp > 1,
                        cp=cp,
                        pp=1,
                        chunks=1,
                        ep=ep,
                        etp=etp,
                        microbatch=microbatch,
                        recompute=parts,
                        recompute_keep=0,
                        overlap=overlap,
                        zero=1,
                        schedule="1f1b",
                        stages=(),
                        group_size=None,
                        memory_limit=None,
                        pairs="whole" if "ep" in overlap else None,
                    )
                    yield spec, LayerCosts(model, spec, device)


def _expert_axes(model: ModelSpec, base: RunSpec, tp: int) -> Iterable[tuple[int, int]]:
    if not any(model.moe_layers):
        return [(1, 1)]
    sizes = [
        ep
        for ep in range(1, min(model.moe.num_experts, base.gpus) + 1)
        if model.moe.num_experts % ep == 0 and ep % (base.echo.domain_size or 1) == 0
    ]
    return [
        (ep, etp)
        for ep in sizes
        for etp in sorted({1, tp})
        if base.gpus % (ep * etp) == 0 and model.expert_width % etp == 0
    ]


def busiest_rank(layers: int, ends: float, pp: int, chunks: int) -> float:
    """Return the work of the busiest pipeline rank, in layers, if stages need not be equal.

    Args:
        layers: Layers of the model.
        ends: Work after the last layer, in layers: output layer, loss, multi-token prediction.
        pp: Pipeline ranks.
        chunks: Stages of a rank.

    Example:
        >>> busiest_rank(61, 4.0, pp=16, chunks=1)  # 15 stages of 4 layers hold 60 of 61
        5
        >>> busiest_rank(61, 4.0, pp=8, chunks=4)  # 3 stages of 1 layer and the last one
        8
    """
    stages = pp * chunks
    longest = -(-layers // stages)
    while (stages - 1) * longest + max(0, int(longest - ends)) < layers:
        longest += 1
    return max(-(-layers // pp), (chunks - 1) * (layers // stages) + max(longest, ends))


def _pipelines(model: ModelSpec, spec: RunSpec, ends: float) -> Iterator[RunSpec]:
    """Yield the pipelines of a layout of layers: sizes, chunks and schedules.

    Args:
        model: Shape of the model.
        spec: Layout of layers, with one pipeline stage.
        ends: Work after the last layer, in layers.
    """
    rest = spec.gpus // (spec.tp * spec.cp)
    for pp in range(1, min(rest, model.num_layers) + 1):
        dp = rest // pp
        if rest % pp or spec.global_batch % (dp * spec.microbatch):
            continue
        if spec.gpus // pp % (spec.ep * spec.etp):
            continue
        microbatches = spec.global_batch // (dp * spec.microbatch)
        if pp == 1:
            if "ep" not in spec.overlap:
                yield spec
            continue
        for chunks in range(1, 13):
            stages = pp * chunks
            if stages > model.num_layers:
                continue
            even = any((model.num_layers + extra) % stages == 0 for extra in (0, 1, 2))
            rank = busiest_rank(model.num_layers, ends, pp, chunks)
            if not even and rank * pp > _UNEVEN * (model.num_layers + ends):
                continue
            if chunks == 1:
                names: tuple[str, ...] = (
                    ("1f1b",) if "ep" in spec.overlap else ("1f1b", "zb_h1", "zb_h2")
                )
            elif microbatches >= pp:
                names = ("interleaved_1f1b",)
                if chunks == 2 and "ep" not in spec.overlap:
                    names += ("zb_v",)
            else:
                continue
            for name in names:
                yield replace(spec, pp=pp, chunks=chunks, schedule=name)


class _Pricer:
    """Closed-form time and memory of all pipelines of one layout of layers."""

    def __init__(self, model: ModelSpec, spec: RunSpec, device: Device, costs: LayerCosts) -> None:
        self.model, self.device, self.costs = model, device, costs
        # Share of the layers with and without experts.
        count = Counter(model.moe_layers)
        self.share = {moe: number / count.total() for moe, number in count.items()}
        mean, layers_in_all = Cost(), len(model.moe_layers)
        for index in range(layers_in_all):
            mean.plus(costs.layer(index, is_first_stage=False), 1 / layers_in_all)
        self.mean = mean
        depths = model.num_mtp_layers
        self.ends = costs.head.total * (1 + depths) / mean.total + depths
        tokens = spec.microbatch * model.seq_length / spec.cp
        layers = {moe: layer_bytes(model, spec, moe) for moe in self.share}
        self.kept = tokens * sum(layers[moe][0] * share for moe, share in self.share.items())
        # Of adapters, the mean of a layer.
        adapters = [] if spec.updates is None else [each.adapters for each in spec.updates.layers]
        sizes = [adapter_params(each, spec) for each in adapters]
        self.dense_adapters, self.expert_adapters = (
            sum(size[at] for size in sizes) / layers_in_all for at in (0, 1)
        )
        of_adapters = sum(kept_by_adapters(model, spec, i, tokens) for i in range(layers_in_all))
        self.kept += of_adapters / layers_in_all
        self.working = tokens * max(whole for _, whole in layers.values())
        self.logits = tokens * head_bytes(model, spec)[1]
        if spec.tp > 1:
            self.working += 6 * tokens * model.hidden_size
        self.slots = slot_bytes(model, spec)

    def price(self, spec: RunSpec) -> tuple[float, float]:
        """Return seconds and bytes of a step."""
        model, device, mean = self.model, self.device, self.mean
        pp, m = spec.pp, spec.microbatches
        layers = model.num_layers / pp
        if model.num_layers % (pp * spec.chunks) or (model.num_mtp_layers and pp > 1):
            busiest = busiest_rank(model.num_layers, self.ends, pp, spec.chunks) * mean.total
        else:
            busiest = (layers + self.ends) * mean.total
        forward, total = layers * mean.forward, layers * mean.total
        if pp > 1:
            transfer = p2p_link(spec, device)
            once = 2 * self.costs.tokens * model.hidden_size / spec.tp / transfer.bandwidth
            once += transfer.latency
            if "pp" not in spec.overlap:
                busiest += 2 * device.exposed_pp * once * spec.chunks
                total += 2 * device.exposed_pp * once * spec.chunks
        fewer, held = _SCHEDULES[spec.schedule]
        bubble = (pp - 1) * (total - fewer * layers * mean.backward_weight) / spec.chunks
        counts = [max(1, round(model.num_layers / pp))] * pp
        stage = Cost()
        stage.add("layers", forward, total - forward)
        once_per_step = per_step(model, spec, device, counts, [stage] * pp, [0])
        seconds = m * busiest + max(0.0, bubble) + sum(once_per_step.values())
        flight = min(m, held * pp - (held - 1)) if pp > 1 else 1.0
        if spec.chunks > 1 and spec.schedule == "interleaved_1f1b":
            more = 1 / spec.chunks if spec.pairs else 0
            flight = min(m, pp * (1 + (pp - 1) / (pp * spec.chunks)) + more)
        elif spec.pairs:
            flight = min(m, 2 * pp)
        return seconds, self._bytes(spec, layers, flight)

    def _bytes(self, spec: RunSpec, layers: float, flight: float) -> float:
        model, device = self.model, self.device
        dense = experts = 0.0
        for moe, share in self.share.items():
            shared, own = model.layer_params(moe, spec.tp, spec.ep * spec.etp)
            dense += layers * share * shared
            experts += layers * share * own
        dense += model.padded_vocab_size * model.hidden_size / spec.tp
        adapters = layers * self.dense_adapters, layers * self.expert_adapters
        weights = spec.param_bytes * (dense + experts) + WIDE * sum(adapters)
        if spec.updates is not None:
            parts = spec.updates.layers
            dense *= sum(part.dense for part in parts) / len(parts)
            experts *= sum(part.experts for part in parts) / len(parts)
        dense, experts = dense + adapters[0], experts + adapters[1]
        state = weights + spec.grad_bytes * (dense + experts)
        state += spec.state_bytes * spec.owned(dense, experts) + self.slots
        last = max(self.working, self.logits) if spec.pp == 1 else self.working
        tensors = (state + flight * layers * self.kept + last) * (1 + device.memory_workspace)
        outside = device.memory_context_gib + 3 * device.memory_comm_gib
        return tensors * (1 + device.memory_fragmentation) + outside * GIB
