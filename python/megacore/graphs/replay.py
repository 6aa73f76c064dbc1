"""Captured module for one microbatch: tensor inputs, graph replay, autograd integration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_unflatten

from megacore.graphs.backend import CapturedGraph, GraphBackend
from megacore.graphs.errors import ReplayError
from megacore.graphs.layer import LayerSite, Maybe
from megacore.graphs.static_tensors import distinct_elements

# Stream of a replay, and the event that the current stream waits for.
Where = tuple[Any, Any]


class ReplayState:
    """State shared by the graphed modules of one plan.

    Args:
        backend: Backend that recorded the graphs.
        in_order: Whether backward passes of modules follow the order of the plan.

    Attributes:
        backend: Backend that recorded the graphs.
    """

    def __init__(self, backend: GraphBackend, *, in_order: bool) -> None:
        self.backend = backend
        self._in_order = in_order
        self._handed_on: list[Maybe] = []
        self._is_complete = False

    def start_backward(self) -> None:
        """Record the start of a module's backward pass."""
        if self._is_complete:
            self.poison(self._handed_on)
            self._handed_on, self._is_complete = [], False

    def hand_on(self, grads: list[Maybe], *, copied: bool, is_last: bool) -> None:
        """Record the static input gradients that a module returned.

        Code between modules may read them until the backward pass of the chunk is complete, and
        code after the chunk until the next backward pass.

        Args:
            grads: The static tensors.
            copied: Copies were returned, so the static tensors are no longer read.
            is_last: Whether the module is the last one in the backward pass of its chunk.
        """
        self._is_complete = is_last
        if copied:
            self.poison(grads)
        elif self._in_order:
            self._handed_on += grads

    def poison(self, tensors: list[Maybe]) -> None:
        """Fill tensors that must not be read any more with NaN, if the backend poisons."""
        if not self.backend.poisons:
            return
        with torch.no_grad():
            for tensor in tensors:
                if tensor is not None and tensor.is_floating_point():
                    distinct_elements(tensor).fill_(torch.nan)


@dataclass(frozen=True)
class _HeldTensor:
    """A parameter or buffer of a captured module, with its address at the capture."""

    kind: str
    name: str
    table: Mapping[str, Tensor | None]
    tensor: Tensor
    address: int

    def is_in_place(self) -> bool:
        """Return whether the module still has this tensor, at the same address."""
        return self.table.get(self.name) is self.tensor and self.tensor.data_ptr() == self.address


def _held_tensors(module: nn.Module) -> list[_HeldTensor]:
    tables: list[tuple[str, Mapping[str, Tensor | None]]] = []
    for part in module.modules():
        tables += [("parameter", part._parameters), ("buffer", part._buffers)]
    return [
        _HeldTensor(kind, name, table, tensor, tensor.data_ptr())
        for kind, table in tables
        for name, tensor in table.items()
        if tensor is not None
    ]


class GraphedCallable:
    """One captured module, for one microbatch of a step.

    The call signature is that of the module. If the mode (training or evaluation) differs from
    the capture, or in training without autograd, the module itself runs. Results are views of
    static tensors: they are valid until the backward pass of this call, or until the next call
    that shares the graph.

    There are two additional keyword arguments: ``cuda_graph_stream``, the stream of the replay,
    and ``cuda_graph_event``, an external event recorded inside the graph. The current stream waits
    for this event instead of the whole replay.
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
        self._read = _held_tensors(module)

    def __call__(
        self, *args: Any, cuda_graph_stream: Any = None, cuda_graph_event: Any = None, **kwargs: Any
    ) -> Any:
        """Replay the forward pass, or run the module if the capture was for another mode."""
        layer = self._site.layer
        trains = self._module.training
        if trains != layer.trains or (trains and not torch.is_grad_enabled()):
            return layer.forward(*args, **kwargs)
        inputs = layer.flatten_inputs(args, kwargs)
        layer.run_hooks()
        where = (cuda_graph_stream, cuda_graph_event)
        if trains:
            params = [] if self._defers else layer.params
            flat = _Replay.apply(self, where, len(inputs), *inputs, *params)  # type: ignore[no-untyped-call]
        else:
            found = self.run_forward(tuple(inputs), where)
            flat = [None if result is None else result.detach() for result in found]
        assert layer.output_tree is not None
        return tree_unflatten(list(flat), layer.output_tree)

    def backward_dw(self) -> None:
        """Replay the weight half and add its gradients to the parameters' ``grad``.

        Hooks on the parameters run. Does nothing unless the capture deferred weight gradients.

        Raises:
            ReplayError: If the first half of this backward pass has not run.
        """
        if self._defers and self._site.layer.params:
            root = _DeferredGrads.apply(self, *self._site.layer.params)  # type: ignore[no-untyped-call]
            torch.autograd.backward(root)

    def reset(self) -> None:
        """Release the graphs; later calls raise an error."""
        self._site.reset()

    @property
    def eager(self) -> Callable[..., Any]:
        """The module's own forward pass."""
        return self._site.layer.forward

    # ---- called by autograd ----------------------------------------------------------------------

    def run_forward(self, inputs: tuple[Tensor, ...], where: Where) -> tuple[Maybe, ...]:
        """Copy inputs, replay, return the static results."""
        site = self._site
        graph = self._require(site.forward)
        for held in self._read:
            if not held.is_in_place():
                raise ReplayError(
                    f"the {held.kind} {held.name!r} of {site.layer.name}, "
                    f"{list(held.tensor.shape)}, has moved or was replaced since the capture; a "
                    "graph reads fixed addresses, so capture again"
                )
        with torch.no_grad():
            for static, given in zip(site.inputs, inputs, strict=True):
                if static.data_ptr() != given.data_ptr():
                    static.copy_(given)
        self._replay(graph, where)
        site.generation += 1
        site.param_grads = None
        return graph.results

    def run_backward(
        self,
        generation: int,
        grads: tuple[Maybe, ...],
        *,
        where: Where = (None, None),
        inputs: bool,
        params: bool,
    ) -> tuple[list[Maybe], list[Maybe]]:
        """Replay the needed graphs; return the gradients of all inputs and of all parameters.

        A pipeline may request the gradients of inputs first and those of parameters later.
        """
        site = self._site
        self._check_generation(generation)
        graph = self._require(site.backward)
        # If only parameter gradients are left, the given gradients may have been overwritten.
        if inputs or site.loaded != generation:
            self._load_grads(grads)
            site.loaded = generation
        input_grads: list[Maybe] = [None] * len(site.inputs)
        num_wanted = len(site.layer.grad_inputs)
        if inputs or site.backward_done != generation:
            self._state.start_backward()
            self._replay(graph, where)
            site.backward_done = generation
            if not site.splits_backward:
                site.param_grads = graph.results[num_wanted:]
        if inputs:
            # Copies are needed where static gradients are read after the next backward pass
            # starts: the gradient of a chunk may be in flight to another rank, and a weight half
            # of code between graphs may keep its gradient.
            copies = self._is_first_of_chunk or site.splits_backward
            static = list(graph.results[:num_wanted])
            for index, grad in zip(site.layer.grad_inputs, static, strict=True):
                if grad is not None:
                    input_grads[index] = grad.clone() if copies else grad.detach()
            self._state.hand_on(static, copied=copies, is_last=self._is_first_of_chunk)
        if params:
            return input_grads, self._take_param_grads(where)
        if not site.layer.params:
            self._release()
        return input_grads, [None] * len(site.layer.params)

    def run_weight(self) -> list[Maybe]:
        """Replay the weight half and return the gradients of the parameters."""
        site = self._site
        self._require(site.weight)
        self._check_generation(site.generation)
        if site.backward_done != site.generation:
            raise ReplayError(
                f"backward_dw() of {site.layer.name} comes before the backward pass of this call, "
                "whose gradients it goes on from; run that first"
            )
        return self._take_param_grads((None, None))

    def _take_param_grads(self, where: Where) -> list[Maybe]:
        site = self._site
        if site.splits_backward:
            graph = self._require(site.weight)
            self._replay(graph, where)
            found = graph.results
        else:
            assert site.param_grads is not None
            found = site.param_grads
        taken = [self._returned(grad) for grad in found]
        self._release()
        return taken

    def _release(self) -> None:
        """Mark the static tensors of this microbatch as free."""
        self._site.finished = self._site.generation
        self._state.poison(self._site.static_tensors())

    def _replay(self, graph: CapturedGraph, where: Where) -> None:
        with self._state.backend.replaying(*where):
            graph.replay()

    def _returned(self, grad: Maybe) -> Maybe:
        if grad is None:
            return None
        # Autograd may store the returned tensor itself as a parameter's grad.
        return grad.clone() if self._clones_param_grads else grad.detach()

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
        if self._site.finished == generation:
            raise ReplayError(
                f"the backward pass of {self._site.layer.name} runs a second time, but its static "
                "tensors have been released; a graph runs once for each forward pass"
            )

    @property
    def generation(self) -> int:
        """Count of forward passes of the underlying graph."""
        return self._site.generation

    @property
    def output_requires_grad(self) -> list[bool]:
        """For each result, whether it requires grad."""
        return [spec is not None and spec.requires_grad for spec in self._site.layer.output_specs]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: GraphedCallable, where: Where, num_inputs: int, *tensors: Tensor
    ) -> tuple[Maybe, ...]:
        ctx.set_materialize_grads(False)
        results = call.run_forward(tensors[:num_inputs], where)
        ctx.call, ctx.where, ctx.num_inputs = call, where, num_inputs
        ctx.generation = call.generation
        outputs = tuple(None if result is None else result.detach() for result in results)
        requires = call.output_requires_grad
        ctx.mark_non_differentiable(
            *[o for o, needs in zip(outputs, requires, strict=True) if o is not None and not needs]
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Maybe) -> tuple[Maybe, ...]:
        needs = ctx.needs_input_grad[3:]
        of_inputs, of_params = ctx.call.run_backward(
            ctx.generation,
            grads,
            where=ctx.where,
            inputs=any(needs[: ctx.num_inputs]),
            params=any(needs[ctx.num_inputs :]),
        )
        if len(needs) == ctx.num_inputs:
            of_params = []
        return (None, None, None, *of_inputs, *of_params)


class _DeferredGrads(torch.autograd.Function):
    """Weight half as an autograd node with its own backward pass."""

    @staticmethod
    def forward(ctx: Any, call: GraphedCallable, *params: Tensor) -> Tensor:
        ctx.call = call
        return params[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Maybe, ...]:
        return (None, *ctx.call.run_weight())
