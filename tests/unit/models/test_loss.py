from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy

from megacore.parallel.process_groups import Group
from megatrain.models.loss import cross_entropy


def draw(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = scale * torch.randn(5, 2, 7, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 7, (5, 2), generator=generator)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_loss_and_its_gradient_equal_torch(scale: float) -> None:
    logits, labels = draw(scale)
    logits.requires_grad_()
    ours = cross_entropy(logits, labels, first_column=0, group=Group.solo())
    theirs = torch_cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(3.0 * ours, logits), torch.autograd.grad(3.0 * theirs, logits)
    )


def test_the_gradient_is_right() -> None:
    logits, labels = draw()
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, labels, first_column=0, group=Group.solo()),
        logits.requires_grad_(),
    )


def test_bfloat16_logits_give_a_float32_loss_and_a_bfloat16_gradient() -> None:
    logits, labels = draw()
    narrow = logits.bfloat16().requires_grad_()
    loss = cross_entropy(narrow, labels, first_column=0, group=Group.solo())
    loss.backward()
    exact = torch_cross_entropy(narrow.double().flatten(0, 1), labels.flatten())
    assert loss.dtype == torch.float32
    assert narrow.grad is not None
    assert narrow.grad.dtype == torch.bfloat16
    assert math.isclose(loss.item(), exact.item(), rel_tol=1e-6)


def test_the_logits_are_not_changed() -> None:
    logits, labels = draw()
    before = logits.clone()
    cross_entropy(logits, labels, first_column=0, group=Group.solo())
    assert torch.equal(logits, before)


def test_tokens_with_a_label_below_zero_do_not_count() -> None:
    logits = torch.randn(4, 3, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (4, 3))
    labels[1:, 0] = -1
    loss = cross_entropy(logits, labels, first_column=0, group=Group.solo())
    loss.backward()
    grad, logits.grad = logits.grad, None
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-1
    )
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, logits.grad)
    none = cross_entropy(logits, labels * 0 - 1, first_column=0, group=Group.solo())
    assert none.item() == 0.0
