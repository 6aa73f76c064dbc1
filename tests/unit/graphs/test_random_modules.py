"""Random modules in random orders: the bits of eager training, whatever the graphs share."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megacore.graphs import make_graphed_callables

WIDTH, ROWS = 4, 3
Results = tuple[Tensor | None, ...]


class RandomModule(nn.Module):
    """A few operations on earlier tensors and on weights, and results of every kind."""

    def __init__(self, seed: int, *, num_inputs: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.weights = nn.ParameterList(
            [torch.randn(WIDTH, WIDTH) / 2 for _ in range(draw.randint(1, 3))]
        )
        self.weights[-1].requires_grad_(draw.random() < 0.7)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.unused = nn.Parameter(torch.rand(2))
        self.steps = [
            (draw.choice(OPERATIONS), draw.random(), draw.random(), draw.randrange(3))
            for _ in range(draw.randint(1, 6))
        ]
        # The stream and something that leaves beside it; some results are seen by nobody.
        self.kinds = [draw.choice(RESULTS) for _ in range(draw.randint(0, 3))]
        self.num_inputs = num_inputs

    def forward(self, *inputs: Tensor) -> Results:
        known = list(inputs)
        for operation, a, b, number in self.steps:
            x, y = (known[int(place * len(known))] for place in (a, b))
            made = operation(self, x, y, self.weights[number % len(self.weights)])
            known.append(torch.tanh(made))
        stream = sum(known[1:], known[0] * 0.5)
        return stream, *(kind(self, known[-1], stream, inputs[0]) for kind in self.kinds)


class Doubled(torch.autograd.Function):
    """A function of our own with a weight, that looks at which gradients are asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return 2 * x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, scale = ctx.saved_tensors
        wants_x, wants_scale = ctx.needs_input_grad
        return (
            2 * grad * scale if wants_x else None,
            (2 * grad * x).sum(0) if wants_scale else None,
        )


# ruff: noqa: ARG005  (all take the same arguments)
OPERATIONS: list[Any] = [
    lambda _, x, y, w: torch.tanh(x @ w) + y,
    lambda _, x, y, w: x @ w.t() * y,
    lambda m, x, y, w: nn.functional.layer_norm(x + y, (WIDTH,), m.scale),
    lambda m, x, y, w: torch.relu(x) * m.scale + y @ (w * m.scale),
    lambda _, x, y, w: x + y.sum(),
    lambda _, x, y, w: torch.cat([x[:, :2] @ w[:2], y[:1]])[:ROWS],
    lambda m, x, y, w: Doubled.apply(x, m.scale) + y.mean(0),
    lambda _, x, y, w: nn.functional.linear(x, w, w[0]) - y.exp().clamp(max=3),
]
RESULTS: list[Any] = [
    lambda _, x, y, z: x,
    lambda _, x, y, z: None,
    lambda m, x, y, z: m.scale * 3,
    lambda _, x, y, z: y > 0,
    lambda _, x, y, z: z,
    lambda m, x, y, z: m.scale,
    lambda _, x, y, z: x.detach() * 2,
    lambda _, x, y, z: y.expand(2, ROWS, WIDTH),
]


def random_order(draw: random.Random, num_chunks: int, num_microbatches: int) -> list[float]:
    """Any legal order; chunks follow each other as in a pipeline."""
    splits = [draw.random() < 0.5 for _ in range(num_chunks)]
    done = [[0, 0, 0] for _ in range(num_chunks)]
    order: list[float] = []
    while True:
        may: list[float] = []
        for c, (f, b, w) in enumerate(done):
            if f < num_microbatches and (c == 0 or done[c - 1][0] > f):
                may.append(c + 1)
            if b < f and (c + 1 == num_chunks or done[c + 1][1] > b):
                may.append(-c - 1)
            if splits[c] and w < b:
                may.append(-c - 1.5)
        if not may:
            return order
        entry = draw.choice(may)
        order.append(entry)
        chunk = int(abs(entry)) - 1
        done[chunk][0 if entry > 0 else 2 if entry != int(entry) else 1] += 1


class Step:
    """Runs an order list, with eager code and skips between the graphed modules."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.num_chunks = draw.randint(1, 3)
        self.per_chunk = [draw.randint(1, 3) for _ in range(self.num_chunks)]
        self.num_microbatches = draw.randint(1, 4)
        self.order = random_order(draw, self.num_chunks, self.num_microbatches)
        self.options = {
            "reuse": draw.choice(["none", "buffers", "graphs"]),
            "retain_graph_in_backward": draw.random() < 0.3,
            "defer_weight_grads": draw.random() < 0.7,
        }
        self.skips = draw.random() < 0.5
        torch.manual_seed(seed)
        num_layers = sum(self.per_chunk)
        self.modules = [
            RandomModule(draw.randrange(10**6), num_inputs=draw.randint(1, 2))
            for _ in range(num_layers)
        ]
        self.tokens = torch.randn(self.num_microbatches, ROWS, WIDTH)

    def capture(self) -> Any:
        return make_graphed_callables(
            self.modules,
            [tuple(sample() for _ in range(m.num_inputs)) for m in self.modules],
            order=self.order,
            num_layers_per_chunk=self.per_chunk,
            num_warmup_iters=1,
            allow_unused_input=True,
            backend="emulated",
            **self.options,
        )

    def run(self, calls: Any) -> list[Tensor | None]:
        """Losses, then the gradients of inputs and weights."""
        ends: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        done: dict[float, int] = {}
        losses, input_grads = [], []
        for entry in self.order:
            chunk, microbatch = int(abs(entry)) - 1, done.get(entry, 0)
            done[entry] = microbatch + 1
            if entry > 0:
                given = self.tokens[microbatch] if chunk == 0 else ends[chunk - 1, microbatch][1]
                x = given.detach().clone().requires_grad_()
                out = self.forward(x, chunk, microbatch, calls)
                if chunk == self.num_chunks - 1:
                    out = out.square().mean()
                    losses.append(out.detach().clone())
                ends[chunk, microbatch] = (x, out)
            elif entry == int(entry):
                x, out = ends[chunk, microbatch]
                is_last = chunk == self.num_chunks - 1
                out.backward(None if is_last else ends[chunk + 1, microbatch][0].grad)
                input_grads.append(x.grad.clone())
            elif calls is not None:
                for layer in reversed(range(self.per_chunk[chunk])):
                    calls[self.index(chunk, microbatch, layer)].backward_dw()
        weights = [p for module in self.modules for p in module.parameters()]
        grads = [None if p.grad is None else p.grad.clone() for p in weights]
        for p in weights:
            p.grad = None
        return [*losses, *input_grads, *grads]

    def forward(self, x: Tensor, chunk: int, microbatch: int, calls: Any) -> Tensor:
        stream, before = x, x
        first = sum(self.per_chunk[:chunk])
        for layer in range(self.per_chunk[chunk]):
            module = self.modules[first + layer]
            call = module if calls is None else calls[self.index(chunk, microbatch, layer)]
            inputs = (stream * 0.5, before + 1)[: module.num_inputs]
            results = call(*inputs)
            before, stream = stream, torch.tanh(results[0])
            for extra in results[1:]:
                if extra is not None and extra.is_floating_point():
                    stream = stream + extra.mean()
            if self.skips:
                stream = stream + before
        return stream

    def index(self, chunk: int, microbatch: int, layer: int) -> int:
        first = sum(self.per_chunk[:chunk]) * self.num_microbatches
        return first + microbatch * self.per_chunk[chunk] + layer


def sample() -> Tensor:
    return torch.zeros(ROWS, WIDTH, requires_grad=True)


def check(seed: int) -> None:
    step = Step(seed)
    expected = [step.run(None) for _ in range(2)]
    calls = step.capture()
    for wanted in expected:
        for number, (a, b) in enumerate(zip(step.run(calls), wanted, strict=True)):
            assert (a is None) == (b is None), number
            assert a is None or torch.equal(a, b), number


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_modules_in_random_orders_keep_their_bits(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("seed", [10, 11])
def test_expanded_results_and_inputs_handed_through(seed: int) -> None:
    check(seed)
