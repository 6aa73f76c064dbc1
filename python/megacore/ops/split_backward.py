"""Split backward pass: the gradient of the input (I), later those of the weights (W).

Any module can be split, since the split works on its autograd graph. Nodes of the graph from which
only parameters can be reached are *weight nodes*, for example a transposed view of a weight. All
others are *activation nodes*. A *border node*, such as a matrix product, is an activation node with
an edge to a weight node. I runs the activation nodes, where border nodes compute the gradients of
activations only, and saves the gradients that reach the border nodes. W runs the border nodes for
the gradients of weights only, from the saved gradients, and then the weight nodes. Every gradient
is computed once, every collective in a backward pass runs once, and parameters get their gradients
in the same order as in a whole backward pass.

Autograd lets a node skip gradients that the running backward pass does not request. For this to
work in W, border nodes are called inside a small backward pass of their own (``_WeightGrads``),
which requests the weight nodes only.

Parts of W can run before the end of I, once I has finished their nodes (``EarlyWeights``). If I
waits for an exchange of rows, for example, weight gradients then overlap this communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from megacore.ops.backward_graph import BackwardGraph, is_leaf

# Gradients that reach a node: one for each of its outputs that has one.
Arrived = dict[int, Tensor]
# Receives a function that runs the due parts of W, and is entered while I runs. The function may be
# called at any time until then, on the thread that runs I.
EarlyWeights: TypeAlias = Callable[[Callable[[], None]], AbstractContextManager[None]]


class DeferredWeightGrads:
    """The W that follows an I: holds the saved gradients and nodes, and frees them as it runs."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts

    def run(self) -> None:
        """Add the gradients of the weights to the parameters' ``grad``; later calls are no-ops.

        Parameter hooks run as in any backward pass. Hooks on other tensors from which only
        parameters can be reached do not run.
        """
        parts, self._parts = self._parts, []
        _run_parts(parts)

    def grads(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients that :meth:`run` would add, once; no hooks on ``grad`` run.

        Args:
            params: Leaves of the graph. Gradients of other leaves are computed and dropped.

        Example:
            >>> x, w = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))
            >>> _, weights = backward_input(get_gradient_edge((x * w).sum()), None, x)
            >>> weights.grads([w]), w.grad
            ([tensor([1., 1.])], None)
        """
        parts, self._parts = self._parts, []
        leaves = [id(leaf.variable) for part in parts for leaf in part.leaves]
        edges = [GradientEdge(leaf, 0) for part in parts for leaf in part.leaves]
        with torch.enable_grad():
            roots, inner = _roots_of(parts)
        grads: Sequence[Tensor | None] = ()
        if roots:
            grads = torch.autograd.grad(roots, [*edges, *inner], allow_unused=True)
        found = dict(zip(leaves, grads, strict=False))
        return [found.get(id(param)) for param in params]

    def map_kept(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensors kept for W by others of the same values and strides.

        Args:
            change: Called with each tensor, in an order that depends on the graph only.
        """
        for part in self._parts:
            for grads in part.arrived.values():
                for nr in sorted(grads):
                    grads[nr] = change(grads[nr])


def backward_input(
    output: GradientEdge,
    output_grad: Tensor | None,
    hidden: Tensor | None,
    *,
    early: EarlyWeights | None = None,
) -> tuple[Tensor | None, DeferredWeightGrads]:
    """Compute the gradient of the input of a stage, and defer those of its weights.

    Args:
        output: Edge of the stage's output, from ``torch.autograd.graph.get_gradient_edge``.
        output_grad: Gradient of the output; ``None`` for a scalar loss.
        hidden: The stage's input, a leaf that requires grad, or ``None`` on the first stage. On
            this stage, a branch of the graph without activations, such as from the embedding's
            weight to the first sum, belongs to the weights.
        early: Runs parts of W before the end of I.

    Raises:
        ValueError: If the graph has a node that runs a nested backward pass.

    Example:
        >>> x, w = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.tensor([2.0, 3.0]))
        >>> grad, weights = backward_input(get_gradient_edge((x * w).sum()), None, x)
        >>> grad.tolist(), w.grad
        ([2.0, 3.0], None)
        >>> weights.run()
        >>> w.grad.tolist()
        [1.0, 1.0]
    """
    inputs = [] if hidden is None else [hidden]
    output_grads = [_grad_or_one(output, output_grad)]
    grads, deferred = backward_inputs([output], output_grads, inputs, early=early)
    return (grads[0] if grads else None), deferred


def backward_inputs(
    outputs: Sequence[GradientEdge],
    output_grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    early: EarlyWeights | None = None,
) -> tuple[list[Tensor | None], DeferredWeightGrads]:
    """Compute :func:`backward_input` for several outputs and inputs.

    Args:
        outputs: Edges of the outputs.
        output_grads: Gradients of the outputs.
        inputs: Leaves that require grad; empty on a first stage.
        early: Runs parts of W before the end of I.

    Raises:
        ValueError: If the graph has a node that runs a nested backward pass.
    """
    targets = [get_gradient_edge(tensor) for tensor in inputs]
    graph = BackwardGraph(outputs, [target.node for target in targets])
    groups = graph.groups()
    arrived: dict[Node, Arrived] = {}
    roots = []
    for output, grad in zip(outputs, output_grads, strict=True):
        if output.node in graph.weight_nodes:
            _add_arrived(arrived, output.node, output.output_nr, grad)
        else:
            roots.append((output, grad))
    edges = [GradientEdge(node, nr) for node, nrs in graph.borders.items() for nr in sorted(nrs)]
    reached = [target for target in targets if target.node in graph.reached]
    found: dict[Node, Tensor | None] = {}
    if roots and (reached or edges):
        watch = _Watch(graph, ends=early is not None)
        due = _DueParts(graph, groups, watch, begun=arrived)
        try:
            with nullcontext() if early is None else early(due.run):
                grads = torch.autograd.grad(
                    [output for output, _ in roots],
                    [*reached, *edges],
                    [grad for _, grad in roots],
                    retain_graph=True,
                    allow_unused=True,
                )
        finally:
            watch.end()
        groups = due.left
        found = {t.node: grad for t, grad in zip(reached, grads, strict=False)}
        for edge, value in zip(edges, grads[len(reached) :], strict=True):
            if value is not None:
                arrived.setdefault(edge.node, {})[edge.output_nr] = value
        arrived |= watch.arrived
    weights = DeferredWeightGrads(_parts(graph, groups, arrived))
    return [found.get(t.node) for t in targets], weights


def whole_backward(output: GradientEdge, output_grad: Tensor | None) -> None:
    """Run a backward pass in one piece; ``output_grad`` is ``None`` for a scalar loss."""
    torch.autograd.backward([output], [_grad_or_one(output, output_grad)])


def _grad_or_one(output: GradientEdge, output_grad: Tensor | None) -> Tensor:
    if output_grad is not None:
        return output_grad
    metadata = output.node._input_metadata[output.output_nr]
    return torch.ones(metadata.shape, dtype=metadata.dtype, device=metadata.device)


class _Watch:
    """Hooks on border nodes during I, which also disable weight gradients of Python functions.

    The hooks see gradients after other hooks. A node that leads to no activation does not run, and
    neither does its hook; autograd itself captures its gradients.

    Attributes:
        arrived: Gradients of the nodes that have started.
        done: The nodes that have finished, if ``ends`` are observed as well.
    """

    def __init__(self, graph: BackwardGraph, *, ends: bool) -> None:
        self.arrived: dict[Node, Arrived] = {}
        self.done: set[Node] = set()
        self._needs: dict[Any, tuple[bool, ...]] = {}
        self._handles = [node.register_prehook(self._hook(node)) for node in graph.borders]
        if ends:
            self._handles += [node.register_hook(self._end_hook(node)) for node in graph.borders]
        for node in graph.borders:
            needs = getattr(node, "needs_input_grad", None)  # of functions written in Python
            if needs is not None:
                self._needs[node] = needs
                _ask_for(node, graph.asks(node, weights=False))

    def _hook(self, node: Node) -> Callable[[Sequence[Tensor | None]], None]:
        arrived = self.arrived  # not self, which would be a reference cycle through the node

        def on_run(grads: Sequence[Tensor | None]) -> None:
            arrived[node] = {nr: grad for nr, grad in enumerate(grads) if grad is not None}

        return on_run

    def _end_hook(self, node: Node) -> Callable[[Any, Any], None]:
        done = self.done

        def on_end(_grad_inputs: Any, _grad_outputs: Any) -> None:
            done.add(node)

        return on_end

    def end_of(self, nodes: Sequence[Node]) -> None:
        """Restore nodes after I has finished with them."""
        for node in nodes:
            needs = self._needs.pop(node, None)
            if needs is not None:
                node.needs_input_grad = needs  # type: ignore[attr-defined]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.end_of(list(self._needs))


def _ask_for(node: Any, wanted: Sequence[bool]) -> None:
    """Set the gradients that a Python function computes, among those with edges."""
    flags = iter(wanted)
    node.needs_input_grad = tuple(needed and next(flags) for needed in node.needs_input_grad)


@dataclass(kw_only=True)
class _Part:
    """Border and weight nodes that run together in W, as their gradients add up.

    Attributes:
        arrived: Gradients from I at its nodes.
        nodes: Its nodes without the leaves, in the execution order of autograd.
        weight_nodes: Its weight nodes, leaves included.
        leaves: The nodes of its parameters.
        owners: References that keep nodes valid until they have run.
    """

    arrived: dict[Node, Arrived]
    nodes: deque[Node]
    weight_nodes: set[Node]
    leaves: list[Any]
    owners: dict[Node, Node]

    def run(self) -> list[Tensor | None]:
        """Compute the gradients of the parameters, and free each node after its run."""
        while self.nodes:
            node = self.nodes.popleft()
            owner = self.owners.pop(node, None)
            arrived = self.arrived.pop(node, None)
            if arrived is None:
                continue
            grads = _run_node(node, arrived, self.weight_nodes)
            for (child, nr), grad in zip(node.next_functions, grads, strict=True):
                if child in self.weight_nodes and grad is not None:
                    self._add(child, nr, grad)
            del owner
        return [self.arrived.pop(leaf, {}).get(0) for leaf in self.leaves]

    def _add(self, node: Node, nr: int, grad: Tensor) -> None:
        metadata = node._input_metadata[nr]
        # As in autograd: gradients of broadcast or cast tensors have the wide form.
        if grad.shape != metadata.shape:
            grad = grad.sum_to_size(metadata.shape)
        if grad.dtype != metadata.dtype:
            grad = grad.to(metadata.dtype)
        _add_arrived(self.arrived, node, nr, grad)


def _add_arrived(arrived: dict[Node, Arrived], node: Node, nr: int, grad: Tensor) -> None:
    """Accumulate a gradient at an output of a node."""
    grads = arrived.setdefault(node, {})
    grads[nr] = grads[nr] + grad if nr in grads else grad


def _run_node(node: Any, arrived: Arrived, weight_nodes: set[Node]) -> Sequence[Tensor | None]:
    """Return gradients of the edges of a node to weight nodes, ``None`` for the others."""
    metadata = node._input_metadata
    if not isinstance(node, BackwardCFunction):
        result = node(*(arrived.get(nr) for nr in range(len(metadata))))
        return result if isinstance(result, tuple) else (result,)
    needed = node.needs_input_grad
    edges = node.next_functions
    _ask_for(node, [child in weight_nodes for child, _ in edges if child is not None])
    # A Python function expects a gradient for every output.
    filled = [
        arrived[nr] if nr in arrived else torch.zeros(m.shape, dtype=m.dtype, device=m.device)
        for nr, m in enumerate(metadata)
    ]
    result = node.apply(*filled)  # type: ignore[no-untyped-call]
    by_input = result if isinstance(result, tuple) else (result,)
    # Results match the arguments of the forward pass, edges only the tensors among them.
    grads = iter([grad for grad, need in zip(by_input, needed, strict=False) if need])
    return [None if child is None else next(grads) for child, _ in edges]


def _parts(
    graph: BackwardGraph, groups: Sequence[Sequence[Node]], arrived: dict[Node, Arrived]
) -> list[_Part]:
    """Make parts from groups, in the order in which autograd would start them."""
    parts = []
    for group in groups:
        here = {node: arrived[node] for node in group if node in arrived}
        leaves = [node for node in group if is_leaf(node)]
        if here:
            inner = set(group).difference(leaves)
            part = _Part(
                arrived=here,
                nodes=deque(sorted(inner, key=_sequence, reverse=True)),
                weight_nodes=graph.weight_nodes.intersection(group),
                leaves=leaves,
                owners={node: graph.owners[node] for node in group if node in graph.owners},
            )
            parts.append((max(map(_sequence, here)), part))
    return [part for _, part in sorted(parts, key=lambda entry: entry[0], reverse=True)]


def _run_parts(parts: list[_Part]) -> None:
    """Run parts in order and free each one; the list is empty afterwards."""
    roots, wanted = _roots_of(parts)
    if roots:
        torch.autograd.backward(roots, inputs=wanted)


def _roots_of(parts: list[_Part]) -> tuple[list[Tensor], list[GradientEdge]]:
    """Return the roots and the inputs of a backward pass; the list is empty afterwards."""
    roots: list[Tensor] = []
    wanted: list[GradientEdge] = []
    while parts:
        part = parts.pop()
        wanted += [GradientEdge(node, 0) for node in part.weight_nodes]
        params = [leaf.variable for leaf in part.leaves]
        roots.append(_WeightGrads.apply(part, *params))  # type: ignore[no-untyped-call]
        del part
    return roots, wanted


def _sequence(node: Node) -> int:
    return node._sequence_nr()


class _DueParts:
    """Parts of W that can run before the end of I, once all their border nodes have run.

    Attributes:
        left: The groups that have not run.
    """

    def __init__(
        self,
        graph: BackwardGraph,
        groups: list[list[Node]],
        watch: _Watch,
        *,
        begun: dict[Node, Arrived],  # at nodes that I does not run
    ) -> None:
        self.left = groups
        self._graph = graph
        self._watch = watch
        self._waiting = [
            (group, frozenset(borders))
            for group in groups
            if (borders := graph.borders.keys() & group) and begun.keys().isdisjoint(group)
        ]

    def run(self) -> None:
        watch = self._watch
        due = [group for group, borders in self._waiting if borders <= watch.done]
        if not due:
            return
        self._waiting = [entry for entry in self._waiting if not entry[1] <= watch.done]
        self.left = [group for group in self.left if group not in due]
        parts = _parts(self._graph, due, watch.arrived)
        for group in due:
            watch.end_of(group)
            for node in group:
                watch.arrived.pop(node, None)
        del group, due
        with torch.enable_grad():
            _run_parts(parts)


class _WeightGrads(torch.autograd.Function):
    """One part as a node in the backward pass of W, with the gradients of the part."""

    @staticmethod
    def forward(ctx: Any, part: _Part, *params: Tensor) -> Tensor:
        ctx.part = part
        return params[0].new_zeros(())  # on the device of the parameters, for the stream of W

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        part, ctx.part = ctx.part, None
        return (None, *part.run())
