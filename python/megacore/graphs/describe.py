"""Capture descriptions of modules, and their capture plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megacore.graphs.capture_plan import CapturePlan, plan_capture
from megacore.graphs.layer import CapturedLayer
from megacore.graphs.tensors import TensorSpec

Kwargs = Mapping[str, Tensor]

_HOOKS = ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def describe_layers(
    modules: list[nn.Module],
    args: list[tuple[Any, ...]],
    kwargs: Sequence[Kwargs] | None,
    *,
    run_pre_hooks: bool,
) -> list[CapturedLayer]:
    """Describe each module for capture; for errors, see `make_graphed_callables`."""
    if not modules:
        raise ValueError("there is no module to capture")
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"callable {number} is {module!r}; only torch modules can be captured")
        for inner_name, inner in module.named_modules():
            refused = _HOOKS if run_pre_hooks else (*_HOOKS, "_forward_pre_hooks")
            if any(getattr(inner, name) for name in refused):
                raise ValueError(
                    f"callable {number} has hooks on {inner_name or 'itself'}, which a replay "
                    "would skip; remove them, or run them before each call"
                )
        if any(buffer.requires_grad for buffer in module.buffers()):
            raise ValueError(
                f"callable {number} has a buffer that requires grad; make it a parameter, or "
                "detach it"
            )
    if len({module.training for module in modules}) > 1:
        raise ValueError(
            "some of the modules are in training and some in evaluation mode; call train() on all "
            "of them, or eval()"
        )
    casts = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    if casts and torch.is_autocast_cache_enabled():
        raise ValueError(
            "autocast caches the weights that it casts, and a graph would read those of its "
            "capture for ever; use autocast(..., cache_enabled=False)"
        )
    given = [dict(one) for one in (kwargs or [{}] * len(modules))]
    if len(args) != len(modules) or len(given) != len(modules):
        raise ValueError(
            f"{len(modules)} modules need as many tuples of sample arguments, but there are "
            f"{len(args)}, and {len(given)} mappings of keyword arguments"
        )
    return [
        CapturedLayer.of(_name_of(module, number), module, one, named)
        for number, (module, one, named) in enumerate(zip(modules, args, given, strict=True))
    ]


def _name_of(module: nn.Module, number: int) -> str:
    own = getattr(module, "captured_name", None)
    return own if isinstance(own, str) else f"module {number} ({type(module).__name__})"


def plan_layers(
    layers: list[CapturedLayer],
    order: Sequence[float] | None,
    num_layers_per_chunk: int | Sequence[int] | None,
    reuse: Literal["none", "buffers", "graphs"],
) -> CapturePlan:
    """Return the capture plan; for errors, see `make_graphed_callables`."""
    numbers: dict[tuple[TensorSpec, ...], int] = {}
    signature = [numbers.setdefault(layer.input_specs, len(numbers)) for layer in layers]
    if order is None:
        order, per_chunk = [1, -1], [len(layers)]
    else:
        per_chunk = split_into_chunks(len(layers), order, num_layers_per_chunk)
    # Output specs are known after warmup only, so output gradients share no buffers.
    return plan_capture(
        order,
        num_layers_per_chunk=per_chunk,
        input_signature=signature,
        output_signature=list(range(len(layers))),
        reuse=reuse,
    )


def split_into_chunks(
    num_layers: int, order: Sequence[float], num_layers_per_chunk: int | Sequence[int] | None
) -> list[int]:
    """Return the layers of each chunk of an order list; see `make_graphed_callables`."""
    num_chunks = max((int(abs(entry)) for entry in order), default=1)
    if num_layers_per_chunk is None:
        if num_layers % max(num_chunks, 1):
            raise ValueError(
                f"{num_layers} modules do not divide into {num_chunks} equal chunks; give "
                "num_layers_per_chunk"
            )
        num_layers_per_chunk = num_layers // max(num_chunks, 1)
    if isinstance(num_layers_per_chunk, int):
        per_chunk = [num_layers_per_chunk] * num_chunks
    else:
        per_chunk = list(num_layers_per_chunk)
    if sum(per_chunk) != num_layers:
        raise ValueError(
            f"num_layers_per_chunk = {per_chunk} counts {sum(per_chunk)} modules, but there are "
            f"{num_layers}"
        )
    return per_chunk
