"""Backend that delegates captures of modules to Transformer Engine, where it is installed.

Transformer Engine has one graph per microbatch and records real graphs only. Unsupported requests
raise an error here, with an alternative, before Transformer Engine is called.

Source:
    ``transformer_engine.pytorch.make_graphed_callables`` of version 2.20: names and meaning of its
    arguments, the order of its results, and the orders it accepts.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from megacore.graphs.backend import CapturedGraph, GraphBackend, Results
from megacore.graphs.capture_plan import BufferRole, CapturePlan
from megacore.graphs.capturing import buffers_kept
from megacore.graphs.errors import CaptureError
from megacore.graphs.layer import CapturedLayer
from megacore.graphs.options import CaptureOptions, plan_layers, split_into_chunks

_MODULE = "transformer_engine.pytorch"


class TransformerEngineBackend(GraphBackend):
    """Delegates captures of modules to Transformer Engine.

    Raises:
        ValueError: If Transformer Engine is not installed.
    """

    name = "transformer_engine"
    poisons = False

    def __init__(self) -> None:
        try:
            self._make: Callable[..., Any] = importlib.import_module(_MODULE).make_graphed_callables
        except (ImportError, AttributeError) as error:
            raise ValueError(
                'graph backend "transformer_engine" needs the package transformer-engine '
                f"(pip install transformer-engine[pytorch]), which is not there ({error}); install "
                "it, or take cuda"
            ) from error

    def capture(self, function: Callable[[], Results], *, apart: Hashable = None) -> CapturedGraph:
        """Raise an error: Transformer Engine captures modules, not functions."""
        del function, apart
        raise ValueError(
            "Transformer Engine captures modules, and no whole steps; take the cuda backend"
        )

    def delegate(
        self,
        modules: list[nn.Module],
        layers: list[CapturedLayer],
        order: Sequence[float] | None,
        num_layers_per_chunk: int | Sequence[int] | None,
        *,
        options: CaptureOptions,
    ) -> Delegated:
        """Capture modules with Transformer Engine.

        Raises:
            ValueError: If Transformer Engine does not support the request.
            CaptureError: If the capture fails.
        """
        _check_options(options)
        plan = plan_layers(layers, order, num_layers_per_chunk, options.reuse or "buffers")
        arguments = _arguments(options)
        num_microbatches, per_chunk, is_expanded = 1, [len(layers)], False
        if order is not None:
            per_chunk = split_into_chunks(len(layers), order, num_layers_per_chunk)
            reuses = options.reuse != "none" and layers[0].trains
            if reuses:
                _check_reuse(layers, order)
            is_expanded = any(entry != int(entry) for entry in order)
            if is_expanded:
                _check_halves(modules, order, options)
            elif plan.peak_per_chunk == [1]:
                order = [1, -1]  # one live microbatch at a time: one set of graphs
            num_microbatches = list(order).count(1)
            arguments |= {
                "_order": _expanded(order, per_chunk) if is_expanded else [int(e) for e in order],
                "_num_layers_per_chunk": [1] * len(layers) if is_expanded else per_chunk,
                "_reuse_graph_input_output_buffers": reuses,
            }
        where = _where(per_chunk, num_microbatches)
        # The order of Transformer Engine's results: layer by layer if each layer is a chunk.
        its_order = sorted(where) if is_expanded else where
        samples = [layers[layer].sample() for layer, _ in its_order]
        arguments["sample_kwargs"] = tuple(named for _, named in samples)
        found = self._capture(modules, layers, tuple(args for args, _ in samples), arguments)
        made = {
            place: DelegatedCallable(modules[place[0]], layers[place[0]], replay)
            for place, replay in zip(its_order, found, strict=True)
        }
        calls = [made[place] for place in where]
        return Delegated(plan, layers, calls * (plan.num_microbatches // num_microbatches))

    def _capture(
        self, modules: list[nn.Module], layers: list[CapturedLayer], args: Any, arguments: Any
    ) -> list[Any]:
        known = inspect.signature(self._make).parameters
        missing = [name for name in arguments if name not in known]
        if missing:
            raise ValueError(
                f"the installed Transformer Engine has no argument {missing[0]} of "
                "make_graphed_callables; install version 2.20, or leave that option out"
            )
        try:
            with ExitStack() as stack:
                stack.enter_context(buffers_kept(modules))
                for module, layer in zip(modules, layers, strict=True):
                    stack.callback(_restore, module, dict(module.__dict__))
                    stack.enter_context(layer.without_hooks())
                    stack.enter_context(_without_accumulation_hooks(layer.params))
                found = self._make(tuple(modules), args, **arguments)
                # Without an order list, Transformer Engine sets them as attributes of the modules.
                return [
                    _Replay(getattr(one, "forward", one), one.backward_dw, one.reset)
                    for one in found
                ]
        except Exception as error:
            raise CaptureError(
                f"Transformer Engine could not capture: {type(error).__name__}: {error}",
                is_abrupt=True,  # the error may have occurred during warmup
            ) from error


class _Replay(NamedTuple):
    forward: Callable[..., Any]
    backward_dw: Callable[[], None]
    reset: Callable[[], None]


class DelegatedCallable:
    """One module that Transformer Engine captured, for one microbatch.

    The call signature, checks and pre-hooks are those of ``GraphedCallable``.
    """

    def __init__(self, module: nn.Module, layer: CapturedLayer, replay: _Replay) -> None:
        self._module = module
        self._layer = layer
        self._replay = replay

    def __call__(
        self, *args: Any, cuda_graph_stream: Any = None, cuda_graph_event: Any = None, **kwargs: Any
    ) -> Any:
        """Replay the forward pass, or run the module if the capture was for another mode."""
        layer, trains = self._layer, self._module.training
        if trains != layer.trains or (trains and not torch.is_grad_enabled()):
            return layer.forward(*args, **kwargs)
        layer.flatten_inputs(args, kwargs)
        layer.run_hooks()
        if cuda_graph_stream is not None:
            kwargs["cuda_graph_stream"] = cuda_graph_stream
        if cuda_graph_event is not None:
            kwargs["cuda_graph_event"] = cuda_graph_event
        return self._replay.forward(*args, **kwargs)

    def backward_dw(self) -> None:
        """Replay the weight half, where there is one."""
        self._replay.backward_dw()

    def reset(self) -> None:
        """Release the graphs; later calls raise an error."""
        self._replay.reset()


class Delegated:
    """A capture by Transformer Engine, with the interface of a finished ``Capturing``.

    Attributes:
        plan: The plan, as if every microbatch had its own graphs.
    """

    def __init__(
        self, plan: CapturePlan, layers: list[CapturedLayer], calls: list[DelegatedCallable]
    ) -> None:
        self.plan = plan
        self._layers = layers
        self._calls = calls

    def callables(self) -> list[DelegatedCallable]:
        """Return the callables ordered by chunk, then microbatch, then layer."""
        return self._calls

    def static_bytes(self) -> dict[str, int]:
        """Return the bytes of static inputs; other uses are unknown and count 0."""
        by_buffer: dict[int, int] = {}
        for use in self.plan.uses:
            if use.role == BufferRole.INPUT:
                specs = self._layers[use.layer].input_specs
                by_buffer[use.buffer] = sum(spec.num_bytes for spec in specs)
        inputs = sum(by_buffer.values())
        return {"static_inputs": inputs, "output_grads": 0, "results": 0, "kept": 0}

    def reset(self) -> None:
        """Release all graphs."""
        for call in dict.fromkeys(self._calls):
            call.reset()


def _check_options(options: CaptureOptions) -> None:
    if options.reuse == "graphs":
        raise ValueError(
            'in Transformer Engine every microbatch has its own graphs, so reuse = "graphs" is not '
            'to be had; set reuse = "buffers", or take the cuda backend'
        )
    if options.generators:
        raise ValueError(
            "Transformer Engine registers the generators of its own random-number tracker and no "
            "others; add them there, or take the cuda backend"
        )


def _check_reuse(layers: list[CapturedLayer], order: Sequence[float]) -> None:
    """Reject layers whose inputs Transformer Engine would share although their specs differ."""
    strict: dict[Any, Any] = {}
    for layer in layers:
        specs = layer.input_specs
        loose = tuple((spec.shape, spec.dtype) for spec in specs)
        if strict.setdefault(loose, specs) != specs:
            raise ValueError(
                f"{layer.name} has inputs of the shapes and dtypes of another module, but of other "
                "strides or requires_grad; Transformer Engine would let them share memory, so set "
                'reuse = "none"'
            )
    since: dict[int, bool] = {}  # by chunk: a forward pass followed its last backward pass
    for position, entry in enumerate(order):
        chunk = int(abs(entry))
        if entry > 0:
            since = dict.fromkeys(since, True)
        elif entry == int(entry):
            since[chunk] = False
        elif since.get(chunk):
            raise ValueError(
                f"order position {position}: {entry:g} comes after a forward pass to which "
                "Transformer Engine has given the inputs that this weight half reads; set reuse = "
                '"none", or take the cuda backend'
            )


def _check_halves(
    modules: list[nn.Module], order: Sequence[float], options: CaptureOptions
) -> None:
    if not options.defer_weight_grads:
        raise ValueError(
            "in Transformer Engine weight halves run in backward_dw() and not when autograd asks; "
            "set defer_weight_grads = True, or take the cuda backend"
        )
    for number, module in enumerate(modules):
        if not any(hasattr(inner, "need_backward_dw") for inner in module.modules()):
            raise ValueError(
                f"module {number} ({type(module).__name__}) has no part that can delay its weight "
                "gradients in Transformer Engine (its own layers with delay_wgrad_compute = True); "
                "take the cuda backend, which splits any module, or a schedule without weight "
                "halves"
            )
    waiting: dict[int, int] = {}
    for position, entry in enumerate(order):
        chunk = int(abs(entry))
        if entry < 0:
            waiting[chunk] = waiting.get(chunk, 0) + (1 if entry == int(entry) else -1)
            if waiting[chunk] > 1:
                raise ValueError(
                    f"order position {position}: {entry:g} comes before the weight half of the "
                    f"last backward pass of chunk {chunk}, of which Transformer Engine remembers "
                    "one; take the cuda backend"
                )


def _expanded(order: Sequence[float], per_chunk: Sequence[int]) -> list[float]:
    """Return the order list with one chunk per layer, as needed for weight halves.

    Example:
        >>> _expanded([1, 2, -2, -2.5, -1, -1.5], [1, 2])
        [1, 2, 3, -3, -2, -3.5, -2.5, -1, -1.5]
    """
    firsts = [1 + sum(per_chunk[:chunk]) for chunk in range(len(per_chunk))]
    found: list[float] = []
    for entry in order:
        chunk = int(abs(entry)) - 1
        layers = range(firsts[chunk], firsts[chunk] + per_chunk[chunk])
        if entry > 0:
            found += layers
        else:
            half = 0.5 if entry != int(entry) else 0
            found += [-layer - half for layer in reversed(layers)]
    return found


def _where(per_chunk: Sequence[int], num_microbatches: int) -> list[tuple[int, int]]:
    """Return (layer, microbatch) pairs ordered by chunk, then microbatch, then layer."""
    found, first = [], 0
    for count in per_chunk:
        found += [(first + n, m) for m in range(num_microbatches) for n in range(count)]
        first += count
    return found


def _arguments(options: CaptureOptions) -> dict[str, Any]:
    """Return Transformer Engine's arguments; defaults are omitted unless all versions have them."""
    hooks = options.capture_time_hooks
    given = {
        "retain_graph_in_backward": options.retain_graph_in_backward or None,
        "clone_param_grads_on_return": None if options.clone_param_grads_on_return else False,
        "pre_warmup_hook": options.pre_warmup_hook,
        "post_warmup_hook": options.post_warmup_hook,
        "capture_time_hooks": None if hooks is None else list(hooks),
        "pool": options.pool,
    }
    return {
        "num_warmup_iters": max(options.num_warmup_iters, 1),
        "allow_unused_input": options.allow_unused_input,
        **{name: value for name, value in given.items() if value is not None},
    }


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Remove the attributes that a capture has set on a module."""
    module.__dict__.clear()
    module.__dict__.update(attributes)


@contextmanager
def _without_accumulation_hooks(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Disable accumulation hooks, so that captured backward passes start no reduction."""
    hooks = [(p, p._post_accumulate_grad_hooks) for p in params]
    for param, _ in hooks:
        param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for param, found in hooks:
            param._post_accumulate_grad_hooks = found
