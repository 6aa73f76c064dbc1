"""Time of one microbatch in each part of a model: matrix products, memory traffic, exchanges.

Tokens are those of a rank's matrix products, ``microbatch * seq / cp``. Between tensor parallel
regions a rank has ``1 / tp`` of them with sequence parallelism. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb

from megatrain.plan.adapter_shapes import AdapterShape
from megatrain.plan.adapters import WIDE
from megatrain.plan.device import Device
from megatrain.plan.link import link
from megatrain.plan.spec import ModelSpec, RunSpec, loss_columns
from megatrain.plan.updates import UpdatedPart


@dataclass
class Cost:
    """Time of a part: forward, gradient of its input (with recomputation), gradient of weights.

    Attributes:
        kinds: The times of the three passes by kind.
    """

    kinds: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    def add(self, kind: str, forward: float, backward: float = 0.0, weight: float = 0.0) -> None:
        """Add a time of a kind."""
        before = self.kinds.get(kind, (0.0, 0.0, 0.0))
        self.kinds[kind] = before[0] + forward, before[1] + backward, before[2] + weight

    def plus(self, other: Cost, times: float = 1.0) -> None:
        """Add another part ``times`` times."""
        for kind, (forward, backward, weight) in other.kinds.items():
            self.add(kind, times * forward, times * backward, times * weight)

    def stretch(self, kind: str, total: float) -> None:
        """Lengthen all passes evenly to a total, and count the difference under a kind."""
        if total > self.total > 0:
            more = total / self.total - 1
            passes = self.forward, self.backward_input, self.backward_weight
            self.add(kind, *(more * each for each in passes))

    def trained(self, dense: float, experts: float, *, has_backward: bool = True) -> Cost:
        """Return the time if parameters are frozen.

        Args:
            dense: Share of the parameters outside of experts that are trained.
            experts: Share of the parameters of experts that are trained.
            has_backward: Whether there is a backward pass at all.
        """
        found = Cost()
        for kind, (forward, backward, weight) in self.kinds.items():
            share = experts if kind in ("experts", "clones") else dense
            found.add(kind, forward, backward * has_backward, weight * share * has_backward)
        return found

    @property
    def parts(self) -> dict[str, float]:
        """Time by kind, over all passes."""
        return {kind: sum(passes) for kind, passes in self.kinds.items()}

    @property
    def forward(self) -> float:
        """Time of the forward pass."""
        return sum(passes[0] for passes in self.kinds.values())

    @property
    def backward_input(self) -> float:
        """Time of the gradient of the input."""
        return sum(passes[1] for passes in self.kinds.values())

    @property
    def backward_weight(self) -> float:
        """Time of the gradient of the weights."""
        return sum(passes[2] for passes in self.kinds.values())

    @property
    def total(self) -> float:
        """Time of all passes."""
        return sum(map(sum, self.kinds.values()))


class LayerCosts:
    """Costs of the layers, the embedding and the output layer of a run, for one microbatch."""

    def __init__(self, model: ModelSpec, spec: RunSpec, device: Device) -> None:
        """Price all parts; nothing depends on ``pp``, ``chunks``, ``schedule`` or ``zero``."""
        self.model, self.spec, self.device = model, spec, device
        self.tokens = spec.microbatch * model.seq_length / spec.cp
        self.split = spec.token_split
        self.local = self.tokens / self.split
        self.bandwidth = device.peak_hbm * device.memory_bound_efficiency
        is_fp32 = spec.precision == "fp32"
        rate = device.memory_bound_layer_fp32 if is_fp32 else device.memory_bound_layer
        self.element_rate = rate / (2 if is_fp32 else 1)  # sizes below are those of 16 bits
        self.byte_rate = self.bandwidth * rate
        self.at = spec.strides
        self.shares_host = device.host_waits > 0 and spec.gpus > 1
        self.tp_link = link(device, spec.tp, self.at["tp"])
        kinds = set(model.moe_layers)
        self.by_kind = {moe: self._layer(moe=moe) for moe in kinds}
        self._adapted: dict[tuple[UpdatedPart, bool], Cost] = {}
        self.logits_again = 0.0  # in the second half of a split backward pass
        self.head = self._head()
        self.embedding = Cost()
        traffic = 2 * model.hidden_size * self.tokens / self.split / self.bandwidth
        self.embedding.add("elementwise", 2 * traffic, 0.0, 4 * traffic)

        updates = spec.updates
        if updates is not None:
            self.embedding = self.embedding.trained(updates.embedding.dense, 1.0)
            self.head = self.head.trained(updates.head.dense, 1.0)

    def layer(self, index: int, *, is_first_stage: bool) -> Cost:
        """Return the costs of a layer, in which parameters may be frozen.

        In the first stage no gradient passes below the lowest trained parameters, except in
        graphs; later stages return the gradient of their input in any case.
        """
        cost, updates = self.by_kind[self.model.moe_layers[index]], self.spec.updates
        if updates is None:
            return cost
        part, is_below = updates.layers[index], index < updates.first_trained
        has_backward = not (is_first_stage and is_below) or self.spec.graphs != "off"
        if part.weights < 1.0 or not has_backward:
            cost = cost.trained(part.dense, part.experts, has_backward=has_backward)
        if not part.adapters:
            return cost
        key = part, has_backward
        if key not in self._adapted:
            self._adapted[key] = whole = Cost()
            whole.plus(cost)
            whole.plus(self._adapters(part.adapters))
        return self._adapted[key]

    # ---- parts ----

    def _adapters(self, adapters: Sequence[AdapterShape]) -> Cost:
        """Price the adapters of a layer: their products, conversions and sums."""
        spec, experts, width = self.spec, self.model.moe, self.spec.width
        rows = self.tokens / spec.tp * experts.top_k * spec.etp * spec.load(experts.num_experts)
        cost = Cost()
        for each in adapters:
            inputs, outputs = each.sizes(spec.tp, spec.etp)
            count, wide, convert = 1.0, WIDE, WIDE + width if width != WIDE else 0
            tokens = self.tokens if each.splits_inputs or each.splits_outputs else self.local
            if each.experts:
                count, wide, convert = each.experts / spec.ep + spec.clones, width, 0
                tokens = rows
            once = self._thin(tokens, each.rank, inputs, wide, count)
            once += self._thin(tokens, outputs, each.rank, wide, count)
            cost.add("adapters", once, once, once)
            # Conversions to float32 and back, and the sums with the result and the gradient.
            forward = convert * inputs + (2 * convert + 2 * wide) * outputs
            backward = convert * (inputs + outputs) + 3 * width * inputs
            if each.has_norms:
                # The sum of weight and adapter, its norms, and the factor on the result.
                cost.add("adapters", self._thin(outputs, inputs, each.rank, WIDE, 1.0))
                cost.add("adapters", (7 * WIDE + width) * inputs * outputs / self.byte_rate)
                forward += 2 * (WIDE + width) * outputs
                backward += 3 * (WIDE + width) * outputs
            moved = (forward, backward, convert * inputs)
            cost.add("adapters", *(tokens * size / self.byte_rate for size in moved))
        if "layer" in spec.recompute:
            cost.add("recompute", 0.0, cost.forward)
        self._contend(cost)
        return cost

    def _thin(self, m: float, n: float, k: float, width: int, count: float) -> float:
        """Price a product of which one dimension is a rank, so that memory limits it.

        Args:
            m: Rows.
            n: Columns.
            k: Summed elements.
            width: Bytes of a number.
            count: Matrices ``(n, k)``, among which the rows are divided.
        """
        peak = self.device.peak("fp32" if width == WIDE else "bf16")
        moved = width * (m * n + count * n * k + m * k) / self.byte_rate
        return max(2 * m * n * k / peak, moved) + self.device.gemm_launch_us * 1e-6

    def _layer(self, *, moe: bool) -> Cost:
        spec, device = self.spec, self.device
        cost, again = self._attention_block(), Cost()
        mlp = self._moe() if moe else self._mlp()
        recompute = spec.recompute
        if "layer" in recompute or "products" in recompute:
            again.plus(cost)
            again.plus(mlp)
            share = 1.0 if "layer" in recompute else 0.5
        else:
            share = 1.0
            if recompute & {"mlp", "moe"} and ("moe" if moe else "mlp") in recompute:
                again.plus(mlp)
            if recompute & {"scores", "attention"}:
                again.plus(self._core_attention())
            if "norm" in recompute:
                again.add("elementwise", self._traffic(8 * self.model.hidden_size / self.split))
            if recompute & {"activation", "expert_activation"}:
                again.add("elementwise", self._traffic(self._act_bytes(moe)))
            if "kv_up" in recompute and self.model.mla.kv_rank:
                up = Cost()
                self._products(up, self.model.qkv_matrices[-1:])
                again.plus(up)
        cost.plus(mlp)
        cost.add("recompute", 0.0, share * again.forward)
        floor = self._floor(moe)
        cost.stretch("host", cost.total + floor if device.host_waits else floor)
        self._contend(cost)
        return cost

    def _contend(self, cost: Cost) -> None:
        """Lengthen the passes if exchanges take a part of the device."""
        spec = self.spec
        if (
            spec.overlap & {"tp", "ep"}
            or ("dp" in spec.overlap and spec.zero == 3)
            or self.shares_host
        ):
            cost.stretch("contention", cost.total * (1 + self.device.contention_share))

    def _attention_block(self) -> Cost:
        model = self.model
        cost = Cost()
        self._products(cost, model.qkv_matrices)
        width = model.num_heads * model.head_dims[1]
        self._products(cost, ((model.hidden_size, width, True),), rows=True)
        cost.plus(self._core_attention())
        hidden = model.hidden_size / self.split
        heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim / self.spec.tp
        extra = 3 if model.mla.kv_rank else 1
        cost.add(
            "elementwise",
            self._traffic(10 * hidden + 4 * heads * extra),
            self._traffic(12 * hidden + 4 * heads * extra),
        )
        self._tensor_exchange(cost)
        return cost

    def _core_attention(self) -> Cost:
        model, spec, device = self.model, self.spec, self.device
        cost = Cost()
        per_key = 2 * self.tokens * model.num_heads / spec.tp * sum(model.head_dims)
        if spec.attention == "unfused":
            rate = device.peak_clock * device.peak_bf16 * device.attention_unfused
            scores = self.tokens * model.seq_length * model.num_heads / spec.tp
            flops = per_key * model.seq_length
            cost.add("attention", flops / rate, 2 * flops / rate)
            cost.add("attention", 9 * scores / self.bandwidth, 11 * scores / self.bandwidth)
            return cost
        is_fp32 = spec.precision == "fp32"
        rate = device.peak_fp32 if is_fp32 else device.peak_bf16
        rate *= device.attention_fp32 if is_fp32 else device.attention_forward
        rate *= device.peak_clock
        rate *= model.seq_length / (model.seq_length + device.attention_half)
        if spec.attention == "flash2":
            rate *= device.attention_flash2
        if any(model.windows):
            rate *= device.attention_window
        forward = per_key * model.mean_keys / rate
        cost.add("attention", forward, 2.5 * forward / device.attention_backward)
        if spec.cp > 1:
            self._context_exchange(cost, forward)
        return cost

    def _context_exchange(self, cost: Cost, attention: float) -> None:
        model, spec = self.model, self.spec
        ring = link(self.device, spec.cp, self.at["cp"])
        queries, values = model.head_dims
        kv_heads = model.num_heads if model.mla.kv_rank else model.num_kv_heads
        width = kv_heads * (queries + values) / spec.tp
        if spec.cp_comm == "a2a":
            width = (model.num_heads + kv_heads) * (queries + values) / spec.tp
            once = ring.ring(2 * self.tokens * width)
            cost.add("cp", once, once)
            return
        if spec.cp_comm == "allgather":  # before attention and after its gradients: not hidden
            if model.mla.kv_rank:
                width = model.mla.kv_rank + model.mla.rope_head_dim
            once = ring.ring(2 * self.tokens * width * spec.cp)
            cost.add("cp", once, once)
            return
        once = ring.ring(2 * self.tokens * width * spec.cp)
        shown = self.device.exposed_cp
        cost.add("cp", max(shown * once, once - attention), 2 * max(shown * once, once - attention))

    def _mlp(self) -> Cost:
        model = self.model
        cost = Cost()
        wide = (2 if model.gated else 1) * model.ffn_hidden_size
        self._products(cost, ((wide, model.hidden_size, True),))
        self._products(cost, ((model.hidden_size, model.ffn_hidden_size, True),), rows=True)
        traffic = self._act_bytes(False)
        hidden = model.hidden_size / self.split
        cost.add(
            "elementwise",
            self._traffic(10 * hidden + traffic),
            self._traffic(12 * hidden + 1.67 * traffic),
        )
        self._tensor_exchange(cost)
        return cost

    def _moe(self) -> Cost:
        model, spec, device = self.model, self.spec, self.device
        moe = model.moe
        cost = Cost()
        dispatched = self.tokens / spec.tp
        rows = dispatched * moe.top_k * spec.etp * spec.load(moe.num_experts)
        wide = (2 if moe.gated else 1) * model.expert_width / spec.etp
        self._grouped(cost, rows, wide, model.hidden_size)
        self._grouped(cost, rows, model.hidden_size, model.expert_width / spec.etp)
        act = (6 if moe.gated else 4) * model.expert_width / spec.etp * rows
        act /= self.bandwidth * self.element_rate
        if not spec.fused_experts:
            cost.add("elementwise", act, 1.67 * act)
        permute = 8 * model.hidden_size * rows / spec.etp / device.peak_hbm
        permute /= device.memory_bound_permute / (2 if spec.precision == "fp32" else 1)
        if not spec.fused_experts:
            cost.add("elementwise", permute, permute)
        hidden = model.hidden_size / self.split
        cost.add("elementwise", self._traffic(10 * hidden), self._traffic(12 * hidden))
        experts, shared = moe.num_experts, moe.shared_ffn_hidden_size
        once = self._product(dispatched, experts, model.hidden_size, device.peak("bf16"))
        cost.add("gemm", once, once, once)
        if shared:
            wide = (2 if model.gated else 1) * shared
            self._products(cost, ((wide, model.hidden_size, True),))
            self._products(cost, ((model.hidden_size, shared, True),), rows=True)
            self._tensor_exchange(cost)
        self._expert_exchange(cost, dispatched)
        return cost

    def _head(self) -> Cost:
        model, spec = self.model, self.spec
        cost = Cost()
        columns = model.padded_vocab_size / spec.tp
        once = self._product(self.tokens, columns, model.hidden_size, self._head_peak())
        cost.add("head", once, once, once)
        read, written = {"fused": (4, 4), "unfused": (18, 10), "eager": (24, 16)}[spec.loss]
        rate = self.device.memory_bound_loss
        if loss_columns(model, spec) is not None:
            rate = self.device.memory_bound_loss_blocks
            # The backward pass computes the logits again; W of a split one too, see `logits_again`.
            self.logits_again = once
            cost.add("head", 0.0, once)
            written = read
        # In all formats: logits of 16 bits are converted, which these numbers count.
        per_byte = self.tokens / (self.bandwidth * rate)
        cost.add("head", read * columns * per_byte, written * columns * per_byte)
        if spec.tp > 1:
            ring = self.tp_link.ring(2 * self.tokens * model.hidden_size)
            cost.add("tp", ring, 2 * ring)
        if self.shares_host:
            cost.stretch("contention", cost.total * (1 + self.device.contention_share))
            self.logits_again *= 1 + self.device.contention_share
        return cost

    # ---- pieces ----

    def _head_peak(self) -> float:
        return self.device.peak("fp32" if self.spec.precision == "fp32" else "bf16")

    def _traffic(self, bytes_per_token: float) -> float:
        return bytes_per_token * self.tokens / (self.bandwidth * self.element_rate)

    def _act_bytes(self, moe: bool) -> float:
        model = self.model
        if moe:
            return 6 * model.expert_width * model.moe.top_k / self.spec.tp
        return (6 if model.gated else 4) * model.ffn_hidden_size / self.spec.tp

    def _product(self, m: float, n: float, k: float, peak: float) -> float:
        half = self.device.gemm_half
        shape = (1 + half / m) * (1 + half / n) * (1 + half / k)
        moved = 2 * (m * n + n * k + m * k) / self.bandwidth
        return max(2 * m * n * k / peak * shape, moved) + self.device.gemm_launch_us * 1e-6

    def _products(
        self, cost: Cost, matrices: tuple[tuple[int, int, bool], ...], *, rows: bool = False
    ) -> None:
        """Add the three products of weights (outputs, inputs, split); ``rows`` splits inputs."""
        device, spec = self.device, self.spec
        peak = device.peak(spec.precision)
        for outputs, inputs, split in matrices:
            n: float = outputs / (spec.tp if split and not rows else 1)
            k: float = inputs / (spec.tp if split and rows else 1)
            m = self.tokens if split else self.local
            once = self._product(m, n, k, peak)
            accumulate = 2 * spec.grad_bytes * n * k / self.bandwidth
            cost.add("gemm", once, once, once + accumulate)
            if spec.is_fp8:
                cast = device.gemm_cast_bytes * m / self.bandwidth
                cost.add("cast", cast * k, cast * n)

    def _grouped(self, cost: Cost, rows: float, n: float, k: float) -> None:
        """Add the three products of a rank's experts."""
        device, spec, model = self.device, self.spec, self.model
        experts = max(1.0, model.moe.num_experts / spec.ep) + spec.clones
        each = rows / experts
        # Grouped products with one scale per tensor gain nothing over 16 bits unless fused.
        slow = spec.precision in ("fp8", "fp8-cs", "fp8-ds") and not spec.fused_experts
        peak = device.peak("bf16" if slow else spec.precision)
        half = device.grouped_half_fused if spec.fused_experts else device.grouped_half
        half *= peak / device.peak("bf16")
        shape = (1 + device.gemm_half / n) * (1 + device.gemm_half / k)
        time = 2 * rows * n * k / (peak * device.grouped_efficiency) * (1 + half / each) * shape
        weights = experts * n * k / self.bandwidth
        accumulate = 2 * spec.grad_bytes * weights
        cost.add("experts", max(time, 2 * weights), max(time, 2 * weights), time + accumulate)
        if spec.is_fp8 and not spec.fused_experts:
            cast = device.gemm_cast_bytes * rows / self.bandwidth
            cost.add("cast", cast * k, cast * n)

    def _tensor_exchange(self, cost: Cost) -> None:
        """Add what a block exchanges over tp: a gather and a scatter each way, or all-reduces."""
        spec, device = self.spec, self.device
        if spec.tp == 1:
            return
        shown = device.exposed_tp_overlapped if "tp" in spec.overlap else device.exposed_tp
        both = 2 * self.tp_link.ring(2 * self.tokens * self.model.hidden_size) * shown
        cost.add("tp", both, both * (1.5 if spec.sequence_parallel else 1))

    def _expert_exchange(self, cost: Cost, dispatched: float) -> None:
        model, spec, device = self.model, self.spec, self.device
        shown = device.exposed_ep_overlapped if "ep" in spec.overlap else 1.0
        if spec.ep > 1:
            once = self.dispatch_time(dispatched) * spec.load(model.moe.num_experts)
            cost.add("ep", 2 * shown * once, 2 * shown * once)
        if spec.clones:
            self._clone_exchange(cost, shown)
        if spec.etp > 1:
            ring = link(device, spec.etp, self.at["etp"])
            once = ring.ring(2 * dispatched * model.moe.top_k * spec.etp * model.hidden_size)
            cost.add("ep", 2 * shown * once, 3 * shown * once)

    def _clone_exchange(self, cost: Cost, shown: float) -> None:
        """Add weights to clones in both passes, and their gradients back to the experts.

        An upper bound: all slots are filled, and no exchange hides behind products.
        """
        model, spec, device = self.model, self.spec, self.device
        numel = spec.clones * model.expert_params / spec.etp
        reach = spec.echo.domain_size or spec.ep
        group = link(device, reach, self.at["ep"])
        outside = 1 - group.inside / group.size
        fast = device.link_nvlink * device.link_alltoall_nvlink
        slow = device.link_nic * device.link_alltoall_nic
        per_byte = max((1 - outside) / fast, outside / slow)
        weights = spec.param_bytes * numel * per_byte + group.latency
        gradients = 4 * numel * per_byte + group.latency
        cost.add("clones", shown * weights, shown * weights, shown * gradients)
        cost.add("clones", 0.0, 0.0, 12 * numel / self.bandwidth)  # added to those of the expert

    def dispatch_time(self, tokens: float) -> float:
        """Return the time to send this many tokens of a rank to their experts, or back."""
        model, spec, device = self.model, self.spec, self.device
        group = link(device, spec.ep, self.at["ep"])
        row = tokens * 2 * model.hidden_size
        fast = device.link_nvlink * device.link_alltoall_nvlink
        if spec.dispatcher == "allgather":
            return group.ring(row * spec.ep)
        if spec.dispatcher == "alltoall":
            inside = model.moe.top_k * (1 / group.nodes - 1 / spec.ep)
            outside = model.moe.top_k * (1 - 1 / group.nodes)
        else:
            inside = self._distinct(spec.ep // group.nodes)
            outside = self._distinct(group.nodes)
        slow = device.link_nic * device.link_alltoall_nic
        return max(row * inside / fast, row * outside / slow) + group.latency

    def _distinct(self, units: int) -> float:
        """Return the expected number of other units among ``units`` that a token is sent to."""
        model = self.model
        if units <= 1:
            return 0.0
        groups, chosen = model.moe.num_groups, model.moe.groups_top_k
        if groups > 1 and units <= groups and groups % units == 0:
            missed = comb(groups - groups // units, chosen) / comb(groups, chosen)
        else:
            missed = (1 - 1 / units) ** model.moe.top_k
        return (units - 1) * (1 - missed)

    def _floor(self, moe: bool) -> float:
        """Return the time that the host takes to start the kernels of a layer."""
        device, graphs = self.device, self.spec.graphs
        if graphs == "full":
            return 0.0
        if not moe:
            return device.host_layer_ms * 1e-3 * (0.3 if graphs == "partial" else 1)
        if graphs == "partial":
            return device.host_moe_graphs_ms * 1e-3
        by_name = {"hybridep": device.host_moe_hybridep_ms}
        return by_name.get(self.spec.dispatcher, device.host_moe_alltoall_ms) * 1e-3
