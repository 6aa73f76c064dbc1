"""``make_graphed_callables``: capture of modules, replay by calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from megacore.graphs.backend import GraphBackend, graph_backend
from megacore.graphs.capturing import Capturing
from megacore.graphs.layer import CapturedLayer
from megacore.graphs.options import CaptureOptions, Kwargs, describe_layers, plan_layers
from megacore.graphs.replay import GraphedCallable
from megacore.graphs.transformer_engine import Delegated, TransformerEngineBackend


def make_graphed_callables(
    callables: nn.Module | Sequence[nn.Module],
    sample_args: Sequence[Any],
    *,
    sample_kwargs: Kwargs | Sequence[Kwargs] | None = None,
    order: Sequence[float] | None = None,
    num_layers_per_chunk: int | Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Capture modules in graphs that their calls replay.

    Without ``order``, the ``forward`` of each module is replaced in place by one that replays. Run
    one call with its backward pass at a time. With ``order``, modules are unchanged and there is
    one callable per module and microbatch; call them in the order of the list.

    A replay copies its arguments into static tensors and returns views of static tensors, which
    are valid until the backward pass of that call. A captured backward pass computes the gradients
    when autograd reaches the call, so parameter hooks run at every replay. Modules in evaluation
    mode get graphs of their forward pass only, for calls in that mode.

    Args:
        callables: A module, or the modules of all chunks in order.
        sample_args: For one module its positional arguments; for several a tuple of them for each.
            Tensors, possibly nested; every call must have the same shapes, strides and dtypes.
        sample_kwargs: The same for keyword arguments: a mapping, or one for each module.
        order: The order list of a schedule, see ``plan_capture``.
        num_layers_per_chunk: With ``order``: modules per chunk. Default: equally many.
        **options: See :class:`CaptureOptions`.

    Returns:
        Without ``order`` the module, or a tuple of them. With ``order`` a tuple of
        ``GraphedCallable``: chunk by chunk, in it microbatch by microbatch, in it layer by layer.

    Raises:
        TypeError: If something is not a module, a sample argument not a tensor, or an option
            unknown.
        ValueError: If modules, arguments, options and order list do not fit each other.
        CaptureError: If a module cannot be captured; the message has the line. Modules, buffers and
            random states are then restored.

    Sync:
        Waits for the device before and after. A replay does not wait.

    Source:
        Transformer Engine, ``make_graphed_callables``.

    Example:
        >>> import torch
        >>> module = torch.nn.Linear(2, 2)
        >>> x = torch.ones(3, 2)
        >>> expected = module(x)
        >>> graphed = make_graphed_callables(module, (x,), backend="emulated")
        >>> torch.equal(graphed(x), expected)
        True
    """
    chosen = CaptureOptions(**options)
    is_single = isinstance(callables, nn.Module)
    modules = [callables] if isinstance(callables, nn.Module) else list(callables)
    args = [_as_args(one) for one in ([sample_args] if is_single else sample_args)]
    named = [sample_kwargs] if isinstance(sample_kwargs, Mapping) else sample_kwargs
    with _eager(modules):
        layers = describe_layers(modules, args, named, run_pre_hooks=chosen.run_pre_hooks)
        chosen.check(len(modules))
        if order is None and num_layers_per_chunk is not None:
            raise ValueError(
                "num_layers_per_chunk belongs to an order list; give order, or leave it out"
            )
        for layer in layers if order is None else ():
            layer.hooked = layer.hooked[1:]  # a call of the module runs its own hooks
        calls: Sequence[Any] = capture_layers(
            modules,
            layers,
            args,
            named,
            order,
            num_layers_per_chunk,
            options=chosen,
            backend=_choose_backend(chosen, layers),
        ).callables()
    if order is not None:
        return tuple(calls)
    for module, call in zip(modules, calls, strict=True):
        module.forward = call
        module.reset_graphs = call.reset
    return modules[0] if is_single else tuple(modules)


def _as_args(given: Any) -> tuple[Any, ...]:
    """Return the positional arguments of one module."""
    if isinstance(given, (tuple, list)):
        return tuple(given)
    raise TypeError(
        f"sample_args of a module are a {type(given).__name__}; give a tuple of its positional "
        "arguments, (x,) for one"
    )


@contextmanager
def _eager(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Temporarily restore the original forward of modules that were captured before."""
    captured = {
        module: call
        for module in modules
        if isinstance(call := getattr(module, "forward", None), GraphedCallable)
    }
    for module, call in captured.items():
        module.forward = call.eager
    try:
        yield
    finally:
        for module, call in captured.items():
            module.forward = call


def capture_layers(
    modules: list[nn.Module],
    layers: list[CapturedLayer],
    args: list[tuple[Any, ...]],
    kwargs: Sequence[Kwargs] | None,
    order: Sequence[float] | None,
    num_layers_per_chunk: int | Sequence[int] | None,
    *,
    options: CaptureOptions,
    backend: GraphBackend,
) -> Capturing | Delegated:
    """Capture described modules; for arguments and errors, see `make_graphed_callables`."""
    if isinstance(backend, TransformerEngineBackend):
        return backend.delegate(modules, layers, order, num_layers_per_chunk, options=options)
    plan = plan_layers(layers, order, num_layers_per_chunk, options.reuse or "graphs")
    any_order = order is None and options.pool is None
    capturing = Capturing(
        modules, layers, plan, options=options, backend=backend, any_order=any_order
    )
    return capturing.run(args, kwargs)


def _choose_backend(options: CaptureOptions, layers: Sequence[CapturedLayer]) -> GraphBackend:
    if isinstance(options.backend, GraphBackend):
        return options.backend
    if options.backend == TransformerEngineBackend.name:
        return TransformerEngineBackend()
    devices = [spec.device for layer in layers for spec in layer.input_specs]
    devices += [param.device for layer in layers for param in layer.params]
    return graph_backend(
        options.backend,
        device=devices[0] if devices else "cpu",
        pool=options.pool,
        generators=options.generators,
    )
