"""Operations that experts over several ranks start; the exchanges themselves are not counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(("changes", "most"), [({}, 30), (ECHO, 40)], ids=["plain", "clones"])
def test_a_static_layer_over_peers_starts_few_operations(
    changes: dict[str, Any], most: int
) -> None:
    for names in run_ranks(2, forward_operations, {**STATIC, **changes}):
        assert len(names) <= most, names
