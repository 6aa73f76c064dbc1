"""Predicted and measured memory of CUDA graphs: graph objects, static tensors, pool.

For the prediction, a captured part runs once on torch's meta device, which yields the shapes of its
results and of all tensors that autograd saves for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from megacore.graphs import BufferRole, CapturePlan, StepKind, StepOrder, plan_capture, static_bytes
from megacore.ops.counter_random import StepKeys
from megacore.ops.split_backward import backward_inputs
from megacore.parallel import ProcessGroups
from megacore.parallel.batch import Microbatch
from megacore.pipeline import ActionKind, Program
from megatrain.config import ResolvedConfig, layers_of_stages, mtp_stage, stages_of_ranks
from megatrain.config.graph_rules import graph_scopes
from megatrain.models.build import torch_dtype
from megatrain.models.captured import captured_parts, random_uses
from megatrain.models.gpt import GPTChunk

# Driver memory per graph in addition to its tensors; an assumption, not a measurement.
GRAPH_OBJECT_BYTES = 64 << 10
_WHOLE = ("attn", "mlp", "moe")
_PARTS = ("objects", "static_inputs", "boundary", "pool")


@dataclass(frozen=True, kw_only=True)
class GraphBytes:
    """Memory of the graphs of one rank, bytes.

    Attributes:
        num_graphs: Number of recorded graphs.
        objects: Graph objects.
        static_inputs: Tensors that calls copy their arguments into.
        boundary: Results of captured parts and their incoming and outgoing gradients, including
            those of parameters.
        pool: Tensors that captured passes save for later passes: forward for backward passes, and
            backward passes for their weight halves. Temporary memory of a pass is not counted; on a
            GPU, each microbatch in flight has its own.
    """

    num_graphs: int
    objects: int
    static_inputs: int
    boundary: int
    pool: int

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.objects + self.static_inputs + self.boundary + self.pool

    def text(self) -> str:
        """Format for display.

        Example:
            >>> GraphBytes(num_graphs=2, objects=1 << 20, static_inputs=0, boundary=0,
            ...            pool=1 << 20).text()
            '2 graphs, about 2.0 MiB: objects 1.0, static inputs 0.0, boundary 0.0, pool 1.0'
        """
        shown = ", ".join(
            f"{name.replace('_', ' ')} {getattr(self, name) / 2**20:.1f}" for name in _PARTS
        )
        count = f"{self.num_graphs} graph{'' if self.num_graphs == 1 else 's'}"
        return f"{count}, about {self.total / 2**20:.1f} MiB: {shown}"


@dataclass(frozen=True, kw_only=True)
class _PartBytes:
    inputs: int
    results: int
    params: int
    kept: int
    delayed: int


def predict_graphs(config: ResolvedConfig, program: Program) -> GraphBytes:
    """Predict the memory of the graphs of a pipeline rank.

    With tensor parallelism the sizes are those of one rank's share of a layer.

    Args:
        config: A resolved configuration with ``graphs.mode`` not ``"off"``.
        program: The rank's program.
    """
    is_full = config.graphs.is_full
    scopes = _WHOLE if is_full else graph_scopes(config)
    splits = any(action.kind == ActionKind.BACKWARD_WEIGHT for action in program.actions)
    parts = [
        _parts_of(config, layers, scopes, splits=splits) for layers in _layers_of(config, program)
    ]
    if not any(parts):
        return GraphBytes(num_graphs=0, objects=0, static_inputs=0, boundary=0, pool=0)
    order = StepOrder.of(program, has_parts=[bool(chunk) for chunk in parts])
    flat = [part for chunk in parts for part in chunk]
    plan = plan_capture(
        order.order,
        num_layers_per_chunk=[len(parts[chunk]) for chunk in order.chunks],
        input_signature=_signatures(flat),
        output_signature=list(range(len(flat))),
    )
    pool = sum(flat[c.layer].kept for c in plan.captures if c.kind == StepKind.FORWARD)
    if is_full:
        return _whole_steps(config, plan.num_microbatches, pool)
    return _single_parts(plan, flat, pool)


def _whole_steps(config: ResolvedConfig, num_microbatches: int, pool: int) -> GraphBytes:
    """Predict full-step graphs: one for training, and one for evaluation if enabled."""
    tokens = config.train.microbatch_size * (2 * config.model.seq_length + 1)
    count = 2 if config.train.eval_interval > 0 else 1
    inputs = count * num_microbatches * tokens * torch.int64.itemsize
    inputs += 2 * torch.float64.itemsize if config.graphs.mode == "full_step" else 0
    return GraphBytes(
        num_graphs=count,
        objects=count * GRAPH_OBJECT_BYTES,
        static_inputs=inputs,
        boundary=0,
        pool=pool,
    )


def _single_parts(plan: CapturePlan, flat: list[_PartBytes], pool: int) -> GraphBytes:
    """Predict partial graphs: one for each pass of each part."""
    static = static_bytes(
        plan,
        input_bytes=sorted({part.inputs for part in flat}),
        output_bytes=[part.results for part in flat],
        kept_bytes=[part.delayed for part in flat],
    )
    boundary = static[BufferRole.OUTPUT_GRAD]
    weights = {c.layer for c in plan.captures if c.kind == StepKind.BACKWARD_WEIGHT}
    for capture in plan.captures:
        part = flat[capture.layer]
        if capture.kind == StepKind.FORWARD:
            boundary += part.results
        elif capture.kind == StepKind.BACKWARD:
            boundary += part.inputs + (0 if capture.layer in weights else part.params)
        else:
            boundary += part.params
    return GraphBytes(
        num_graphs=len(plan.captures),
        objects=len(plan.captures) * GRAPH_OBJECT_BYTES,
        static_inputs=static[BufferRole.INPUT],
        boundary=boundary,
        pool=pool + static[BufferRole.KEPT],
    )


def _layers_of(config: ResolvedConfig, program: Program) -> list[list[int]]:
    stages = layers_of_stages(config)
    further = mtp_stage(config)
    return [
        [*stages[stage], *(config.model.mtp_layers if stage == further else ())]
        for stage in stages_of_ranks(config.pipeline, config.parallel.pp)[program.rank]
    ]


def _signatures(parts: list[_PartBytes]) -> list[int]:
    """Number the input sizes of the parts; parts with the same number share input buffers."""
    distinct = sorted({part.inputs for part in parts})
    return [distinct.index(part.inputs) for part in parts]


def _parts_of(
    config: ResolvedConfig, layers: list[int], scopes: tuple[str, ...], *, splits: bool
) -> list[_PartBytes]:
    """Measure the captured parts of some layers, once per kind of layer."""
    known: dict[bool, list[_PartBytes]] = {}
    found: list[_PartBytes] = []
    for index in layers:
        is_moe = config.moe.is_moe_layer(index)
        if is_moe not in known:
            known[is_moe] = _one_part(config, index, scopes, splits=splits)
        found += known[is_moe]
    return found


def _one_part(
    config: ResolvedConfig, index: int, scopes: tuple[str, ...], *, splits: bool
) -> list[_PartBytes]:
    model, parallel, train = config.model, config.parallel, config.train
    chunk = GPTChunk(
        model,
        layers=range(index, index + 1),
        has_embedding=False,
        has_head=False,
        groups=ProcessGroups.single(),
        dtype=torch_dtype(train.dtype),
        device="meta",
        moe=config.moe,
    )
    keys = StepKeys(random_uses([chunk]), device="meta")
    length = model.seq_length // parallel.cp
    parts = captured_parts(chunk, scopes, seq_length=length, keys=keys, recomputed=frozenset())
    if not parts:
        return []
    shape = (length, train.microbatch_size, model.hidden_size)
    x = torch.empty(shape, dtype=torch_dtype(train.dtype), device="meta", requires_grad=True)
    ids = torch.empty(train.microbatch_size, dtype=torch.int64, device="meta")
    batch = Microbatch(
        tokens=ids[:, None],
        labels=None,
        sample_ids=ids,
        step=0,
        loss_factor=torch.empty((), device="meta"),
    )
    args, named = parts[0].sample(x, batch)
    kept = _Kept(chunk, length)
    with saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        results = parts[0](*args, **named)
    # Kernels accumulate expert gradients directly into the gradient buffer.
    added = {id(param) for info, param in chunk.param_infos() if info.expert}
    own = [param for param in parts[0].parameters() if id(param) not in added]
    slices = parallel.tp if parallel.sequence_parallel else 1
    return [
        _PartBytes(
            inputs=(x.nbytes + sum(tensor.nbytes for tensor in named.values())) // slices,
            results=sum(tensor.nbytes for tensor in results.values()) // slices,
            params=sum(p.nbytes for p in own) // parallel.tp,
            kept=0 if train.recomputed else kept.num_bytes // parallel.tp,
            delayed=_delayed_bytes(x, results) // parallel.tp if splits else 0,
        )
    ]


def _delayed_bytes(x: Tensor, results: dict[str, Tensor]) -> int:
    """Compute the bytes saved for the weight half of a backward pass, without given gradients."""
    flowing = [result for result in results.values() if result.requires_grad]
    grads = [torch.empty_like(result) for result in flowing]
    _, delayed = backward_inputs([get_gradient_edge(r) for r in flowing], grads, [x])
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage()._cdata] = tensor
        return tensor

    delayed.map_kept(note)
    given = {grad.untyped_storage()._cdata for grad in grads}
    return sum(t.untyped_storage().nbytes() for key, t in found.items() if key not in given)


class _Kept:
    """Counter of the tensors that autograd saves, except parameters and attention matrices.

    Device attention kernels do not save a queries-by-keys matrix; the formulas that replace them on
    the meta device do.
    """

    def __init__(self, chunk: GPTChunk, length: int) -> None:
        self._own = {param.untyped_storage()._cdata for param in chunk.parameters()}
        self._length = length
        self._found: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        # Detached, because a saved result that references its own node would be a reference cycle.
        kept = tensor.detach()
        is_matrix = tensor.shape[-2:] == (self._length, self._length)
        storage = tensor.untyped_storage()._cdata
        if storage not in self._own and not is_matrix:
            self._found[storage] = kept
        return kept

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._found.values())


# ---- measured ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """GPU memory in use; all zero without a GPU.

    Attributes:
        reserved: Bytes reserved by torch's allocator, including graph pools.
        others: Other bytes in use: by the driver, including graph objects, and other processes.
    """

    reserved: int = 0
    others: int = 0

    @classmethod
    def now(cls) -> DeviceMemory:
        """Measure the memory in use, after emptying the allocator's cache.

        Sync:
            Waits for the device.
        """
        if not torch.cuda.is_available():
            return cls()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # cached free blocks do not count
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return cls(reserved=reserved, others=total - free - reserved)


def measured_bytes(
    num_graphs: int, static: Sequence[Mapping[str, int]], before: DeviceMemory
) -> GraphBytes:
    """Measure the memory of graphs.

    Args:
        num_graphs: Number of graphs.
        static: Bytes of static tensors by use, as ``static_bytes`` returns; one entry per owner.
        before: Memory before the capture. Without a GPU, objects and pool are unknown and 0.
    """
    now = DeviceMemory.now()
    inputs = sum(sizes.get("static_inputs", 0) for sizes in static)
    boundary = sum(sizes.get(name, 0) for sizes in static for name in ("output_grads", "results"))
    reserved = now.reserved - before.reserved
    return GraphBytes(
        num_graphs=num_graphs,
        objects=max(0, now.others - before.others),
        static_inputs=inputs,
        boundary=boundary,
        pool=max(0, reserved - inputs - boundary),
    )


def measured_text(found: GraphBytes, predicted: GraphBytes | None, *, has_device: bool) -> str:
    """Format measured memory for display, with the prediction in brackets.

    Example:
        >>> parts = {"num_graphs": 2, "static_inputs": 1 << 20, "boundary": 0}
        >>> found = GraphBytes(**parts, objects=1 << 20, pool=3 << 20)
        >>> predicted = GraphBytes(**parts, objects=1 << 20, pool=1 << 20)
        >>> measured_text(found, predicted, has_device=True)  # doctest: +ELLIPSIS
        'captured 2 graphs: 5.0 (3.0) MiB: objects 1.0 (1.0), static inputs 1.0 (1.0), ...'
    """

    def shown(name: str) -> str:
        megabytes = f"{getattr(found, name) / 2**20:.1f}"
        return megabytes + (f" ({getattr(predicted, name) / 2**20:.1f})" if predicted else "")

    count = f"captured {found.num_graphs} graph{'' if found.num_graphs == 1 else 's'}"
    names = _PARTS if has_device else ("static_inputs", "boundary")
    listed = ", ".join(f"{name.replace('_', ' ')} {shown(name)}" for name in names)
    if not has_device:
        return f"{count}: {listed} MiB; objects and pool are measured on a GPU"
    return f"{count}: {shown('total')} MiB: {listed}"
