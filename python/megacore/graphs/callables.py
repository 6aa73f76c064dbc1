"""Captures modules: static tensors by plan, warmup, recording, and what to call afterwards.

Source:
    The contract is that of Transformer Engine's ``make_graphed_callables``: order lists, layers per
    chunk, a forward and a backward graph (and one for the weight half) per layer, copies into
    static inputs, detached results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megacore.graphs.backend import GraphBackend, graph_backend
from megacore.graphs.capture_plan import BufferRole, Capture, CapturePlan, StepKind, plan_capture
from megacore.graphs.errors import CaptureError, failing_line
from megacore.graphs.layer import CapturedLayer, LayerSite, Maybe
from megacore.graphs.replay import GraphedCallable, ReplayState
from megacore.graphs.tensors import TensorSpec
from megacore.ops.gemm import main_grad_of

Kwargs = Mapping[str, Tensor]

_HOOKS = ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def make_graphed_callables(
    callables: nn.Module | Sequence[nn.Module],
    sample_args: Sequence[Any],
    *,
    sample_kwargs: Sequence[Kwargs] | None = None,
    order: Sequence[float] | None = None,
    num_layers_per_chunk: int | Sequence[int] | None = None,
    reuse: Literal["none", "buffers", "graphs"] = "graphs",
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    clone_param_grads_on_return: bool = True,
    defer_weight_grads: bool = False,
    pre_warmup_hook: Callable[[], None] | None = None,
    post_warmup_hook: Callable[[], None] | None = None,
    run_pre_hooks: bool = False,
    backend: GraphBackend | str | None = None,
) -> Any:
    """Capture modules in graphs that their calls replay.

    Without ``order``, each module's ``forward`` is replaced in place by one that replays; call it,
    and run its backward pass, once at a time. With ``order``, modules stay as they are, and there
    is one callable for each microbatch of each of them; call them in the order of the list.

    A replay copies its arguments into static tensors and returns views of static tensors, which
    hold until the backward pass of that call. Gradients are computed by a captured backward pass
    when autograd reaches the call, so hooks on parameters run at every replay.

    Args:
        callables: A module, or the modules of all chunks in a row.
        sample_args: For one module its positional arguments; for several a tuple of them for each.
            Tensors, possibly nested; a call must bring the same shapes, strides and dtypes.
        sample_kwargs: The same for keyword arguments, a mapping for each module.
        order: The order list of a schedule, see ``plan_capture``.
        num_layers_per_chunk: With ``order``: modules per chunk. Default: equally many.
        reuse: With ``order``: what microbatches share, see ``plan_capture``.
        num_warmup_iters: Passes of each module before its capture.
        allow_unused_input: Accept inputs that require grad and get none.
        clone_param_grads_on_return: Return copies of parameter gradients, which ``.grad`` may keep.
            Without, whatever reads ``.grad`` must have done so before the next replay.
        defer_weight_grads: Where ``order`` has weight halves: leave parameter gradients to
            ``backward_dw()`` of each callable. Without, autograd asks for them.
        pre_warmup_hook: Runs before the warmup.
        post_warmup_hook: Runs after the warmup.
        run_pre_hooks: Accept modules with forward pre-hooks, and run those hooks before each replay
            with the module and no arguments. Without, such modules are refused.
        backend: See ``graph_backend``. Default: the right one for the arguments' device.

    Returns:
        Without ``order`` the module, or a tuple of them. With ``order`` a tuple of
        ``GraphedCallable``: chunk by chunk, in it microbatch by microbatch, in it layer by layer.

    Raises:
        TypeError: If something is not a module, or a sample argument not a tensor.
        ValueError: If modules, arguments and order list do not fit each other.
        CaptureError: If a module cannot be captured; it names the line. All is as it was before.

    Sync:
        Waits for the device before and after. A replay does not wait.

    Source:
        Transformer Engine, ``make_graphed_callables``.

    Example:
        >>> module = torch.nn.Linear(2, 2)
        >>> x = torch.ones(3, 2)
        >>> expected = module(x)
        >>> graphed = make_graphed_callables(module, (x,), backend="emulated")
        >>> torch.equal(graphed(x), expected)
        True
    """
    is_single = isinstance(callables, nn.Module)
    modules = [callables] if isinstance(callables, nn.Module) else list(callables)
    args = [tuple(sample_args)] if is_single else [tuple(one) for one in sample_args]
    layers = describe_layers(modules, args, sample_kwargs, run_pre_hooks=run_pre_hooks)
    plan = plan_layers(layers, order, num_layers_per_chunk, reuse)
    made = Capturing(
        modules,
        layers,
        plan,
        backend=_choose_backend(backend, layers),
        keeps_memory=reuse == "graphs",
        allow_unused_input=allow_unused_input,
    )
    with buffers_kept(modules):
        made.run(args, sample_kwargs, num_warmup_iters, pre_warmup_hook, post_warmup_hook)
    calls = made.callables(
        clones_param_grads=clone_param_grads_on_return, defers_weight_grads=defer_weight_grads
    )
    if order is not None:
        return tuple(calls)
    for module, call in zip(modules, calls, strict=True):
        module.forward = call
        module.reset_graphs = call.reset  # type: ignore[assignment]
    return modules[0] if is_single else tuple(modules)


def describe_layers(
    modules: list[nn.Module],
    args: list[tuple[Any, ...]],
    kwargs: Sequence[Kwargs] | None,
    *,
    run_pre_hooks: bool,
) -> list[CapturedLayer]:
    """What there is to capture of each module; see `make_graphed_callables` for the errors."""
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
    if any(not module.training for module in modules):
        raise ValueError("modules are captured for training; call train() on all of them")
    given = [{}] * len(modules) if kwargs is None else [dict(one) for one in kwargs]
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
    """The plan of a capture; see `make_graphed_callables` for the errors."""
    numbers: dict[tuple[TensorSpec, ...], int] = {}
    signature = [numbers.setdefault(layer.input_specs, len(numbers)) for layer in layers]
    if order is None:
        order, per_chunk = [1, -1], [len(layers)]
    else:
        num_chunks = max((int(abs(entry)) for entry in order), default=1)
        if num_layers_per_chunk is None and len(layers) % max(num_chunks, 1):
            raise ValueError(
                f"{len(layers)} modules do not divide into {num_chunks} equal chunks; give "
                "num_layers_per_chunk"
            )
        if num_layers_per_chunk is None:
            num_layers_per_chunk = len(layers) // max(num_chunks, 1)
        if isinstance(num_layers_per_chunk, int):
            per_chunk = [num_layers_per_chunk] * num_chunks
        else:
            per_chunk = list(num_layers_per_chunk)
        if sum(per_chunk) != len(layers):
            raise ValueError(
                f"num_layers_per_chunk = {per_chunk} counts {sum(per_chunk)} modules, but there "
                f"are {len(layers)}"
            )
    # What a layer returns is known after warmup only; its gradient's buffers are its own.
    return plan_capture(
        order,
        num_layers_per_chunk=per_chunk,
        input_signature=signature,
        output_signature=list(range(len(layers))),
        reuse=reuse,
    )


def _choose_backend(
    backend: GraphBackend | str | None, layers: Sequence[CapturedLayer]
) -> GraphBackend:
    if isinstance(backend, GraphBackend):
        return backend
    tensors = [spec.device for layer in layers for spec in layer.input_specs]
    tensors += [param.device for layer in layers for param in layer.params]
    return graph_backend(backend, device=tensors[0] if tensors else "cpu")


class Capturing:
    """One capture of all layers of a plan."""

    def __init__(
        self,
        modules: list[nn.Module],
        layers: list[CapturedLayer],
        plan: CapturePlan,
        *,
        backend: GraphBackend,
        keeps_memory: bool,
        allow_unused_input: bool,
    ) -> None:
        self._modules = modules
        self._layers = layers
        self._plan = plan
        self._backend = backend
        self._keeps_memory = keeps_memory
        self._allow_unused_input = allow_unused_input
        self._sites: dict[tuple[int, int], LayerSite] = {}
        self._split = {c.layer for c in plan.captures if c.kind == StepKind.BACKWARD_WEIGHT}

    def run(
        self,
        args: list[tuple[Any, ...]],
        kwargs: Sequence[Kwargs] | None,
        num_warmup_iters: int,
        before: Callable[[], None] | None,
        after: Callable[[], None] | None,
    ) -> Capturing:
        """Warm up and capture; on an error everything is as before, see `CaptureError`."""
        given = [{}] * len(args) if kwargs is None else list(kwargs)
        at = "the start"
        try:
            if before is not None:
                before()
            with self._backend.warmup():
                for layer, one, named in zip(self._layers, args, given, strict=True):
                    at = f"the warmup of {layer.name}"
                    inputs = layer.flatten_inputs(one, dict(named))
                    for _ in range(max(num_warmup_iters, 1)):
                        self._warm_up(layer, inputs)
            if after is not None:
                after()
            self._allocate()
            with self._backend.capturing():
                for capture in self._plan.captures:
                    at = (
                        f"the capture of the {capture.kind.name.lower()} pass of "
                        f"{self._layers[capture.layer].name}"
                    )
                    self._capture(capture)
        except Exception as error:
            for site in self._sites.values():
                site.reset()
            if isinstance(error, (TypeError, CaptureError)):
                raise
            line = failing_line(error)
            raise CaptureError(
                f"{at} failed: {type(error).__name__}: {error}" + (f" (at {line})" if line else "")
            ) from error
        for site in self._sites.values():
            site.results = None
        return self

    def _warm_up(self, layer: CapturedLayer, inputs: Sequence[Tensor]) -> None:
        """Run a layer on its sample and learn which tensors get gradients."""
        own = [one.detach().requires_grad_(one.requires_grad) for one in inputs]
        results = layer.run(own)
        layer.output_specs = tuple(None if r is None else TensorSpec.of(r) for r in results)
        flowing = [r for r in results if r is not None and r.requires_grad]
        wanted = [one for one in own if one.requires_grad] + layer.params
        grads: Sequence[Maybe] = [None] * len(wanted)
        if flowing and wanted:
            grads = torch.autograd.grad(
                flowing, wanted, [torch.zeros_like(r) for r in flowing], allow_unused=True
            )
        found = {id(one): grad is not None for one, grad in zip(wanted, grads, strict=True)}
        layer.used_inputs = [found.get(id(one), False) for one in own]
        unused = [i for i, one in enumerate(own) if one.requires_grad and not found[id(one)]]
        if unused and not self._allow_unused_input:
            raise CaptureError(
                f"input {unused[0]} of {layer.name} requires grad but does not influence the "
                "results; pass allow_unused_input=True to give it no gradient"
            )
        # Some gradients go to main_grad instead of autograd, which still visits the parameter.
        layer.params = [p for p in layer.params if found[id(p)] or main_grad_of(p) is not None]

    def _allocate(self) -> None:
        """Make static inputs and output gradients, one set per buffer of the plan."""
        inputs: dict[int, list[Tensor]] = {}
        grads: dict[int, list[Maybe]] = {}
        for capture in self._plan.captures:
            layer = self._layers[capture.layer]
            number = capture.buffer(BufferRole.INPUT)
            if number not in inputs:
                inputs[number] = [spec.empty() for spec in layer.input_specs]
                _clear(inputs[number])
            if capture.kind == StepKind.FORWARD:
                continue
            number = capture.buffer(BufferRole.OUTPUT_GRAD)
            if number not in grads:
                grads[number] = [
                    torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
                    if spec is not None and spec.requires_grad
                    else None
                    for spec in layer.output_specs
                ]
            self._sites[capture.layer, capture.slot] = LayerSite(
                layer=layer,
                inputs=inputs[capture.buffer(BufferRole.INPUT)],
                output_grads=grads[number],
                splits_backward=capture.layer in self._split,
            )

    def _capture(self, capture: Capture) -> None:
        site = self._sites[capture.layer, capture.slot]
        if capture.kind == StepKind.FORWARD:
            site.forward = self._backend.capture(site.run_forward)
        elif capture.kind == StepKind.BACKWARD:
            site.backward = self._backend.capture(
                lambda: site.run_backward(keep=self._keeps_memory)
            )
        else:
            site.weight = self._backend.capture(lambda: site.run_weight(keep=self._keeps_memory))

    @property
    def plan(self) -> CapturePlan:
        """Which graphs and buffers there are."""
        return self._plan

    def static_bytes(self) -> dict[str, int]:
        """Bytes of what stays at its place: static inputs, gradients given, results."""
        sites = list(self._sites.values())
        graphs = [graph for site in sites for graph in site.graphs()]
        return {
            "static_inputs": _bytes_of(t for site in sites for t in site.inputs),
            "output_grads": _bytes_of(t for site in sites for t in site.output_grads),
            "results": _bytes_of(t for graph in graphs for t in graph.results),
        }

    def reset(self) -> None:
        """Give up all graphs and static tensors."""
        for site in self._sites.values():
            site.reset()
        self._sites.clear()

    def callables(
        self, *, clones_param_grads: bool, defers_weight_grads: bool
    ) -> list[GraphedCallable]:
        """Chunk by chunk, microbatch by microbatch, layer by layer."""
        state = ReplayState(self._backend)
        by_chunk: dict[int, list[int]] = {}
        for capture in self._plan.captures:
            by_chunk.setdefault(capture.chunk, [])
            if capture.layer not in by_chunk[capture.chunk]:
                by_chunk[capture.chunk].append(capture.layer)
        calls = []
        for chunk in sorted(by_chunk):
            layers = sorted(by_chunk[chunk])
            for microbatch in range(self._plan.num_microbatches):
                slot = microbatch % self._plan.slots_per_chunk[chunk]
                calls += [
                    GraphedCallable(
                        self._modules[layer],
                        self._sites[layer, slot],
                        state,
                        is_first_of_chunk=layer == layers[0],
                        clones_param_grads=clones_param_grads,
                        defers_weight_grads=defers_weight_grads,
                    )
                    for layer in layers
                ]
        return calls


@contextmanager
def buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Buffers of modules, such as running counts, are after ``with`` what they were before."""
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
    kept = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _bytes_of(tensors: Iterable[Maybe]) -> int:
    """Bytes of the memory behind some tensors, each counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor is not None
    }
    return sum(storages.values())


def _clear(tensors: Sequence[Tensor]) -> None:
    """Static inputs are captured on values that no module chokes on."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()
