from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import linear

from megacore.ops.activations import swiglu
from megacore.ops.dense import rms_norm
from megacore.ops.recompute import RecomputeCache, recompute
from megacore.ops.split_backward import backward_input
from tests.support.storages import Storages

SIZE = 8


class Block(nn.Module):
    """Norm, product, gate, product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.Parameter(torch.rand(SIZE))
        self.up = nn.Parameter(torch.randn(2 * SIZE, SIZE))
        self.down = nn.Parameter(torch.randn(SIZE, SIZE))
        self.num_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        x = rms_norm(x, self.norm, 1e-5)
        return linear(swiglu(linear(x, self.up)), self.down)


Forward = Callable[[nn.Module, Tensor], Tensor]


def gradients(forward: Forward, *, split: bool) -> tuple[list[Tensor], list[int]]:
    """Of the input and all parameters of three blocks in a row."""
    blocks = [Block() for _ in range(3)]
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = x
    for block in blocks:
        y = y + forward(block, y)
    loss = y.square().sum()
    if split:
        x_grad, weights = backward_input(get_gradient_edge(loss), None, x)
        weights.run()
    else:
        loss.backward()
        x_grad = x.grad
    grads = [p.grad for block in blocks for p in block.parameters()]
    return [x_grad, *grads], [block.num_runs for block in blocks]


@pytest.mark.parametrize("split", [False, True])
def test_gradients_have_the_same_bits_and_everything_runs_twice(split: bool) -> None:
    expected, runs = gradients(lambda block, x: block(x), split=split)
    assert runs == [1, 1, 1]
    found, runs = gradients(recompute, split=split)
    assert runs == [2, 2, 2], "both halves of a split backward share one second run"
    for grad, other in zip(found, expected, strict=True):
        assert torch.equal(grad, other)


def test_only_the_input_is_kept_and_each_tensor_goes_when_autograd_is_done() -> None:
    block, x = Block(), torch.randn(64, SIZE, requires_grad=True)
    before = (x, *block.parameters())
    with Storages(*before) as plain:
        y = block(x)
        kept = plain.live_bytes() - y.untyped_storage().nbytes()
    assert kept > 4 * x.nbytes
    del y
    with Storages(*before) as storages:
        y = recompute(block, x)
        assert storages.live_bytes() == y.untyped_storage().nbytes(), "nothing but the result"
        edge = get_gradient_edge(y)
        grad, weights = backward_input(edge, torch.ones_like(y), x)
        assert storages.live_bytes() > kept, "W needs the activations"
        del y, grad, edge
        weights.run()
        del weights
        assert storages.live_bytes() == sum(p.grad.nbytes for p in block.parameters())


def test_the_product_at_the_end_is_not_computed_again() -> None:
    block, x = Block(), torch.randn(4, SIZE, requires_grad=True)
    y = recompute(block, x).sum()
    with Storages() as storages:
        y.backward()
    # Two for each of the two products, and the first product again.
    assert storages.num_products == 5


def test_without_gradients_it_only_runs() -> None:
    block = Block()
    with torch.no_grad():
        recompute(block, torch.ones(2, SIZE))
    assert block.num_runs == 1


def test_a_part_that_is_not_reached_is_not_run_again() -> None:
    block, other = Block(), Block()
    x = torch.ones(2, SIZE, requires_grad=True)
    y, unused = recompute(block, x), recompute(other, x)
    del unused
    y.sum().backward()
    assert (block.num_runs, other.num_runs) == (2, 1)


def test_decisions_are_made_once() -> None:
    """A function that would decide otherwise the second time, because its weights have changed."""
    cache, weight = RecomputeCache(), nn.Parameter(torch.tensor([3.0, 1.0]))
    made = []

    def choose(x: Tensor) -> Tensor:
        def decide() -> int:
            made.append(cache.is_replay)
            return int(weight.argmax())

        return (x * weight)[cache.once(decide)].exp()

    y = recompute(choose, torch.ones(2), cache=cache)
    with torch.no_grad():
        weight.copy_(torch.tensor([3.0, 5.0]))
    y.backward()
    assert made == [False]
    assert weight.grad[1] == 0.0


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: x.narrow(0, 0, 2).exp(), r"kept \[2\] torch.float32 where it kept \[3\]"),
        (lambda x: x + 1.0, "kept 0 tensors where it kept 1 before"),
    ],
)
def test_a_function_that_changes_is_refused(
    second: Callable[[Tensor], Tensor], message: str
) -> None:
    cache = RecomputeCache()

    def changing(x: Tensor) -> Tensor:
        return second(x) if cache.is_replay else x.exp()

    y = recompute(changing, torch.ones(3, requires_grad=True), cache=cache)
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()
