"""Capture options, common to all backends, and descriptions and plans of the captured modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megacore.graphs.backend import GraphBackend
from megacore.graphs.capture_plan import CapturePlan, plan_capture
from megacore.graphs.layer import CapturedLayer
from megacore.graphs.static_tensors import TensorSpec

Kwargs = Mapping[str, Tensor]

# Hooks by kind, then by an arbitrary key.
CaptureTimeHooks = Mapping[str, Mapping[Any, Callable[[nn.Module], None]]]
HOOK_KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Options of :func:`megacore.graphs.make_graphed_callables`.

    Attributes:
        reuse: With an order list: the reuse between microbatches, see ``plan_capture``. Default:
            ``"graphs"``, or ``"buffers"`` with the backend ``transformer_engine``.
        num_warmup_iters: Passes of each module before its capture.
        allow_unused_input: Accept inputs that require grad but get no gradient.
        retain_graph_in_backward: Keep saved tensors after captured backward passes, so that replays
            may use another order than captures.
        clone_param_grads_on_return: Return copies of parameter gradients, which ``.grad`` may keep.
            Otherwise ``.grad`` must be consumed before the next replay.
        defer_weight_grads: If the order list has weight halves: compute parameter gradients in
            ``backward_dw()`` of each callable. Otherwise autograd computes them.
        pre_warmup_hook: Runs once before the warmup.
        post_warmup_hook: Runs once after the warmup.
        capture_time_hooks: For each module ``None``, or for each of ``forward_pre_hooks``,
            ``forward_hooks``, ``backward_pre_hooks``, ``backward_hooks`` a mapping of functions of
            the module. They run around each of its passes in warmup and capture, outside of the
            graphs, never at a replay, and return ``None``.
        run_pre_hooks: Accept modules with forward pre-hooks, and run those hooks before each replay
            with the module and no arguments. Otherwise such modules raise an error.
        generators: Random generators, besides the default one, used by captured code. A capture
            restores the states of all generators.
        pool: Memory pool to share with other graphs, from ``torch.cuda.graph_pool_handle()``. All
            graphs that share it must be replayed in the order of their captures.
        backend: ``"cuda"``, ``"emulated"``, ``"transformer_engine"``, or a ``GraphBackend``.
            Default: ``cuda`` for tensors on a CUDA device, else ``emulated``.
    """

    reuse: Literal["none", "buffers", "graphs"] | None = None
    num_warmup_iters: int = 3
    allow_unused_input: bool = False
    retain_graph_in_backward: bool = False
    clone_param_grads_on_return: bool = True
    defer_weight_grads: bool = False
    pre_warmup_hook: Callable[[], None] | None = None
    post_warmup_hook: Callable[[], None] | None = None
    capture_time_hooks: Sequence[CaptureTimeHooks | None] | None = None
    run_pre_hooks: bool = False
    generators: Sequence[torch.Generator] = ()
    pool: Any = None
    backend: GraphBackend | str | None = None

    def check(self, num_modules: int) -> None:
        """Check the options for a number of modules.

        Raises:
            ValueError: If capture-time hooks are not one mapping per module, or have an unknown
                kind; or if ``pool`` or ``generators`` accompany a backend object.
        """
        hooks = self.capture_time_hooks
        if hooks is not None and len(hooks) != num_modules:
            raise ValueError(
                f"capture_time_hooks has {len(hooks)} entries for {num_modules} modules; give one "
                "mapping, or None, for each"
            )
        for number, one in enumerate(hooks or ()):
            unknown = [kind for kind in one or () if kind not in HOOK_KINDS]
            if unknown:
                raise ValueError(
                    f'capture_time_hooks of module {number} names "{unknown[0]}"; the kinds are '
                    f"{', '.join(HOOK_KINDS)}"
                )
        if isinstance(self.backend, GraphBackend) and (self.pool is not None or self.generators):
            raise ValueError(
                "pool and generators are given to a backend when it is made, as in "
                "CudaBackend(device, pool=..., generators=...)"
            )

    def run_hooks(self, kind: str, number: int, module: nn.Module) -> None:
        """Run the capture-time hooks of a kind.

        Raises:
            RuntimeError: If a hook returns a value.
        """
        hooks = self.capture_time_hooks[number] if self.capture_time_hooks is not None else None
        for hook in ((hooks or {}).get(kind) or {}).values():
            if (result := hook(module)) is not None:
                raise RuntimeError(
                    f"capture-time hook {hook!r} returned {result!r}; it must return None, since "
                    "no replay would see the result"
                )


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
