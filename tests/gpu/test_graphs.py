"""Real CUDA graphs give the bits of eager modules, leave nothing behind, and fail with a place."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.graphs import CaptureError, make_graphed_callables, weak_tensor

pytestmark = pytest.mark.gpu

LAYERS, HIDDEN, ROWS = 4, 64, 32
ORDERS = {
    "one chunk": [1, 1, -1, 1, -1, -1],
    "two chunks": [1, 1, 2, -2, 1, 2, -2, -1, -1, 2, -2, -1],
    "late weight halves": [1, 1, -1, -1, -1.5, 1, -1, -1.5, -1.5],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = nn.functional.gelu(self.up(x))
        return x + self.down(inner), inner


def make_blocks() -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList([Block() for _ in range(LAYERS)]).cuda()


def sample() -> tuple[Tensor]:
    return (torch.zeros(ROWS, HIDDEN, device="cuda", requires_grad=True),)


def run_step(order: list[float], call: Any, number: int) -> list[float]:
    """One process plays all chunks of an order list."""
    num_chunks = max(int(abs(entry)) for entry in order)
    generator = torch.Generator("cuda").manual_seed(number)
    shape = (order.count(1), ROWS, HIDDEN)
    tokens = torch.randn(shape, generator=generator, device="cuda")
    done: Counter[float] = Counter()
    ends: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    losses = []
    for entry in order:
        chunk, microbatch = int(abs(entry)) - 1, done[entry]
        done[entry] += 1
        if entry > 0:
            given = tokens[microbatch] if chunk == 0 else ends[chunk - 1, microbatch][1]
            x = given.detach().clone().requires_grad_()
            out = x
            for layer in range(LAYERS // num_chunks):
                out, inner = call(chunk, microbatch, layer)(out * 0.5)
                out = out + inner.pow(2).mean()
            if chunk == num_chunks - 1:
                out = out.pow(2).mean()
                losses.append(out.detach())
            ends[chunk, microbatch] = (x, out)
        elif entry == int(entry):
            x, out = ends[chunk, microbatch]
            is_last = chunk == num_chunks - 1
            out.backward(None if is_last else ends[chunk + 1, microbatch][0].grad)
    return [loss.item() for loss in losses]


def train(order: list[float], reuse: str | None) -> tuple[list, list[Tensor]]:
    blocks = make_blocks()
    optimizer = torch.optim.SGD(blocks.parameters(), 1e-2)
    calls: Any = None
    if reuse is not None:
        calls = make_graphed_callables(
            list(blocks), [sample()] * LAYERS, order=order, reuse=reuse, backend="cuda"
        )
    num_chunks = max(int(abs(entry)) for entry in order)
    per_chunk, num_microbatches = LAYERS // num_chunks, order.count(1)

    def call(chunk: int, microbatch: int, layer: int) -> Any:
        if calls is None:
            return blocks[chunk * per_chunk + layer]
        return calls[(chunk * num_microbatches + microbatch) * per_chunk + layer]

    losses = []
    for number in range(5):
        optimizer.zero_grad()
        losses.append(run_step(order, call, number))
        optimizer.step()
    return losses, [param.detach().clone() for param in blocks.parameters()]


@pytest.mark.parametrize("reuse", ["none", "buffers", "graphs"])
@pytest.mark.parametrize("name", ORDERS)
def test_graphs_change_no_bit(name: str, reuse: str) -> None:
    expected = train(ORDERS[name], None)
    found = train(ORDERS[name], reuse)
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


def test_reset_returns_the_memory() -> None:
    blocks = make_blocks()

    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    def capture_and_reset() -> None:
        calls = make_graphed_callables(
            list(blocks), [sample()] * LAYERS, order=[1, -1], backend="cuda"
        )
        for call in calls:
            call.reset()

    capture_and_reset()  # once for what libraries keep
    before = used()
    capture_and_reset()
    assert used() == before


class Syncing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * float(x.sum().item() > -1e30)


def test_a_host_sync_in_a_module_is_named_and_training_goes_on() -> None:
    module = Syncing().cuda()
    with pytest.raises(
        CaptureError, match=r"(?s)the capture of the forward pass of.*Syncing.*at test_"
    ):
        make_graphed_callables(module, sample(), backend="cuda")
    module(torch.ones(ROWS, HIDDEN, device="cuda")).sum().backward()
    assert module.weight.grad is not None
    blocks = make_blocks()
    make_graphed_callables(list(blocks), [sample()] * LAYERS, backend="cuda")
    out, _ = blocks[0](torch.ones(ROWS, HIDDEN, device="cuda", requires_grad=True))
    assert torch.isfinite(out).all()


def test_a_weak_tensor_is_the_same_memory() -> None:
    owner = torch.zeros(4, 6, device="cuda", dtype=torch.bfloat16)[1:, ::2]
    weak = weak_tensor(owner)
    assert (weak.data_ptr(), weak.stride()) == (owner.data_ptr(), owner.stride())
    weak.fill_(1)
    assert owner.bool().all()
