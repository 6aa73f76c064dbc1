"""Operations that experts over several ranks start, and what grouped products are told.

The exchanges and their plans are native calls of the CPU and not counted; on GPUs a plan is three
kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.moe.layer import MoELayer
from tests.dist.test_echo import ECHO, skewed_trainer
from tests.support.distributed import run_ranks
from tests.unit.models.test_operations import Started

STATIC = {"parallel.ep": 2, "moe.layer_pattern": "e", "moe.dispatcher": "static"}


def forward_operations(_rank: int, changes: dict[str, Any]) -> list[str]:
    """Names of the operations of the first MoE layer in a forward pass of training."""
    trainer = skewed_trainer(2, changes)
    layer = next(m for m in trainer.chunks[0].modules() if isinstance(m, MoELayer))
    names: list[list[str]] = []
    forward = layer.forward

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        with Started() as started:
            result = forward(*args, **kwargs)
        names.append(started.names)
        return result

    layer.forward = counted  # type: ignore[method-assign]
    trainer.train_step(0)
    return names[-1]


@pytest.mark.parametrize(("changes", "most"), [({}, 7), (ECHO, 17)], ids=["plain", "clones"])
def test_a_static_layer_over_peers_starts_few_operations(
    changes: dict[str, Any], most: int
) -> None:
    for names in run_ranks(2, forward_operations, {**STATIC, **changes}):
        assert len(names) <= most, names


class Hints(TorchDispatchMode):
    """Expected rows of an expert in the calls of grouped products, by operation and product."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        if "expected_rows" in names:
            given = dict(zip(names, args, strict=False))
            name = f"{func._schema.name} {given.get('product')}"
            self.found.setdefault(name, set()).add(given.get("expected_rows", 0))
        return func(*args, **(kwargs or {}))


def expected_rows(_rank: int, changes: dict[str, Any]) -> tuple[dict[str, set[int]], int, int]:
    """Hints of a training step, and the copies and places (experts and slots) of its MoE layers."""
    trainer = skewed_trainer(2, changes)
    layer = next(m for m in trainer.chunks[0].modules() if isinstance(m, MoELayer))
    copies: list[int] = []
    plan = layer.plan

    def observed(routing: Any, **others: Any) -> Any:
        copies.append(routing.probs.numel())
        return plan(routing, **others)

    layer.plan = observed  # type: ignore[method-assign]
    with Hints() as hints:
        trainer.train_step(0)
    return hints.found, copies[0], layer.dispatcher.placement.num_experts


@pytest.mark.parametrize("changes", [{}, ECHO], ids=["plain", "clones"])
@pytest.mark.parametrize("transport", ["peer", "collective"])
def test_products_of_a_static_layer_know_the_expected_rows(
    changes: dict[str, Any], transport: str
) -> None:
    settings = {**STATIC, "moe.static_transport": transport, **changes}
    for found, num_copies, num_places in run_ranks(2, expected_rows, settings):
        expected = -(-2 * num_copies // num_places)
        assert len(found) >= 3  # a product and both gradients
        assert set().union(*found.values()) == {expected}, found


def test_products_of_a_dispatcher_without_capacity_take_the_mean_of_their_rows() -> None:
    for found, _, _ in run_ranks(2, expected_rows, {**STATIC, "moe.dispatcher": "alltoall"}):
        assert set().union(*found.values()) == {0}
