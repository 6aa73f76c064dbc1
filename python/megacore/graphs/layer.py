"""Captured layers: forms of arguments and results, static tensors and graphs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megacore.graphs.backend import CapturedGraph
from megacore.graphs.errors import FormError, ReplayError
from megacore.graphs.static_tensors import KeptTensors, TensorSpec, check_input
from megacore.ops.split_backward import DeferredWeightGrads, backward_inputs

Maybe = Tensor | None


@dataclass(kw_only=True)
class CapturedLayer:
    """A module and the form of its arguments and results.

    Attributes:
        name: For messages.
        forward: The module's own forward.
        kwarg_names: Keyword arguments, in the order of their static inputs.
        input_tree: Nesting of positional and keyword arguments.
        input_specs: Flat specifications of the argument tensors.
        params: Parameters that require grad; after warmup, those that got a gradient.
        used_inputs: For each input tensor, whether it got a gradient in warmup.
        trains: Whether the module was in training mode; otherwise there is no backward pass.
        hooked: Modules whose forward pre-hooks run before each replay, not inside the graph.
        output_tree: Nesting of results; known after warmup.
        output_specs: Flat specifications of the results; ``None`` where the result is ``None``.
    """

    name: str
    forward: Callable[..., Any]
    kwarg_names: tuple[str, ...]
    input_tree: TreeSpec
    input_specs: tuple[TensorSpec, ...]
    params: list[nn.Parameter]
    trains: bool = True
    hooked: tuple[nn.Module, ...] = ()
    used_inputs: list[bool] = field(default_factory=list)
    output_tree: TreeSpec | None = None
    output_specs: tuple[TensorSpec | None, ...] = ()

    @classmethod
    def of(
        cls, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CapturedLayer:
        """Describe a module from sample arguments.

        Raises:
            TypeError: If an argument contains a value that is not a tensor.
        """
        flat, tree = tree_flatten((args, dict(kwargs)))
        for value in flat:
            if not isinstance(value, Tensor):
                raise FormError(
                    f"{name}: sample arguments must be tensors (nested in tuples, lists or dicts), "
                    f"but one is {value!r}; bind it before capture, since a graph freezes it"
                )
        return cls(
            name=name,
            forward=module.forward,
            kwarg_names=tuple(kwargs),
            input_tree=tree,
            input_specs=tuple(TensorSpec.of(value) for value in flat),
            params=[param for param in module.parameters() if param.requires_grad],
            trains=module.training,
            hooked=tuple(module.modules()),
        )

    def sample(self) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
        """Return arguments for a call, filled with zeros."""
        args, named = tree_unflatten([spec.zeros() for spec in self.input_specs], self.input_tree)
        return args, named

    def flatten_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors of a call in the order of the static inputs.

        Raises:
            TypeError: If a keyword argument is missing or unknown.
            ReplayError: If the arguments nest differently, or a tensor differs in form.
        """
        missing = [name for name in self.kwarg_names if name not in kwargs]
        unknown = [name for name in kwargs if name not in self.kwarg_names]
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)} too"
            raise FormError(
                f"{self.name} was captured with the keyword arguments "
                f"{', '.join(self.kwarg_names) or '(none)'}; this call {what}"
            )
        flat, tree = tree_flatten((args, {name: kwargs[name] for name in self.kwarg_names}))
        if tree != self.input_tree:
            raise ReplayError(
                f"{self.name} was captured with arguments of another structure: {self.input_tree}, "
                f"now {tree}"
            )
        for number, (value, spec) in enumerate(zip(flat, self.input_specs, strict=True)):
            check_input(self.name, number, value, spec)
        return flat

    def run_hooks(self) -> None:
        """Run the forward pre-hooks of all modules inside, outside of any graph.

        Hooks get their module and no arguments, since a replay calls no module.
        """
        for module in self.hooked:
            for hook in list(module._forward_pre_hooks.values()):
                hook(module, ())

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Disable module pre-hooks and parameter gradient hooks inside ``with``.

        These hooks run outside of the graphs: pre-hooks before a replay, parameter hooks when
        autograd accumulates the gradients that a replay returned.
        """
        taken = [(m, m._forward_pre_hooks) for m in self.hooked if m._forward_pre_hooks]
        on_grads = [(p, p._backward_hooks) for p in self.params if p._backward_hooks]
        for module, _ in taken:
            module._forward_pre_hooks = OrderedDict()
        for param, _ in on_grads:
            param._backward_hooks = None
        try:
            yield
        finally:
            for module, hooks in taken:
                module._forward_pre_hooks = hooks
            for param, grad_hooks in on_grads:
                param._backward_hooks = grad_hooks

    def run(self, inputs: Sequence[Tensor]) -> list[Maybe]:
        """Call the module on flat inputs and return its flat results, with autograd history."""
        args, kwargs = tree_unflatten(list(inputs), self.input_tree)
        with torch.set_grad_enabled(self.trains), self.without_hooks():
            results = self.forward(*args, **kwargs)
        flat, tree = tree_flatten(results)
        for value in flat:
            if value is not None and not isinstance(value, Tensor):
                raise FormError(f"{self.name} returned {value!r}; a graph returns tensors or None")
        if self.output_tree is None:
            self.output_tree = tree
        elif tree != self.output_tree:
            raise FormError(f"{self.name} returned {tree}, but {self.output_tree} before")
        return flat

    @property
    def grad_inputs(self) -> list[int]:
        """Indices of the inputs whose gradient is computed."""
        return [i for i, used in enumerate(self.used_inputs) if used]


@dataclass(kw_only=True)
class LayerSite:
    """One set of graphs of a layer, with their static tensors.

    Attributes:
        layer: The layer.
        inputs: Static inputs.
        output_grads: Static gradients of the results; ``None`` where there is none.
        kept: Tensors that the backward pass keeps for the weight half; ``None`` without a split.
        results: Results of the last run of the captured forward function, with history.
        deferred: The weight half of the last run of the captured backward function.
        generation: Count of forward passes, to detect a backward pass that is too late.
        loaded: The forward pass whose output gradients are in ``output_grads``.
        backward_done: The forward pass whose backward pass was replayed last.
        finished: The forward pass after which the static tensors were released.
        param_grads: Parameter gradients of an unsplit backward graph, not yet returned to autograd.
    """

    layer: CapturedLayer
    inputs: list[Tensor]
    output_grads: list[Maybe] = field(default_factory=list)
    kept: KeptTensors | None = None
    forward: CapturedGraph | None = None
    backward: CapturedGraph | None = None
    weight: CapturedGraph | None = None
    results: list[Maybe] | None = None
    deferred: DeferredWeightGrads | None = None
    generation: int = 0
    loaded: int = -1
    backward_done: int = -1
    finished: int = -1
    param_grads: tuple[Maybe, ...] | None = None

    @property
    def splits_backward(self) -> bool:
        """True if the gradients of parameters have a graph of their own."""
        return self.kept is not None

    def run_forward(self) -> list[Maybe]:
        """Run the forward pass on the static inputs; this function is captured."""
        self.results = self.layer.run(self.inputs)
        return [None if r is None else r.detach() for r in self.results]

    def run_backward(self, *, keep: bool) -> list[Maybe]:
        """Compute gradients of inputs, then of parameters; this function is captured.

        If the backward pass is split, :meth:`run_weight` computes those of parameters.

        Args:
            keep: Keep the tensors that the forward pass saved.
        """
        inputs = [self.inputs[index] for index in self.layer.grad_inputs]
        results, grads = self._flowing()
        with self.layer.without_hooks():  # of a recomputed part
            if self.kept is not None:
                edges = [get_gradient_edge(result) for result in results]
                found, self.deferred = backward_inputs(edges, grads, inputs)
                self.kept.hold(self.deferred)
                return found
            wanted = [*inputs, *self.layer.params]
            if not results or not wanted:
                return [None] * len(wanted)
            return list(
                torch.autograd.grad(results, wanted, grads, retain_graph=keep, allow_unused=True)
            )

    def run_weight(self) -> list[Maybe]:
        """Compute the gradients of the parameters for a weight half; this function is captured."""
        deferred, self.deferred = self.deferred, None
        assert deferred is not None
        with self.layer.without_hooks():
            return deferred.grads(self.layer.params)

    def _flowing(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the results that require grad, with the static tensors of their gradients."""
        pairs = [
            (result, grad)
            for result, grad in zip(self.results or [], self.output_grads, strict=True)
            if result is not None and grad is not None
        ]
        return [result for result, _ in pairs], [grad for _, grad in pairs]

    def static_tensors(self) -> list[Maybe]:
        """Return all static tensors that a backward pass reads and a later pass may overwrite."""
        results = self.forward.results if self.forward is not None else ()
        kept = self.kept.tensors if self.kept is not None else []
        return [*self.inputs, *results, *self.output_grads, *kept]

    def disown(self, *, param_grads: bool) -> None:
        """Release the memory of results to later captures, once all passes are captured.

        Args:
            param_grads: Release parameter gradients too; replays clone them at once.
        """
        assert self.forward is not None
        assert self.backward is not None
        self.results = None
        self.forward.disown()
        if param_grads and self.weight is not None:
            self.weight.disown()
        elif param_grads:
            self.backward.disown(len(self.layer.grad_inputs))

    def graphs(self) -> list[CapturedGraph]:
        """Return the graphs that exist."""
        return [g for g in (self.forward, self.backward, self.weight) if g is not None]

    def reset(self) -> None:
        """Release the graphs."""
        for graph in self.graphs():
            graph.reset()
        self.forward = self.backward = self.weight = None
        self.results = self.param_grads = self.deferred = None
        self.kept = None
