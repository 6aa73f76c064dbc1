"""Time of an optimizer that computes with whole matrices, on the data-parallel rank with most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megacore.optim.matrix_plan import MatrixUnit, pack, unit_cost
from megacore.optim.matrix_rule import MatrixRule
from megatrain.plan.cost import link
from megatrain.plan.device import Device
from megatrain.plan.spec import ModelSpec, RunSpec


def matrix_time(
    model: ModelSpec, spec: RunSpec, device: Device, rule: MatrixRule, layers: Sequence[bool]
) -> float:
    """Predict the time of whole matrices in a step: products, and their exchange.

    Args:
        model: Shape of the model.
        spec: Layout.
        device: Calibration.
        rule: The optimizer.
        layers: Whether each layer of the rank has experts.
    """
    precision = "bf16" if getattr(rule, "precision", "float32") == "bfloat16" else "fp32"
    groups = (
        (False, spec.tp, spec.dp * spec.cp, min(spec.strides["cp"], spec.strides["dp"])),
        (True, spec.etp, spec.edp, spec.strides["edp"]),
    )
    total = 0.0
    for of_experts, tp, holders, stride in groups:
        units = [unit for moe in layers for unit in _units(model, spec, moe, of_experts)]
        shards = max(1, holders // spec.instances) if spec.zero else 1
        costs = [unit_cost(unit, rule.cost, tp) for unit in units]
        owners = pack(costs, shards)
        loads = [0.0] * shards
        for owner, cost in zip(owners, costs, strict=True):
            loads[owner] += cost
        total += max(loads) / device.peak(precision)
        if shards > 1:
            sent = 2 * 4 * sum(unit.numel for unit in units) / shards
            total += sent / link(device, shards, stride).bandwidth
    return total


def _units(model: ModelSpec, spec: RunSpec, moe: bool, of_experts: bool) -> Iterator[MatrixUnit]:
    """Yield the matrices of a layer on a rank."""
    for rows, columns, cut, is_expert in _matrices(model, moe):
        if is_expert != of_experts:
            continue
        tp = spec.etp if is_expert else spec.tp
        own = (rows // tp, columns) if cut == "rows" else (rows, columns // tp)
        for _ in range(model.moe.num_experts // spec.ep if is_expert else 1):
            yield MatrixUnit(
                param=0,
                start=0,
                shape=(rows, columns) if cut is None else own,
                matrices=((rows, columns),),
                sections=(own[0],),
                cut=("rows" if cut == "rows" else "columns") if cut and tp > 1 else None,
            )


def _matrices(model: ModelSpec, moe: bool) -> Iterator[tuple[int, int, str | None, bool]]:
    """Yield rows, columns, the dimension that tp cuts, and whether it is of each expert."""
    hidden, heads = model.hidden_size, model.num_heads
    if model.mla.kv_rank:
        *before, (_, rank, _) = model.qkv_matrices
        for rows, columns, split in before:
            yield rows, columns, "rows" if split else None, False
        for width in (model.mla.nope_head_dim, model.mla.v_head_dim):
            yield heads * width, rank, "rows", False
    else:
        for count in (heads, model.num_kv_heads, model.num_kv_heads):
            yield count * model.head_dim, hidden, "rows", False
    yield hidden, heads * model.head_dims[1], "columns", False
    widths = [(model.ffn_hidden_size, model.gated, False)]
    if moe:
        yield model.moe.num_experts, hidden, None, False
        widths = [(model.expert_width, model.moe.gated, True)]
        if model.moe.shared_ffn_hidden_size:
            widths.append((model.moe.shared_ffn_hidden_size, True, False))
    for width, gated, is_expert in widths:
        for _ in range(2 if gated else 1):
            yield width, hidden, "rows", is_expert
        yield hidden, width, "columns", is_expert
