"""The weight half of a split backward pass goes on from the first half, and computes nothing twice.

What it needs of the first half lies in static tensors until it has run, however late that is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.graphs import BufferRole, ReplayError, make_graphed_callables, plan_capture
from megacore.graphs.capturing import Capturing
from megacore.graphs.replay import GraphedCallable
from megacore.graphs.static_tensors import KeptTensors
from tests.unit.graphs.test_callables import train

LATE = [1, 1, -1, -1, -1.5, 1, -1, -1.5, -1.5]
# Bookkeeping of static tensors and of autograd; what is left is what a module computes.
UNCOUNTED = {"copy_", "clone", "detach", "fill_", "new_zeros", "ones_like", "view", "t"}


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._opname not in UNCOUNTED:
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def make_module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh())


def sample() -> tuple[Tensor]:
    return (torch.zeros(4, 8, requires_grad=True),)


def counted(work: Any) -> Counter[str]:
    with Operations() as operations:
        work()
    return operations.counts


@pytest.mark.parametrize("defer", [False, True])
def test_both_halves_together_compute_what_a_whole_backward_pass_does(defer: bool) -> None:
    eager, module = make_module(), make_module()
    (call,) = make_graphed_callables(
        module, sample(), order=[1, -1, -1.5], defer_weight_grads=defer, backend="emulated"
    )
    x, grad = torch.randn(4, 8), torch.randn(4, 8)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = eager(a)
    expected = counted(lambda: y.backward(grad))
    y = call(b)
    first = counted(lambda: y.backward(grad))
    second = counted(call.backward_dw)
    assert first + second == expected
    assert expected["mm"] == 4
    if defer:
        assert (first["mm"], second["mm"]) == (2, 2)
        assert (first["gelu_backward"], second["gelu_backward"]) == (1, 0)
    assert torch.equal(a.grad, b.grad)
    for p, q in zip(eager.parameters(), module.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("reuse", ["none", "buffers", "graphs"])
def test_gradients_kept_for_late_halves_have_planned_places(reuse: str) -> None:
    plan = plan_capture(LATE, reuse=reuse)
    count = 3 if reuse == "none" else 2
    assert len(plan.buffer_signatures(BufferRole.KEPT)) == count
    lives = {
        (use.microbatch, use.written, use.last_read)
        for use in plan.uses
        if use.role == BufferRole.KEPT
    }
    assert lives == {(0, 2, 4), (1, 3, 7), (2, 6, 8)}
    made: list[Capturing] = []
    original = Capturing.run

    def run(self: Capturing, *args: Any) -> Capturing:
        made.append(self)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Capturing, "run", run)
        module = make_module()
        make_graphed_callables(module, sample(), order=LATE, reuse=reuse, backend="emulated")
    # At the two products arrive 4 x 16 and 4 x 8 numbers.
    assert made[0].static_bytes()["kept"] == count * 4 * (16 + 8) * 4


def all_share_one(self: Capturing) -> None:
    allocate(self)
    first: dict[int, KeptTensors | None] = {}
    for (layer, _), site in self._sites.items():
        site.kept = first.setdefault(layer, site.kept)


allocate = Capturing._allocate
run_backward = GraphedCallable.run_backward


def released_with_the_first_half(self: GraphedCallable, *args: Any, **kwargs: Any) -> Any:
    result = run_backward(self, *args, **kwargs)
    if self._site.kept is not None:
        self._state.poison(list(self._site.kept.tensors))
    return result


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("reuse", ["none", "buffers", "graphs"])
def test_a_kept_gradient_overwritten_too_early_shows(
    reuse: str, defer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = LATE
    expected = train(order, reuse=None)
    assert train(order, reuse=reuse, defer=defer)[0] == expected[0]
    if not defer:
        return  # autograd asks for both halves at once here
    with monkeypatch.context() as patch:
        patch.setattr(Capturing, "_allocate", all_share_one)
        assert train(order, reuse=reuse, defer=True)[0] != expected[0]
    monkeypatch.setattr(GraphedCallable, "run_backward", released_with_the_first_half)
    assert train(order, reuse=reuse, defer=True)[0] != expected[0]


def test_halves_in_another_order_are_refused() -> None:
    (call,) = make_graphed_callables(
        make_module(), sample(), order=[1, -1, -1.5], defer_weight_grads=True, backend="emulated"
    )
    out = call(torch.ones(4, 8, requires_grad=True))
    with pytest.raises(ReplayError, match="comes before the backward pass of this call"):
        call.backward_dw()
    out.sum().backward(retain_graph=True)
    call.backward_dw()
    with pytest.raises(ReplayError, match="runs a second time, but its static tensors have been"):
        call.backward_dw()
    with pytest.raises(ReplayError, match="runs a second time"):
        out.sum().backward()
    call(torch.ones(4, 8, requires_grad=True)).sum().backward()
    call.backward_dw()


class Branches(nn.Module):
    """Every kind of place where gradients meet: weights, inputs and results used more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Parameter(torch.randn(8, 8) / 3)
        self.scale = nn.Parameter(torch.rand(8))
        self.only_a_result = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        inner = torch.tanh(x @ self.tied + self.scale)
        both = inner * y + x.sum()  # its gradient is expanded
        made = self.only_a_result * 2
        return both @ self.tied.t(), inner, None, made, x, inner, (both > 0)


def test_every_kind_of_result_has_the_bits_of_a_whole_backward_pass() -> None:
    torch.manual_seed(5)
    module = Branches()
    xs = [torch.randn(4, 8, requires_grad=True) for _ in range(4)]
    calls = make_graphed_callables(
        module,
        (torch.zeros(4, 8, requires_grad=True), torch.zeros(4, 8, requires_grad=True)),
        order=[1, 1, -1, -1, -1.5, -1.5],
        defer_weight_grads=True,
        backend="emulated",
    )

    def loss_of(results: tuple[Tensor, ...]) -> Tensor:
        a, b, none, c, d, e, flags = results
        assert none is None
        return (a.sum() + b.square().sum() + c.sum() + d.sum() + e.exp().sum()) * flags.sum()

    def grads() -> list[Tensor]:
        found = [tensor.grad for tensor in (*xs, *module.parameters())]
        for tensor in (*xs, *module.parameters()):
            tensor.grad = None
        return found

    for m in range(2):
        loss_of(module(xs[2 * m], xs[2 * m + 1])).backward()
    expected = grads()
    losses = [loss_of(calls[m](xs[2 * m], xs[2 * m + 1])) for m in range(2)]
    for loss in losses:
        loss.backward()
    for call in calls:
        call.backward_dw()
    assert all(torch.equal(a, b) for a, b in zip(grads(), expected, strict=True))
