"""Classification of the nodes of an autograd graph for a split backward pass.

The kinds of nodes are those of ``split_backward.py``: weight nodes, from which only parameters can
be reached; activation nodes, all others; and border nodes, activation nodes with an edge to a
weight node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node


class BackwardGraph:
    """Autograd graph of one forward pass of a stage, with its nodes classified.

    Attributes:
        edges: The edges of each node, ``(None, 0)`` for an input without gradient.
        weight_nodes: Nodes from which only parameters can be reached, leaves included.
        borders: Border nodes, each with the outputs that receive gradients.
        reached: The inputs of the stage that influence its outputs.
        owners: For nodes written in Python, the node that keeps them valid after the graph is
        freed.
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
        """Return groups of border and weight nodes that must run together in W."""
        groups = _Groups()
        # Graph order, so that parameter hooks run in the same order on every rank.
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
        """For each edge of a node, return whether it belongs to W (``weights``) or to I."""
        edges = self.edges[node]
        return [(child in self.weight_nodes) == weights for child, _ in edges if child is not None]


def _is_branch_of_weights(children: list[Node], weight_nodes: set[Node]) -> bool:
    """Return whether a first-stage node is on the branch of a single weight."""
    return len(children) == 1 and children[0] in weight_nodes


def is_leaf(node: Node) -> bool:
    """Return whether a node accumulates into the gradient of a leaf tensor."""
    return hasattr(node, "variable")


def _owners(
    edges: dict[Any, list[tuple[Any, int]]], outputs: Sequence[GradientEdge]
) -> dict[Node, Node]:
    """Return the nearest native node above each Python node, or the ownership token of its output.

    In torch 2.11, the Python object of a Python node does not own the node, so its saved tensors
    are freed with the graph. In torch 2.13 it owns the node, and no other reference is needed. A
    held node holds all nodes below it, so the cost is at most the saved tensors of the native node
    above the highest Python node, and zero in stages of our GPT.
    """
    if torch.__version__ >= "2.13":  # TorchVersion compares versions, not text
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
    """Return the edges of all nodes, children first; iterative, as graphs may be deep."""
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
        """Return the representative of the set of a node."""
        parent = self._parent
        while (above := parent.get(node, node)) is not node:
            parent[node] = parent.get(above, above)  # path halving
            node = above
        return node

    def join(self, first: Node, second: Node) -> None:
        """Merge two sets."""
        self._parent[self.find(first)] = self.find(second)
