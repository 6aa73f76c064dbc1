"""A captured module: what it takes and gives, and its sets of static tensors and graphs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megacore.graphs.backend import CapturedGraph
from megacore.graphs.errors import ReplayError
from megacore.graphs.tensors import TensorSpec

Maybe = Tensor | None


@dataclass(kw_only=True)
class CapturedLayer:
    """A module and the form of its arguments and results.

    Attributes:
        name: For messages.
        forward: The module's own forward.
        kwarg_names: Keyword arguments, in the order of their static inputs.
        input_tree: How positional and keyword arguments nest.
        input_specs: Their tensors, flat.
        params: Parameters that require grad; after warmup those that got one.
        used_inputs: For each tensor whether it got a gradient in warmup.
        hooked: Modules whose forward pre-hooks run before each replay instead of inside.
        output_tree: How results nest; known after warmup.
        output_specs: Their tensors, flat; ``None`` where the result is ``None``.
    """

    name: str
    forward: Callable[..., Any]
    kwarg_names: tuple[str, ...]
    input_tree: TreeSpec
    input_specs: tuple[TensorSpec, ...]
    params: list[nn.Parameter]
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
            TypeError: If an argument holds something else than tensors.
        """
        flat, tree = tree_flatten((args, dict(kwargs)))
        for value in flat:
            if not isinstance(value, Tensor):
                raise TypeError(
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
            hooked=tuple(module.modules()),
        )

    def flatten_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of a call in the order of the static inputs.

        Raises:
            TypeError: If a keyword argument is missing or unknown.
            ReplayError: If the arguments nest differently, or a tensor differs in form.
        """
        missing = [name for name in self.kwarg_names if name not in kwargs]
        unknown = [name for name in kwargs if name not in self.kwarg_names]
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)} too"
            raise TypeError(
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
            difference = (
                TensorSpec.of(value).difference(spec)
                if isinstance(value, Tensor)
                else (f"{value!r}, not a tensor")
            )
            if difference:
                raise ReplayError(
                    f"{self.name} was captured with another input {number}: now {difference}; "
                    "capture again for other shapes"
                )
        return flat

    def run_hooks(self) -> None:
        """Run the forward pre-hooks of all modules inside, outside of any graph.

        Hooks see their module and no arguments, as no module is called in a replay.
        """
        for module in self.hooked:
            for hook in list(module._forward_pre_hooks.values()):
                hook(module, ())

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Inside ``with``, calls of the modules inside do not run their pre-hooks."""
        taken = [(m, m._forward_pre_hooks) for m in self.hooked if m._forward_pre_hooks]
        for module, _ in taken:
            module._forward_pre_hooks = OrderedDict()
        try:
            yield
        finally:
            for module, hooks in taken:
                module._forward_pre_hooks = hooks

    def run(self, inputs: Sequence[Tensor]) -> list[Maybe]:
        """Call the module on flat inputs and return its flat results, with their history."""
        args, kwargs = tree_unflatten(list(inputs), self.input_tree)
        with torch.enable_grad(), self.without_hooks():
            results = self.forward(*args, **kwargs)
        flat, tree = tree_flatten(results)
        for value in flat:
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{self.name} returned {value!r}; a graph returns tensors or None")
        if self.output_tree is None:
            self.output_tree = tree
        elif tree != self.output_tree:
            raise TypeError(f"{self.name} returned {tree}, but {self.output_tree} before")
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
        results: Results of the last run of the captured forward function, with history.
        generation: Counts forward passes, so that a backward pass knows whether it is too late.
        loaded_generation: The forward pass whose output gradients lie in ``output_grads``.
        param_grads: Gradients that a whole backward graph computed and nobody has asked for yet.
    """

    layer: CapturedLayer
    inputs: list[Tensor]
    output_grads: list[Maybe]
    splits_backward: bool
    forward: CapturedGraph | None = None
    backward: CapturedGraph | None = None
    weight: CapturedGraph | None = None
    results: list[Maybe] | None = None
    generation: int = 0
    loaded_generation: int = -1
    param_grads: tuple[Maybe, ...] | None = None

    def run_forward(self) -> list[Maybe]:
        """The function to capture for a forward pass."""
        self.results = self.layer.run(self.inputs)
        return [None if r is None else r.detach() for r in self.results]

    def run_backward(self, *, keep: bool) -> list[Maybe]:
        """The function to capture for a backward pass: gradients of inputs, then of parameters.

        Args:
            keep: Do not free what the forward pass saved.
        """
        inputs = [self.inputs[index] for index in self.layer.grad_inputs]
        params = [] if self.splits_backward else self.layer.params
        grads = self._grads([*inputs, *params], keep=keep or self.splits_backward)
        return list(grads)

    def run_weight(self, *, keep: bool) -> list[Maybe]:
        """The function to capture for a weight half: gradients of the parameters."""
        return list(self._grads(self.layer.params, keep=keep))

    def _grads(self, wanted: Sequence[Tensor], *, keep: bool) -> Sequence[Maybe]:
        results = self.results or []
        pairs = [
            (result, grad)
            for result, grad in zip(results, self.output_grads, strict=True)
            if result is not None and grad is not None
        ]
        if not pairs or not wanted:
            return [None] * len(wanted)
        with self.layer.without_hooks():  # of a recomputed part
            return torch.autograd.grad(
                [result for result, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                retain_graph=keep,
                allow_unused=True,
            )

    def graphs(self) -> list[CapturedGraph]:
        """The graphs that exist."""
        return [g for g in (self.forward, self.backward, self.weight) if g is not None]

    def reset(self) -> None:
        """Give up the graphs."""
        for graph in self.graphs():
            graph.reset()
        self.forward = self.backward = self.weight = None
        self.results = self.param_grads = None
