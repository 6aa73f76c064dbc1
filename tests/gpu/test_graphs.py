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


class Wide(nn.Module):
    """Its temporary tensors are as large as what it keeps for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(x @ self.weight) + x.square().roll(1, 0) * 1e-3
        return x


def test_a_graph_that_replays_again_leaves_what_another_microbatch_keeps() -> None:
    """Microbatch 2 runs the passes of microbatch 0 while 1 is alive, in memory of its own."""
    order = [1, 1, -1, 1, -1, 1, -1, -1]
    torch.manual_seed(1)
    modules = [Wide().cuda() for _ in range(3)]
    calls = make_graphed_callables(modules, [sample()] * 3, order=order, backend="cuda")

    def run(call: Any) -> list[Tensor]:
        torch.manual_seed(2)
        xs = [torch.randn(ROWS, HIDDEN, device="cuda", requires_grad=True) for _ in range(4)]
        outs: dict[int, Tensor] = {}
        done: Counter[float] = Counter()
        for entry in order:
            microbatch = done[entry]
            done[entry] += 1
            if entry < 0:
                outs.pop(microbatch).square().sum().backward()
                continue
            out = xs[microbatch]
            for layer in range(3):
                out = call(microbatch, layer)(out)
            outs[microbatch] = out
        grads = [x.grad for x in xs] + [m.weight.grad.clone() for m in modules]
        for module in modules:
            module.weight.grad = None
        return grads

    expected = run(lambda _, layer: modules[layer])
    for _ in range(3):
        found = run(lambda microbatch, layer: calls[3 * microbatch + layer])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def in_use() -> tuple[int, int]:
    """Bytes of tensors, and bytes that the allocator holds for them and for pools of graphs."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize("reuse", ["buffers", "graphs"])
def test_reset_returns_the_memory(reuse: str) -> None:
    """Workspaces of cuBLAS too, which torch keeps for each stream that has ever multiplied."""
    blocks = make_blocks()

    def capture_and_replay() -> Any:
        calls = make_graphed_callables(
            list(blocks),
            [sample()] * LAYERS,
            order=ORDERS["one chunk"],
            reuse=reuse,
            backend="cuda",
        )
        out, _ = calls[0](sample()[0])
        out.sum().backward()
        blocks.zero_grad(set_to_none=True)
        return calls

    def capture_and_reset() -> None:
        for call in capture_and_replay():
            call.reset()

    capture_and_reset()  # once for what libraries keep for ever
    before = in_use()
    for _ in range(3):
        capture_and_reset()
        assert in_use() == before
    kept = capture_and_replay()
    assert in_use()[1] > before[1]  # the measure sees pools
    del kept
    assert in_use() == before  # forgotten graphs go too


def test_a_reset_of_some_graphs_leaves_the_others_whole() -> None:
    """The workspace that all of them multiply in lies in the pool of the first one."""
    blocks = make_blocks()
    expected, _ = blocks[3](sample()[0] + 1)
    calls = make_graphed_callables(list(blocks), [sample()] * LAYERS, backend="cuda")
    for call in calls[:3]:
        call.reset_graphs()
    in_use()
    torch.full((64 << 20,), torch.nan, device="cuda")  # what was freed gets other values
    found, _ = calls[3]((sample()[0] + 1).detach().requires_grad_())
    assert torch.equal(found, expected)


def test_a_replay_on_a_stream_of_its_own() -> None:
    block, side = make_blocks()[0], torch.cuda.Stream()
    x = torch.randn(ROWS, HIDDEN, device="cuda", requires_grad=True)
    expected, _ = block(x)
    call = make_graphed_callables(block, sample(), backend="cuda")
    found, _ = call(x, cuda_graph_stream=side)
    found.sum().backward()
    assert torch.equal(found, expected)


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
