"""Descriptions of low-rank adapters, from those of the parameters that they change. Without torch.

A projection is a matrix as other libraries know it: a parameter of megacore may hold several, such
as queries, keys and values, each of which has an adapter of its own.

With tensor parallelism, one of A and B is split as the parameter is, and the other one is the same
on all ranks. No sum over ranks is added to the passes: each rank has a part of the gradient of the
other one, and these are summed once a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megacore.parallel.param_info import Matrices, ParamInfo
from megatrain.config.lora import LoraConfig

_QKV, _GATE_UP = ("q", "k", "v"), ("gate", "up")


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A projection of a parameter.

    Attributes:
        name: Its global name, as ``"layers.0.attention.q"``; that of the parameter if it is alone.
        rows: Output features on all tensor-parallel ranks, of one expert.
        groups: Groups of rows, each of which is followed by a group of the next projection.
    """

    name: str
    rows: int
    groups: int = 1


def projections_of(info: ParamInfo) -> tuple[Projection, ...]:
    """Return the projections of a parameter with a matrix, in the order of its rows.

    Example:
        >>> info = ParamInfo(name="layers.0.attention.qkv", full_shape=(2, 16, 32), tp_dim=0,
        ...                  matrices=Matrices(sections=(8, 4, 4)))
        >>> for each in projections_of(info):
        ...     print(each.name, each.rows, each.groups)
        layers.0.attention.q 16 2
        layers.0.attention.k 8 2
        layers.0.attention.v 8 2
    """
    path, dot, last = info.name.rpartition(".")
    shape = info.full_shape[1:] if info.expert else info.full_shape
    sections = () if info.matrices is None else info.matrices.sections
    if last == "qkv" and len(sections) == len(_QKV):
        return tuple(
            Projection(name=f"{path}{dot}{part}", rows=shape[0] * width, groups=shape[0])
            for part, width in zip(_QKV, sections, strict=True)
        )
    parts: tuple[str, ...] = (last,)
    if last in ("gate_up", "fc1"):
        parts = _GATE_UP if len(shape) == 3 else ("up",)
    elif last == "fc2":
        parts = ("down",)
    rows = math.prod(shape[:-1]) // len(parts)
    return tuple(Projection(name=f"{path}{dot}{part}", rows=rows) for part in parts)


def describe_adapters(info: ParamInfo, lora: LoraConfig) -> dict[str, ParamInfo]:
    """Describe the adapters of a parameter's projections by name; none if they are no targets.

    Example:
        >>> down = ParamInfo(name="layers.0.mlp.down", full_shape=(8, 16), tp_dim=1)
        >>> for name, each in describe_adapters(down, LoraConfig(rank=2)).items():
        ...     print(name, each.full_shape, each.tp_dim, each.sequence_parallel)
        layers.0.mlp.down.lora_a (2, 16) 1 False
        layers.0.mlp.down.lora_b (8, 2) None True
    """
    return {
        each.name: each
        for projection in projections_of(info)
        if lora.takes(projection.name)
        for each in _adapter(info, projection, lora)
    }


def _adapter(info: ParamInfo, projection: Projection, lora: LoraConfig) -> list[ParamInfo]:
    assert lora.rank is not None
    experts, inputs = info.full_shape[:1] if info.expert else (), info.full_shape[-1]
    splits_inputs = info.tp_dim == len(info.full_shape) - 1
    splits_rows = info.tp_dim is not None and not splits_inputs
    a = replace(
        info,
        name=f"{projection.name}.lora_a",
        full_shape=(*experts, lora.rank, inputs),
        tp_dim=len(experts) + 1 if splits_inputs else None,
        sequence_parallel=info.sequence_parallel or splits_rows,
        weight_decay=True,
        matrices=Matrices(batch_dims=len(experts)),
        wide=True,
    )
    b = replace(
        a,
        name=f"{projection.name}.lora_b",
        full_shape=(*experts, projection.rows, lora.rank),
        tp_dim=len(experts) if splits_rows else None,
        sequence_parallel=info.sequence_parallel or splits_inputs,
    )
    if not lora.dora or info.expert:
        return [a, b]
    magnitude = replace(
        b,
        name=f"{projection.name}.lora_magnitude",
        full_shape=b.full_shape[:-1],
        weight_decay=False,
        matrices=None,
    )
    return [a, b, magnitude]
