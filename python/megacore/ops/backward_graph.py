"""The autograd graph of a forward pass, sorted into what a split backward pass needs to tell apart.

The kinds of nodes are those of ``split_backward.py``: weight nodes, from which only parameters can
be reached; activation nodes, all others; and border nodes, activation nodes with an edge to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node


class BackwardGraph:
    """The autograd graph of one forward pass of a stage, sorted into the kinds of nodes.

    Attributes:
        edges: The edges of each node, ``(None, 0)`` for an input without gradient.
        weight_nodes: Nodes from which only parameters can be reached, leaves included.
        borders: Border nodes, each with the outputs whose gradients arrive at it.
        reached: Those of the stage's inputs that have any influence.
        owners: For nodes written in Python, what keeps them usable after the graph is let go of.
    """

    def __init__(self, outputs: Sequence[GradientEdge], targets: Sequence[Node]) -> None:
        self.edges = _edges([output.node for output in outputs])
        self.owners = _owners(self.edges, outputs)
        self.weight_nodes: set[Node] = set()
        activation: set[Node] = set()
        borders: list[Node] = []
        for node, edges in self.edges.items():
            children = [child for child, _ in edges if child is not None]
            if node in targets or not activation.isdisjoint(children):
                activation.add(node)
            elif not children:
                if is_leaf(node):
                    self.weight_nodes.add(node)
                continue
            elif targets or _is_branch_of_weights(children, self.weight_nodes):
                self.weight_nodes.add(node)
                continue
            else:
                activation.add(node)
            if not self.weight_nodes.isdisjoint(children):
                borders.append(node)
        self.reached = activation.intersection(targets)
        self.borders: dict[Node, set[int]] = {node: set() for node in borders}
        for output in outputs:
            if output.node in self.borders:
                self.borders[output.node].add(output.output_nr)
        for node in activation:
            for child, nr in self.edges[node]:
                if child in self.borders:
                    self.borders[child].add(nr)

    def groups(self) -> list[list[Node]]:
        """Border and weight nodes that run together in W, since their gradients are added up."""
        groups = _Groups()
        # The order of the graph, so that hooks on parameters run in the same order on every rank.
        nodes = [node for node in self.edges if node in self.weight_nodes or node in self.borders]
        for node in nodes:
            for child, _ in self.edges[node]:
                if child in self.weight_nodes:
                    groups.join(node, child)
        members: dict[Node, list[Node]] = {}
        for node in nodes:
            members.setdefault(groups.find(node), []).append(node)
        return list(members.values())

    def asks(self, node: Node, *, weights: bool) -> list[bool]:
        """For each edge of a node whether it belongs to I, or to W."""
        edges = self.edges[node]
        return [(child in self.weight_nodes) == weights for child, _ in edges if child is not None]


def _is_branch_of_weights(children: list[Node], weight_nodes: set[Node]) -> bool:
    """On the first stage: whether a node is on the way from one weight to where it meets others."""
    return len(children) == 1 and children[0] in weight_nodes


def is_leaf(node: Node) -> bool:
    """Whether a node adds to the gradient of a leaf tensor."""
    return hasattr(node, "variable")


def _owners(
    edges: dict[Any, list[tuple[Any, int]]], outputs: Sequence[GradientEdge]
) -> dict[Node, Node]:
    """The nearest native node above each node written in Python, or the token of its output.

    In torch 2.11 a Python object of such a node does not own it, so its saved tensors go with the
    graph. In torch 2.13 it does, and nothing else needs to be held. Any held node holds all below
    it, so this costs no more than what the native node above the highest of them has saved, and
    nothing in stages of our GPT.
    """
    if torch.__version__ >= "2.13":  # compared as versions, not as text
        return {}
    owners: dict[Any, Node] = {
        o.node: o.ownership_token for o in outputs if o.ownership_token is not None
    }
    for node in reversed(edges):
        owner = owners.get(node) if isinstance(node, BackwardCFunction) else node
        for child, _ in edges[node]:
            if owner is not None and isinstance(child, BackwardCFunction):
                owners.setdefault(child, owner)
    return owners


def _edges(roots: list[Node]) -> dict[Node, list[tuple[Node | None, int]]]:
    """The edges of all nodes of a graph, each node behind those it leads to. It may be deep."""
    done: dict[Node, list[tuple[Node | None, int]]] = {}
    path = roots[::-1]
    opened: dict[Node, list[tuple[Node | None, int]]] = {}
    while path:
        node = path[-1]
        if node in opened:
            path.pop()
            if node not in done:
                done[node] = opened[node]
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                "a stage with a reentrant checkpoint cannot split its backward pass, because the "
                "checkpoint adds to the gradients of weights at once; use torch.utils.checkpoint "
                "with use_reentrant=False, or a schedule with whole backward passes"
            )
        opened[node] = edges = list(node.next_functions)
        path += [child for child, _ in edges if child is not None and child not in opened]
    return done


class _Groups:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self._parent: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        """Return the node that stands for the set of a node."""
        parent = self._parent
        while (above := parent.get(node, node)) is not node:
            parent[node] = parent.get(above, above)  # shorter for the next one who asks
            node = above
        return node

    def join(self, first: Node, second: Node) -> None:
        """Unite two sets."""
        self._parent[self.find(first)] = self.find(second)
