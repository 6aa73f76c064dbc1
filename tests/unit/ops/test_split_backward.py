"""I and then W: the gradients of a whole backward pass, to the bit, for any module."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from megacore.ops.dense import rms_norm
from megacore.ops.split_backward import DeferredWeightGrads, backward_input
from megacore.parallel.interleave import idle_work, yield_turn

WIDTH, LENGTH, BATCH = 8, 6, 3


class Layer(nn.Module):
    """Biases, broadcast weights, weights made from weights, and functions of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value)) * self.gate
        return x + self.normed(F.gelu(rms_norm(x, self.scale, 1e-5)))


class Stage(nn.Module):
    """Also a weight used twice, an embedding that meets the activations, and a convolution."""

    def __init__(self, *, checkpointed: bool = False, low_precision: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.tied = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.conv = nn.Conv1d(LENGTH, LENGTH, 3, padding=1)
        self.checkpointed = checkpointed
        self.low_precision = low_precision

    def forward(self, x: Tensor | None) -> Tensor:
        where = torch.arange(LENGTH)
        if x is None:
            x = self.positions(where.repeat(BATCH, 1))
        if self.low_precision:  # the weight is cast, so its gradient is cast back
            return F.linear(x.bfloat16(), self.tied.bfloat16()).float() @ self.tied
        x = x @ self.tied + self.positions(where)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        x = self.conv(x)
        return (x @ self.tied.t() + x @ self.tied).cos()


def make(cls: Callable[..., nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(7)
    return cls(**options)


def given(*, first: bool, step: int) -> tuple[Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(step)
    hidden, grad = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator)
    return None if first else hidden.requires_grad_(), grad


def split(
    module: nn.Module, hidden: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, DeferredWeightGrads]:
    return backward_input(get_gradient_edge(module(hidden)), grad, hidden)


@pytest.mark.parametrize("first", [False, True], ids=["inner stage", "first stage"])
@pytest.mark.parametrize("options", [{}, {"checkpointed": True}, {"low_precision": True}], ids=str)
def test_the_bits_and_hooks_of_a_whole_backward_pass(first: bool, options: dict[str, bool]) -> None:
    whole, halves = make(Stage, **options), make(Stage, **options)
    calls: dict[str, list[str]] = {"whole": [], "halves": []}
    for key, module in (("whole", whole), ("halves", halves)):
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _p, name=name, key=key: calls[key].append(name)
            )
    for step in range(2):
        hidden, grad = given(first=first, step=step)
        torch.autograd.backward(whole(hidden), grad)
        mine, _ = given(first=first, step=step)
        before = len(calls["halves"])
        input_grad, weights = split(halves, mine, grad)
        assert len(calls["halves"]) == before  # W has not run
        weights.run()
        weights.run()  # nothing is left
        if hidden is not None:
            assert torch.equal(input_grad, hidden.grad)
            assert mine.grad is None
    assert sorted(calls["whole"]) == sorted(calls["halves"])
    assert len(calls["whole"]) == len(set(calls["whole"])) * 2
    for (name, a), b in zip(whole.named_parameters(), halves.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


class Counting(torch.autograd.Function):
    """A product that says what its backward pass computes."""

    @staticmethod
    def forward(ctx: Any, scale: float, x: Tensor, weight: Tensor, log: list[str]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.log = scale, log
        return x * weight * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.log.append("x" * needs_x + "w" * needs_weight)
        grad = grad * ctx.scale
        return (
            None,
            grad * weight if needs_x else None,
            (grad * x).sum((0, 1)) if needs_weight else None,
            None,
        )


class Once(torch.autograd.Function):
    """Stands for a collective on the way of the activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.log.append("collective")
        return grad, None


def test_nothing_is_computed_twice() -> None:
    log: list[str] = []
    weights = [nn.Parameter(torch.randn(WIDTH)) for _ in range(2)]
    hidden, grad = given(first=False, step=0)
    output = Counting.apply(
        2.0, Once.apply(Counting.apply(1.0, hidden, weights[0], log), log), weights[1], log
    )
    _, deferred = backward_input(get_gradient_edge(output), grad, hidden)
    assert log == ["x", "collective", "x"]
    deferred.run()
    assert log[3:] == ["w", "w"]


class Wait(torch.autograd.Function):
    """Stands for an exchange that is waited for, on both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        yield_turn()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        yield_turn()
        return grad


class Waiting(Stage):
    """Waits behind every layer."""

    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        for layer in self.layers:
            for part in (layer.out, layer.normed):
                part.register_forward_hook(lambda _m, _i, output: Wait.apply(output))


@pytest.mark.parametrize("first", [False, True], ids=["inner stage", "first stage"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_weights_that_are_due_run_while_i_waits(first: bool, checkpointed: bool) -> None:
    whole, halves = (make(Waiting, checkpointed=checkpointed) for _ in range(2))
    calls: list[str] = []
    for name, parameter in halves.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _p, name=name: calls.append(name))
    for step in range(2):
        hidden, grad = given(first=first, step=step)
        torch.autograd.backward(whole(hidden), grad)
        mine, _ = given(first=first, step=step)
        calls.clear()
        output = get_gradient_edge(halves(mine))
        input_grad, weights = backward_input(output, grad, mine, early=idle_work)
        early = list(calls)
        weights.run()
        # The last layer's are done; a weight that is also used before it is not.
        assert {"layers.1.qkv.weight", "conv.weight"} <= set(early)
        assert not {"tied", "layers.0.qkv.weight"} & set(early)
        assert len(calls) == len(set(calls))
        if hidden is not None:
            assert torch.equal(input_grad, hidden.grad)
    for (name, a), b in zip(whole.named_parameters(), halves.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


def test_functions_in_python_compute_gradients_of_due_weights_once() -> None:
    log: list[str] = []
    weights = [torch.nn.Parameter(torch.rand(WIDTH)) for _ in range(2)]
    x = torch.rand(BATCH, LENGTH, WIDTH, requires_grad=True)
    y = Wait.apply(Counting.apply(1.0, x, weights[0], log))
    y = Counting.apply(1.0, y, weights[1], log)
    _, deferred = backward_input(get_gradient_edge(y.sum()), None, x, early=idle_work)
    assert log == ["x", "w", "x"]
    deferred.run()
    assert log == ["x", "w", "x", "w"]
    y = torch.autograd.grad((x * weights[0] * weights[1]).sum(), weights)
    assert all(torch.equal(w.grad, grad) for w, grad in zip(weights, y, strict=True))


def test_loss_of_one_number_and_stages_without_input_or_weights() -> None:
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    hidden = torch.ones(2, requires_grad=True)
    # No weights.
    grad, deferred = backward_input(get_gradient_edge((3 * hidden).sum()), None, hidden)
    deferred.run()
    assert grad.tolist() == [3.0, 3.0]
    # The input has no influence.
    grad, deferred = backward_input(get_gradient_edge((3 * weight).sum()), None, hidden)
    assert (grad, weight.grad) == (None, None)
    deferred.run()
    assert weight.grad.tolist() == [3.0, 3.0]
    # The output is the input.
    grad, deferred = backward_input(get_gradient_edge(hidden), torch.ones(2), hidden)
    deferred.run()
    assert grad.tolist() == [1.0, 1.0]


def test_hooks_on_activations_are_heeded() -> None:
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    hidden = torch.ones(2, requires_grad=True)
    product = hidden * weight
    product.register_hook(lambda grad: 10 * grad)
    grad, deferred = backward_input(get_gradient_edge(product.sum()), None, hidden)
    deferred.run()
    assert grad.tolist() == [20.0, 30.0]
    assert weight.grad.tolist() == [10.0, 10.0]


def test_hooks_of_parameters_run_in_an_order_that_the_graph_decides() -> None:
    order: list[str] = []
    modules = [nn.Linear(WIDTH, WIDTH) for _ in range(20)]  # their nodes lie anywhere
    for module in modules:
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _p, name=name: order.append(name))
    hidden, grad = given(first=False, step=0)
    split(nn.Sequential(*modules), hidden, grad)[1].run()
    assert order == order[:2] * len(modules)


def test_w_lets_go_of_everything() -> None:
    module = make(Stage)
    hidden, grad = given(first=False, step=0)
    kept: list[weakref.ref[Tensor]] = []

    def note(_module: nn.Module, _args: object, output: Tensor) -> None:
        kept.append(weakref.ref(output))

    for layer in module.layers:
        layer.qkv.register_forward_hook(note)
    gc.disable()  # nothing may wait for the collector
    try:
        _, deferred = split(module, hidden, grad)
        alive = weakref.ref(hidden)
        del hidden
        assert alive() is not None  # a weight gradient needs it
        deferred.run()
        assert alive() is None
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


def test_a_reentrant_checkpoint_is_refused() -> None:
    layer = make(Layer)
    hidden, grad = given(first=False, step=0)
    output = checkpoint(layer, hidden, use_reentrant=True)
    with pytest.raises(ValueError, match=r"reentrant checkpoint cannot split.*use_reentrant=False"):
        backward_input(get_gradient_edge(output), grad, hidden)
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_a_deep_graph_is_no_problem() -> None:
    weight = nn.Parameter(torch.tensor(1.0))
    hidden = torch.ones((), requires_grad=True)
    x = hidden
    for _ in range(5000):
        x = x * weight
    grad, deferred = backward_input(get_gradient_edge(x), None, hidden)
    deferred.run()
    assert (grad.item(), weight.grad.item()) == (1.0, 5000.0)
