"""Output layer and loss in blocks of the vocabulary against the whole logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.functional import linear

from megacore.ops.activations import softcap
from megacore.ops.split_backward import backward_input
from megacore.parallel.process_groups import Group
from megatrain.config import MoEConfig
from megatrain.models import gpt
from megatrain.models.head_loss import head_token_losses
from megatrain.models.loss import cross_entropy, mean_of_labels
from megatrain.models.shape import BLOCK_BYTES, block_columns
from tests.support.models import random_batch, tiny_config, whole_model

VOCAB, PADDED, HIDDEN = 37, 40, 12


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 2, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(-3, VOCAB, (6, 2), generator=generator)
    labels[0, 0], labels[1, 0] = VOCAB - 1, 0
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def whole(x: Tensor, weight: Tensor, labels: Tensor, limit: float | None) -> Tensor:
    logits = softcap(linear(x, weight[:VOCAB]), limit)
    return cross_entropy(logits, labels, first_column=0, group=Group.solo())


def in_blocks(
    x: Tensor, weight: Tensor, labels: Tensor, limit: float | None, columns: int = 5
) -> Tensor:
    losses = head_token_losses(
        x,
        weight,
        labels,
        num_columns=VOCAB,
        columns=columns,
        first_column=0,
        softcap=limit,
        group=Group.solo(),
    )
    return mean_of_labels(losses, labels)


@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize("columns", [1, 5, 37, 100])
def test_loss_and_gradients_are_those_of_the_whole_logits(
    columns: int, limit: float | None
) -> None:
    x, weight, labels = draw()
    ours = in_blocks(x, weight, labels, limit, columns)
    theirs = whole(x, weight, labels, limit)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    found = torch.autograd.grad(3.0 * ours, (x, weight))
    expected = torch.autograd.grad(3.0 * theirs, (x, weight))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14)
    assert not found[1][VOCAB:].any()


def test_narrow_inputs_give_gradients_as_good_as_the_whole_logits() -> None:
    x, weight, labels = draw(torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch.autograd.grad(whole(*wide, labels, None), wide)
    ours = in_blocks(x, weight, labels, None)
    assert ours.dtype == torch.float32
    for found, usual, right in zip(
        torch.autograd.grad(ours, (x, weight)),
        torch.autograd.grad(whole(x, weight, labels, None), (x, weight)),
        exact,
        strict=True,
    ):
        assert found.dtype == torch.bfloat16
        assert (found - right).norm() < 1.5 * (usual - right).norm()


def test_ignored_tokens_alone_give_zero() -> None:
    x, weight, labels = draw()
    loss = in_blocks(x, weight, torch.full_like(labels, -1), None)
    assert loss == 0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, (x, weight)))


def test_a_split_backward_pass_gives_the_same_bits() -> None:
    x, weight, labels = draw(torch.float32)
    expected = torch.autograd.grad(in_blocks(x, weight, labels, 2.0), (x, weight))
    x.grad = weight.grad = None
    grad_x, weights = backward_input(get_gradient_edge(in_blocks(x, weight, labels, 2.0)), None, x)
    assert weight.grad is None
    weights.run()
    assert grad_x is not None
    assert weight.grad is not None
    assert torch.equal(grad_x, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_no_logits_are_kept_for_the_backward_pass() -> None:
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    x, weight, labels = draw()
    with saved_tensors_hooks(note, lambda tensor: tensor):
        in_blocks(x, weight, labels, 2.0)
    assert sorted(kept) == [1, 12, 12, 12 * HIDDEN, PADDED * HIDDEN]


def test_the_size_of_a_block() -> None:
    assert block_columns(4096, 16384) is None
    assert block_columns(4096, 16385) == 4096
    assert block_columns(1 << 20, 1024) is None
    assert block_columns(1 << 20, 1025) == 1024
    columns = block_columns(5000, 131072)
    assert columns is not None
    assert columns % 128 == 0
    assert 0.9 * BLOCK_BYTES < 4 * 5000 * columns <= BLOCK_BYTES


def test_a_model_with_large_logits_computes_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(vocab_size=40, logit_softcap=2.0, num_mtp_layers=1)
    batch = replace(random_batch(config), loss_factor=torch.tensor(1.0))

    def outcome(**changes: Any) -> list[Tensor]:
        model = whole_model(config, moe=MoEConfig(), **changes)
        loss = model(None, batch)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    expected = outcome()
    asked = []
    monkeypatch.setattr(gpt, "block_columns", lambda *sizes: asked.append(sizes) or 7)
    torch.testing.assert_close(outcome(), expected, rtol=2e-5, atol=1e-7)
    assert set(asked) == {(batch.tokens.numel(), 64)}
    shapes = []

    def own(output: Tensor, batch: Any, context: Any) -> Tensor:
        shapes.append(output.shape[-1])
        return gpt.token_loss(output, batch, context)

    torch.testing.assert_close(outcome(loss=own), expected)
    assert set(shapes) == {40}, "a loss of one's own gets the logits"
