"""A captured module for one microbatch: takes tensors, replays graphs, joins in autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_unflatten

from megacore.graphs.backend import CapturedGraph, GraphBackend
from megacore.graphs.errors import ReplayError
from megacore.graphs.layer import LayerSite, Maybe


class ReplayState:
    """What the graphed modules of one plan share.

    Attributes:
        backend: Who recorded the graphs.
        sent_grads: The input gradients that were returned last. Whoever takes them has done so when
            the next backward pass begins.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend
        self.sent_grads: list[Maybe] = []

    def poison(self, tensors: list[Maybe]) -> None:
        """Fill tensors that nobody may read any more with NaN, if the backend wants that."""
        if not self.backend.poisons:
            return
        with torch.no_grad():
            for tensor in tensors:
                if tensor is not None and tensor.is_floating_point():
                    tensor.fill_(torch.nan)


class GraphedCallable:
    """One captured module, for one microbatch of a step.

    Called like the module. In evaluation mode, and without autograd, it runs the module itself.
    Results are views of static tensors: they hold until the backward pass of this call, or until
    the next call that shares the graph.
    """

    def __init__(
        self,
        module: nn.Module,
        site: LayerSite,
        state: ReplayState,
        *,
        is_first_of_chunk: bool,
        clones_param_grads: bool,
        defers_weight_grads: bool,
    ) -> None:
        self._module = module
        self._site = site
        self._state = state
        self._is_first_of_chunk = is_first_of_chunk
        self._clones_param_grads = clones_param_grads
        self._defers = defers_weight_grads and site.splits_backward
        self._param_addresses = [param.data_ptr() for param in site.layer.params]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the forward pass, or run the module in evaluation and without autograd."""
        site = self._site
        if not self._module.training or not torch.is_grad_enabled():
            return site.layer.forward(*args, **kwargs)
        inputs = site.layer.flatten_inputs(args, kwargs)
        site.layer.run_hooks()
        params = [] if self._defers else site.layer.params
        flat = _Replay.apply(self, len(inputs), *inputs, *params)  # type: ignore[no-untyped-call]
        assert site.layer.output_tree is not None
        return tree_unflatten(list(flat), site.layer.output_tree)

    def backward_dw(self) -> None:
        """Replay the weight half and add its gradients to the parameters' ``grad``.

        Hooks on the parameters run. Does nothing unless the capture deferred weight gradients.
        """
        if self._defers and self._site.layer.params:
            root = _DeferredGrads.apply(self, *self._site.layer.params)  # type: ignore[no-untyped-call]
            torch.autograd.backward(root)

    def reset(self) -> None:
        """Give up the graphs; later calls are errors."""
        self._site.reset()

    # ---- what autograd calls ---------------------------------------------------------------------

    def run_forward(self, inputs: tuple[Tensor, ...]) -> tuple[Maybe, ...]:
        """Copy inputs, replay, return the static results."""
        site = self._site
        graph = self._require(site.forward)
        for param, address in zip(site.layer.params, self._param_addresses, strict=True):
            if param.data_ptr() != address:
                raise ReplayError(
                    f"a parameter of {site.layer.name}, {list(param.shape)}, has moved since the "
                    "capture; a graph reads fixed addresses, so capture again"
                )
        with torch.no_grad():
            for static, given in zip(site.inputs, inputs, strict=True):
                if static.data_ptr() != given.data_ptr():
                    static.copy_(given)
        graph.replay()
        site.generation += 1
        site.param_grads = None
        return graph.results

    def run_backward(
        self, generation: int, grads: tuple[Maybe, ...], *, inputs: bool, params: bool
    ) -> tuple[list[Maybe], list[Maybe]]:
        """Replay what is needed; return the gradients of all inputs and of all parameters.

        A pipeline may ask for the gradients of inputs first and for those of parameters later.
        """
        site = self._site
        self._check_generation(generation)
        if site.loaded_generation != generation:
            # Later, the given gradients may have been overwritten.
            self._load_grads(grads)
            site.loaded_generation = generation
            self._state.poison(self._state.sent_grads)
            self._state.sent_grads = []
        input_grads: list[Maybe] = [None] * len(site.inputs)
        if inputs or (not site.splits_backward and site.param_grads is None):
            graph = self._require(site.backward)
            graph.replay()
            num_wanted = len(site.layer.grad_inputs)
            for index, grad in zip(site.layer.grad_inputs, graph.results, strict=False):
                input_grads[index] = self._handed_on(grad)
            self._state.sent_grads = list(graph.results[:num_wanted])
            if not site.splits_backward:
                site.param_grads = graph.results[num_wanted:]
        if params:
            return input_grads, self._take_param_grads()
        if not site.layer.params:
            self._release()
        return input_grads, [None] * len(site.layer.params)

    def run_weight(self) -> list[Maybe]:
        """Replay the weight half and return the gradients of the parameters."""
        self._require(self._site.weight)
        return self._take_param_grads()

    def _take_param_grads(self) -> list[Maybe]:
        site = self._site
        if site.splits_backward:
            graph = self._require(site.weight)
            graph.replay()
            found = graph.results
        else:
            assert site.param_grads is not None
            found = site.param_grads
        taken = [self._returned(grad) for grad in found]
        self._release()
        return taken

    def _release(self) -> None:
        """Nothing reads the static tensors of this microbatch any more."""
        site = self._site
        results = self._require(site.forward).results
        self._state.poison([*site.inputs, *results, *site.output_grads])

    def _returned(self, grad: Maybe) -> Maybe:
        if grad is None:
            return None
        # Autograd may keep the very tensor as a parameter's grad.
        return grad.clone() if self._clones_param_grads else grad.detach()

    def _handed_on(self, grad: Maybe) -> Maybe:
        if grad is None:
            return None
        # The gradient that leaves a chunk may be on its way, and one that a weight half of code
        # between graphs reads may be kept, for longer than until the next backward pass.
        must_last = self._is_first_of_chunk or self._site.splits_backward
        return grad.clone() if must_last else grad.detach()

    def _load_grads(self, grads: tuple[Maybe, ...]) -> None:
        for static, given in zip(self._site.output_grads, grads, strict=True):
            if static is None:
                continue
            if given is None:
                static.zero_()
            elif static.data_ptr() != given.data_ptr():
                static.copy_(given)

    def _require(self, graph: CapturedGraph | None) -> CapturedGraph:
        if graph is None:
            raise ReplayError(f"the graphs of {self._site.layer.name} were reset; capture again")
        return graph

    def _check_generation(self, generation: int) -> None:
        if generation != self._site.generation:
            raise ReplayError(
                f"the backward pass of {self._site.layer.name} comes after another forward pass "
                "has replayed the same graph, which overwrote what it needs; run passes in the "
                "order of the capture"
            )

    @property
    def generation(self) -> int:
        """Counts the forward passes of the graph behind this callable."""
        return self._site.generation

    @property
    def output_requires_grad(self) -> list[bool]:
        """For each result whether a gradient flows through it."""
        return [spec is not None and spec.requires_grad for spec in self._site.layer.output_specs]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: GraphedCallable, num_inputs: int, *tensors: Tensor
    ) -> tuple[Maybe, ...]:
        ctx.set_materialize_grads(False)
        results = call.run_forward(tensors[:num_inputs])
        ctx.call, ctx.num_inputs, ctx.generation = call, num_inputs, call.generation
        outputs = tuple(None if result is None else result.detach() for result in results)
        requires = call.output_requires_grad
        ctx.mark_non_differentiable(
            *[o for o, needs in zip(outputs, requires, strict=True) if o is not None and not needs]
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Maybe) -> tuple[Maybe, ...]:
        needs = ctx.needs_input_grad[2:]
        of_inputs, of_params = ctx.call.run_backward(
            ctx.generation,
            grads,
            inputs=any(needs[: ctx.num_inputs]),
            params=any(needs[ctx.num_inputs :]),
        )
        if len(needs) == ctx.num_inputs:
            of_params = []
        return (None, None, *of_inputs, *of_params)


class _DeferredGrads(torch.autograd.Function):
    """Stands for a weight half in a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, call: GraphedCallable, *params: Tensor) -> Tensor:
        ctx.call = call
        return params[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Maybe, ...]:
        return (None, *ctx.call.run_weight())
