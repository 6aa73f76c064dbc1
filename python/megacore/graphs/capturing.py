"""Capture of modules: static tensors from the plan, warmup, recording.

Source:
    The contract is that of Transformer Engine's ``make_graphed_callables``: order lists, layers per
    chunk, a forward and a backward graph (and one for the weight half) per layer, copies into
    static inputs, detached results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megacore.graphs.backend import GraphBackend
from megacore.graphs.capture_plan import BufferRole, Capture, CapturePlan, StepKind
from megacore.graphs.errors import CaptureError, FormError, UnrecordableError, capture_error
from megacore.graphs.layer import CapturedLayer, LayerSite, Maybe
from megacore.graphs.options import CaptureOptions, Kwargs
from megacore.graphs.replay import GraphedCallable, ReplayState
from megacore.graphs.static_tensors import KeptTensors, TensorSpec
from megacore.ops.gemm import main_grad_of


class Capturing:
    """Capture of all layers of a plan.

    Args:
        modules: The modules.
        layers: Capture description of each module.
        plan: The capture plan.
        options: Capture options.
        backend: Backend that records the graphs.
        any_order: Modules are called one by one, in any order, so they share no memory.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        layers: list[CapturedLayer],
        plan: CapturePlan,
        *,
        options: CaptureOptions,
        backend: GraphBackend,
        any_order: bool = False,
    ) -> None:
        self._modules = modules
        self._layers = layers
        self._plan = plan
        self._options = options
        self._backend = backend
        self._trains = modules[0].training
        self._is_ring = options.reuse in (None, "graphs")
        self._keeps_memory = self._is_ring or options.retain_graph_in_backward
        self._any_order = any_order
        self._sites: dict[tuple[int, int], LayerSite] = {}

    def run(self, args: list[tuple[Any, ...]], kwargs: Sequence[Kwargs] | None) -> Capturing:
        """Warm up and capture; an error restores the previous state, see `CaptureError`."""
        at, computes = "the start", False
        generators = [*self._options.generators, *self._backend.generators]
        try:
            with buffers_kept(self._modules), _random_states_kept(generators):
                named = [{}] * len(args) if kwargs is None else kwargs
                for at, computes in self._steps(args, named):  # noqa: B007
                    pass
        except Exception as error:
            self.reset()
            if isinstance(error, (FormError, CaptureError)):
                raise
            raise capture_error(at, error, computes=computes) from error
        for site in self._sites.values():
            site.results = None
        return self

    def _steps(
        self, args: list[tuple[Any, ...]], kwargs: Sequence[Kwargs]
    ) -> Iterator[tuple[str, bool]]:
        """Run all steps; yield, before each one, its name and whether it executes kernels."""
        options = self._options
        with self._backend.warmup():
            if options.pre_warmup_hook is not None:
                options.pre_warmup_hook()
            for number, (one, named) in enumerate(zip(args, kwargs, strict=True)):
                layer = self._layers[number]
                yield f"the warmup of {layer.name}", True
                inputs = layer.flatten_inputs(one, dict(named))
                for iteration in range(max(options.num_warmup_iters, 1)):
                    self._warm_up(number, inputs, is_first=iteration == 0)
            if options.post_warmup_hook is not None:
                options.post_warmup_hook()
        self._allocate()
        refused: tuple[str, UnrecordableError] | None = None
        with self._backend.capturing():
            for capture in self._plan.captures:
                kind, layer = capture.kind.name.lower(), self._layers[capture.layer]
                if not self._trains and capture.kind != StepKind.FORWARD:
                    continue
                at = f"the capture of the {kind} pass of {layer.name}"
                yield at, self._backend.computes
                try:
                    self._capture(capture, keep=self._keeps_memory or refused is not None)
                except UnrecordableError as error:
                    if not error.went_on:
                        raise
                    # Other captures may communicate: other ranks wait for this rank.
                    refused = refused or (at, error)
        if refused is not None:
            yield refused[0], self._backend.computes
            raise refused[1]

    def _warm_up(self, number: int, inputs: Sequence[Tensor], *, is_first: bool) -> None:
        """Run a layer on its sample and record which tensors get gradients."""
        layer, module, options = self._layers[number], self._modules[number], self._options
        own = [one.detach().requires_grad_(one.requires_grad) for one in inputs]
        options.run_hooks("forward_pre_hooks", number, module)
        results = layer.run(own)
        options.run_hooks("forward_hooks", number, module)
        layer.output_specs = tuple(None if r is None else TensorSpec.of(r) for r in results)
        if not self._trains:
            return
        options.run_hooks("backward_pre_hooks", number, module)
        wanted = [one for one in own if one.requires_grad] + layer.params
        has_grad = _gets_gradient(layer, results, wanted)
        options.run_hooks("backward_hooks", number, module)
        used = [has_grad.get(id(one), False) for one in own]
        unused = [i for i, one in enumerate(own) if one.requires_grad and not used[i]]
        if unused and not options.allow_unused_input:
            raise CaptureError(
                f"input {unused[0]} of {layer.name} requires grad but does not influence the "
                "results; pass allow_unused_input=True to give it no gradient"
            )
        # Some gradients are written to main_grad, not to autograd, but autograd still visits
        # the parameter.
        params = [p for p in layer.params if has_grad[id(p)] or main_grad_of(p) is not None]
        if not is_first and (len(params) != len(layer.params) or used != layer.used_inputs):
            raise CaptureError(
                f"{layer.name} gives gradients to other tensors in one warmup pass than in "
                "another; a graph always does the same"
            )
        layer.params, layer.used_inputs = params, used

    def _allocate(self) -> None:
        """Allocate static inputs and output gradients, one set per buffer of the plan."""
        inputs: dict[int, list[Tensor]] = {}
        grads: dict[int, list[Maybe]] = {}
        kept: dict[int, KeptTensors] = {}
        for capture in self._plan.captures:
            layer = self._layers[capture.layer]
            number = capture.buffer(BufferRole.INPUT)
            if number not in inputs:
                inputs[number] = [spec.zeros() for spec in layer.input_specs]
            if capture.kind == StepKind.FORWARD:
                site = LayerSite(layer=layer, inputs=inputs[number])
                self._sites[capture.layer, capture.slot] = site
                continue
            site = self._sites[capture.layer, capture.slot]
            number = capture.buffer(BufferRole.OUTPUT_GRAD)
            if number not in grads:
                grads[number] = [
                    spec.dense_zeros() if spec is not None and spec.requires_grad else None
                    for spec in layer.output_specs
                ]
            site.output_grads = grads[number]
            number = capture.buffer(BufferRole.KEPT)
            if number >= 0:
                foreign = [*self._modules[capture.layer].parameters(), *site.inputs]
                site.kept = kept.setdefault(number, KeptTensors(foreign))

    def _capture(self, capture: Capture, *, keep: bool) -> None:
        site = self._sites[capture.layer, capture.slot]
        number, module, options = capture.layer, self._modules[capture.layer], self._options
        # Replays of live microbatches interleave in many orders, so even the temporary tensors of
        # one microbatch must not share memory with tensors that another one keeps.
        slot = (capture.chunk, capture.slot) if self._is_ring else None
        apart = capture.layer if self._any_order else slot
        if capture.kind == StepKind.FORWARD:
            options.run_hooks("forward_pre_hooks", number, module)
            site.forward = self._backend.capture(site.run_forward, apart=apart)
            options.run_hooks("forward_hooks", number, module)
        elif capture.kind == StepKind.BACKWARD:
            options.run_hooks("backward_pre_hooks", number, module)
            site.backward = self._backend.capture(lambda: site.run_backward(keep=keep), apart=apart)
            options.run_hooks("backward_hooks", number, module)
        else:
            site.weight = self._backend.capture(site.run_weight, apart=apart)
        if not keep and (
            capture.kind == StepKind.BACKWARD_WEIGHT
            or (capture.kind == StepKind.BACKWARD and not site.splits_backward)
        ):
            site.disown(param_grads=options.clone_param_grads_on_return)

    @property
    def plan(self) -> CapturePlan:
        """Plan of the graphs and buffers."""
        return self._plan

    def static_bytes(self) -> dict[str, int]:
        """Return the bytes of static memory by use.

        Uses are static inputs, output gradients, results, and tensors kept for weight halves.
        """
        sites = list(self._sites.values())
        graphs = [graph for site in sites for graph in site.graphs()]
        kept = [site.kept.tensors for site in sites if site.kept is not None]
        given = {
            grad.untyped_storage().data_ptr()
            for site in sites
            for grad in site.output_grads
            if grad is not None
        }
        return {
            "static_inputs": _bytes_of(t for site in sites for t in site.inputs),
            "output_grads": _bytes_of(t for site in sites for t in site.output_grads),
            "results": _bytes_of(t for graph in graphs for t in graph.results),
            "kept": _bytes_of(
                tensor
                for tensors in kept
                for tensor in tensors
                if tensor.untyped_storage().data_ptr() not in given
            ),
        }

    def reset(self) -> None:
        """Release all graphs and static tensors."""
        for site in self._sites.values():
            site.reset()
        self._sites.clear()

    def callables(self) -> list[GraphedCallable]:
        """Return the callables ordered by chunk, then microbatch, then layer."""
        state = ReplayState(self._backend, in_order=not self._any_order)
        by_chunk: dict[int, set[int]] = {}
        for capture in self._plan.captures:
            by_chunk.setdefault(capture.chunk, set()).add(capture.layer)
        return [
            GraphedCallable(
                self._modules[layer],
                self._sites[layer, microbatch % self._plan.slots_per_chunk[chunk]],
                state,
                is_first_of_chunk=layer == min(by_chunk[chunk]),
                clones_param_grads=self._options.clone_param_grads_on_return,
                defers_weight_grads=self._options.defer_weight_grads,
            )
            for chunk in sorted(by_chunk)
            for microbatch in range(self._plan.num_microbatches)
            for layer in sorted(by_chunk[chunk])
        ]


def _gets_gradient(
    layer: CapturedLayer, results: Sequence[Maybe], wanted: Sequence[Tensor]
) -> dict[int, bool]:
    """Run a backward pass; return, by tensor id, whether each tensor gets a gradient."""
    flowing = [r for r in results if r is not None and r.requires_grad]
    grads: Sequence[Maybe] = [None] * len(wanted)
    if flowing and wanted:
        with layer.without_hooks():
            grads = torch.autograd.grad(
                flowing, wanted, [torch.zeros_like(r) for r in flowing], allow_unused=True
            )
    return {id(one): grad is not None for one, grad in zip(wanted, grads, strict=True)}


@contextmanager
def buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore module buffers, such as running counts, on exit."""
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
    kept = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


@contextmanager
def _random_states_kept(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Restore random states on exit, as if nothing had been drawn inside."""
    everyone = [torch.default_generator, *generators]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        everyone.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = [generator.get_state() for generator in everyone]
    try:
        yield
    finally:
        for generator, state in zip(everyone, states, strict=True):
            generator.set_state(state)


def _bytes_of(tensors: Iterable[Maybe]) -> int:
    """Return the bytes of the memory behind some tensors, each counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor is not None
    }
    return sum(storages.values())
