"""Operations that a layer starts: on a GPU, or on a CPU with a small model, they are its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.config import MoEConfig
from tests.support.models import random_batch, tiny_config, whole_model


class Started(TorchDispatchMode):
    """Names of operations that compute or write; views and new memory start nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if not (func.is_view or name.startswith(("_unsafe_view", "empty", "new_empty", "detach"))):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def started(function: Callable[[], Tensor]) -> tuple[list[str], list[str]]:
    """Operations of the forward and of the backward pass."""
    with Started() as forward:
        y = function()
    grad = torch.ones_like(y)
    with Started() as backward:
        y.backward(grad)
    return forward.names, backward.names


@pytest.mark.parametrize("qk_norm", ["none", "head"])
def test_a_dense_layer_starts_few_operations(qk_norm: str) -> None:
    config = tiny_config(qk_norm=qk_norm)
    model, batch = whole_model(config), random_batch(config)
    x = torch.randn(16, 3, 32, requires_grad=True)
    forward, backward = started(lambda: model.layers[0](x, model.rotary(16), batch))
    assert len(forward) <= 10, forward
    assert len(backward) <= 14, backward


def test_dropout_starts_two_operations_at_each_of_its_places() -> None:
    config = tiny_config(dropout=0.1)
    model, batch = whole_model(config), random_batch(config)
    x = torch.randn(16, 3, 32, requires_grad=True)
    forward, backward = started(lambda: model.layers[0](x, model.rotary(16), batch))
    assert len(forward) <= 14, forward
    assert len(backward) <= 16, backward


def test_experts_start_few_operations() -> None:
    config = tiny_config()
    moe = MoEConfig(
        num_experts=4,
        ffn_hidden_size=24,
        shared_ffn_hidden_size=24,
        aux_loss_coef=1e-2,
        z_loss_coef=1e-3,
        expert_bias=True,
        score_function="sigmoid",
    )
    block, batch = whole_model(config, moe=moe).layers[0].mlp, random_batch(config)
    x = torch.randn(16, 3, 32, requires_grad=True)
    forward, backward = started(lambda: block(x, batch))
    assert len(forward) <= 15, forward
    assert len(backward) <= 19, backward
