"""Graphed modules compute what the modules compute, bit for bit, on static tensors.

The emulated backend fills released tensors with NaN, so a tensor reused too early would show.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megacore.graphs import (
    CaptureError,
    EmulatedBackend,
    GraphedCallable,
    ReplayError,
    make_graphed_callables,
    weak_tensor,
)

LAYERS = 4
ORDERS = {
    "one chunk": [1, 1, -1, 1, -1, -1],
    "two chunks": [1, 1, 2, -2, 1, 2, -2, -1, -1, 2, -2, -1],
    "no pipelining": [1, -1, 1, -1],
    "late weight halves": [1, 1, -1, -1, -1.5, 1, -1, -1.5, -1.5],
    "two chunks, one split": [1, 1, 2, 2, -2, -1, -2, -2.5, -1, -2.5],
}


class Block(nn.Module):
    """Two inputs, one of them optional in its gradient, and a result that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, dict[str, Tensor], None]:
        inner = nn.functional.gelu(self.up(x))
        return x + self.down(inner) * scale, {"inner": inner}, None


def make_blocks() -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList([Block() for _ in range(LAYERS)])


def capture(blocks: nn.ModuleList, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "sample_args": [(torch.zeros(4, 8, requires_grad=True),)] * LAYERS,
        "sample_kwargs": [{"scale": torch.ones(8)}] * LAYERS,
        "backend": "emulated",
    }
    return make_graphed_callables(list(blocks), **{**arguments, **changes})


class Pipeline:
    """Runs an order list over all chunks in one process, like an executor would on its rank."""

    def __init__(self, order: list[float], call: Callable[[int, int, int], Any]) -> None:
        self.order = order
        self.call = call
        self.num_chunks = max(int(abs(entry)) for entry in order)
        self.per_chunk = LAYERS // self.num_chunks
        self.num_microbatches = order.count(1)

    def step(self, number: int, *, finish: Callable[[int, int, int], None] | None = None) -> list:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randn(self.num_microbatches, 4, 8, generator=generator)
        scale = torch.rand(8, generator=generator)
        done: Counter[float] = Counter()
        ends: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        losses = []
        for entry in self.order:
            chunk, microbatch = int(abs(entry)) - 1, done[entry]
            done[entry] += 1
            if entry > 0:
                given = tokens[microbatch] if chunk == 0 else ends[chunk - 1, microbatch][1]
                x = given.detach().clone().requires_grad_()
                out = x
                for layer in range(self.per_chunk):
                    # Eager code between graphs, which keeps what the graphs returned.
                    out, extra, _ = self.call(chunk, microbatch, layer)(out * 0.5, scale=scale)
                    out = out + extra["inner"].pow(2).mean()
                if chunk == self.num_chunks - 1:
                    out = out.pow(2).mean()
                    losses.append(out.item())
                ends[chunk, microbatch] = (x, out)
            elif entry == int(entry):
                x, out = ends[chunk, microbatch]
                is_last = chunk == self.num_chunks - 1
                out.backward(None if is_last else ends[chunk + 1, microbatch][0].grad)
            elif finish is not None:
                for layer in reversed(range(self.per_chunk)):
                    finish(chunk, microbatch, layer)
        return losses


def train(order: list[float], *, reuse: str | None, defer: bool = False) -> tuple[list, list]:
    """Losses of three steps and the parameters after them."""
    blocks = make_blocks()
    optimizer = torch.optim.SGD(blocks.parameters(), 1e-2)
    calls: tuple[GraphedCallable, ...] = ()
    if reuse is not None:
        calls = capture(blocks, order=order, reuse=reuse, defer_weight_grads=defer)

    def call(chunk: int, microbatch: int, layer: int) -> Any:
        if reuse is None:
            return blocks[chunk * pipeline.per_chunk + layer]
        per_microbatch, per_chunk = pipeline.per_chunk, LAYERS // pipeline.num_chunks
        first = chunk * per_chunk * pipeline.num_microbatches
        return calls[first + microbatch * per_microbatch + layer]

    pipeline = Pipeline(order, call)
    finish = (lambda *where: call(*where).backward_dw()) if defer else None
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        losses.append(pipeline.step(number, finish=finish))
        optimizer.step()
    return losses, [param.detach().clone() for param in blocks.parameters()]


@pytest.mark.parametrize("reuse", ["none", "buffers", "graphs"])
@pytest.mark.parametrize("name", ORDERS)
def test_graphs_change_no_bit(name: str, reuse: str) -> None:
    expected = train(ORDERS[name], reuse=None)
    found = train(ORDERS[name], reuse=reuse)
    assert found[0] == expected[0]
    assert all(map(math.isfinite, expected[0][-1]))
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("reuse", ["buffers", "graphs"])
def test_deferred_weight_gradients_come_from_backward_dw(reuse: str) -> None:
    order = ORDERS["late weight halves"]
    expected = train(order, reuse=None)
    found = train(order, reuse=reuse, defer=True)
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


def test_more_live_microbatches_than_planned_are_noticed() -> None:
    blocks = make_blocks()
    calls = capture(blocks, order=[1, -1, 1, -1])
    x = torch.randn(4, 8, requires_grad=True)
    first, _, _ = calls[0](x, scale=torch.ones(8))
    calls[LAYERS](x, scale=torch.ones(8))
    with pytest.raises(ReplayError, match="after another forward pass has replayed the same graph"):
        first.sum().backward()


def test_a_result_kept_too_long_is_poisoned() -> None:
    calls = capture(make_blocks(), order=[1, -1])
    out, _, _ = calls[0](torch.randn(4, 8, requires_grad=True), scale=torch.ones(8))
    assert not out.isnan().any()
    out.sum().backward()
    assert out.isnan().all()


def test_an_input_gradient_kept_too_long_is_poisoned() -> None:
    """It holds until the backward pass of its chunk is complete, and then until the next one."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    sample = (torch.zeros(2, 3, requires_grad=True),)
    calls = make_graphed_callables(
        (first, second), (sample, sample), order=[1, 1, -1, -1], num_layers_per_chunk=2
    )
    ends, kept = [], []
    for microbatch in range(2):
        between = calls[2 * microbatch](torch.ones(2, 3, requires_grad=True))
        between.register_hook(kept.append)
        ends.append(calls[2 * microbatch + 1](between).sum())
    ends[0].backward()
    assert torch.isfinite(kept[0]).all()
    ends[1].backward()
    assert torch.isnan(kept[0]).all()
    assert torch.isfinite(kept[1]).all()


def test_without_an_order_modules_stay_what_they_are() -> None:
    blocks = make_blocks()
    plain = make_blocks()
    assert capture(blocks) == tuple(blocks)
    x = torch.randn(4, 8)
    for _ in range(2):
        for block, other in zip(blocks, plain, strict=True):
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            block(a, scale=torch.ones(8))[0].sum().backward()
            other(b, scale=torch.ones(8))[0].sum().backward()
            assert torch.equal(a.grad, b.grad)
            assert torch.equal(block.up.weight.grad, other.up.weight.grad)
            assert block.unused.grad is None
    blocks.eval()
    assert blocks[0](torch.ones(1, 8), scale=torch.ones(8))[0].shape == (1, 8)
    blocks.train()
    with torch.no_grad():
        blocks[0](torch.ones(2, 8), scale=torch.ones(8))
    blocks[0].reset_graphs()
    with pytest.raises(ReplayError, match="were reset"):
        blocks[0](x.requires_grad_(), scale=torch.ones(8))


def test_hooks_on_parameters_run_at_each_replay() -> None:
    blocks = make_blocks()
    seen = []
    blocks[0].up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    calls = capture(blocks, order=[1, -1])
    assert not seen
    for count in (1, 2, 3):
        x = torch.randn(4, 8, requires_grad=True)
        calls[0](x, scale=torch.ones(8))[0].sum().backward()
        assert len(seen) == count


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((torch.zeros(5, 8, requires_grad=True),), {"scale": torch.ones(8)}, ReplayError,
         r"input 0: now shape \(5, 8\), not \(4, 8\)"),
        ((torch.zeros(8, 4, requires_grad=True).t(),), {"scale": torch.ones(8)}, ReplayError,
         r"stride \(1, 4\), not \(8, 1\)"),
        ((torch.zeros(4, 8),), {"scale": torch.ones(8)}, ReplayError, "requires_grad False"),
        ((torch.zeros(4, 8, requires_grad=True).bfloat16(),), {"scale": torch.ones(8)}, ReplayError,
         "dtype torch.bfloat16, not torch.float32"),
        ((torch.zeros(4, 8, requires_grad=True),), {"scale": 1.0}, ReplayError, "not a tensor"),
        (((torch.zeros(4, 8),),), {"scale": torch.ones(8)}, ReplayError, "another structure"),
        ((torch.zeros(4, 8, requires_grad=True),), {}, TypeError, "this call lacks scale"),
        ((torch.zeros(4, 8, requires_grad=True),), {"scale": torch.ones(8), "bias": 1}, TypeError,
         "this call has bias too"),
    ],
)  # fmt: skip
def test_a_call_that_differs_from_the_capture_is_refused(
    args: tuple, kwargs: dict, error: type[Exception], match: str
) -> None:
    calls = capture(make_blocks(), order=[1, -1])
    with pytest.raises(error, match=match):
        calls[0](*args, **kwargs)


def test_a_moved_parameter_is_noticed() -> None:
    blocks = make_blocks()
    calls = capture(blocks, order=[1, -1])
    blocks[0].up.weight.data = blocks[0].up.weight.data.clone()
    text = r"the parameter 'weight' of module 0 \(Block\), \[16, 8\], has moved"
    with pytest.raises(ReplayError, match=text):
        calls[0](torch.zeros(4, 8, requires_grad=True), scale=torch.ones(8))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_tensor_in_the_place_of_a_captured_one_is_noticed(kind: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    graphed = make_graphed_callables(module, (torch.ones(2, 3),), backend="emulated")
    before = graphed(torch.ones(2, 3)).clone()
    if kind == "parameter":
        module[0].bias = nn.Parameter(torch.full((3,), 5.0))
    else:
        module[1].running_mean = torch.full((3,), 7.0)
    name = "bias" if kind == "parameter" else "running_mean"
    with pytest.raises(ReplayError, match=f"the {kind} '{name}' of module 0 .* was replaced"):
        graphed(torch.ones(2, 3))
    again = make_graphed_callables(module, (torch.ones(2, 3),), backend="emulated")
    assert torch.equal(again(torch.ones(2, 3)), nn.Sequential.forward(module, torch.ones(2, 3)))
    assert not torch.equal(again(torch.ones(2, 3)), before)


def test_a_captured_module_can_be_captured_again() -> None:
    module = nn.Linear(3, 3)
    for reset in (False, True, True):
        make_graphed_callables(module, (torch.ones(2, 3),), backend="emulated")
        x = torch.randn(2, 3)
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
        if reset:
            module.reset_graphs()
            with pytest.raises(ReplayError, match="were reset; capture again"):
                module(x)
    kept = module.forward
    with pytest.raises(ValueError, match="num_layers_per_chunk"):
        make_graphed_callables(
            module, (torch.ones(2, 3),), num_layers_per_chunk=1, backend="emulated"
        )
    assert module.forward is kept


def test_arguments_of_a_module_are_a_tuple() -> None:
    with pytest.raises(TypeError, match=r"are a Tensor; give a tuple .*\(x,\) for one"):
        make_graphed_callables(nn.Linear(2, 2), torch.ones(1, 2), backend="emulated")


class Broken(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.calls, self.at = 0, at

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("this cannot be captured")
        return x * self.weight


@pytest.mark.parametrize(("at", "phase"), [(2, "the warmup of"), (4, "the capture of the forward")])
def test_a_failed_capture_names_the_line_and_leaves_the_module_alone(at: int, phase: str) -> None:
    broken = Broken(at)
    forward = broken.forward
    with pytest.raises(
        CaptureError,
        match=rf"{phase}.*Broken.*this cannot be captured \(at test_callables.py:\d+: raise",
    ):
        make_graphed_callables(broken, (torch.ones(8),), backend="emulated")
    assert broken.forward == forward
    broken(torch.ones(8)).sum().backward()
    assert broken.weight.grad.tolist() == [1.0] * 8


def test_what_cannot_be_captured_is_refused() -> None:
    x = torch.zeros(4, 8, requires_grad=True)
    with pytest.raises(TypeError, match="only torch modules can be captured"):
        make_graphed_callables([torch.relu], [(x,)])
    with pytest.raises(TypeError, match="sample arguments must be tensors"):
        make_graphed_callables(nn.Linear(8, 8), (1.0,))
    with pytest.raises(ValueError, match="some of the modules are in training and some in evalua"):
        make_graphed_callables([nn.Linear(8, 8), nn.Linear(8, 8).eval()], [(x,)] * 2)
    hooked = nn.Linear(8, 8)
    hooked.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks on itself, which a replay would skip"):
        make_graphed_callables(hooked, (x,))
    with pytest.raises(ValueError, match="2 modules need as many tuples of sample arguments"):
        make_graphed_callables([nn.Linear(8, 8)] * 2, [(x,)])
    with pytest.raises(ValueError, match="3 modules do not divide into 2 equal chunks"):
        make_graphed_callables([nn.Linear(8, 8)] * 3, [(x,)] * 3, order=[1, 2, -2, -1])
    with pytest.raises(ValueError, match='backend "tpu" is unknown; the backends are cuda, emul'):
        make_graphed_callables(nn.Linear(8, 8), (x,), backend="tpu")
    with pytest.raises(ValueError, match="needs tensors on a CUDA device, not on cpu"):
        make_graphed_callables(nn.Linear(8, 8), (x,), backend="cuda")


def test_an_input_without_influence_needs_permission() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            del y
            return x * 2

    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    with pytest.raises(CaptureError, match=r"input 1 of module 0 \(First\) requires grad but"):
        make_graphed_callables(First(), (x, y))
    graphed = make_graphed_callables(First(), (x, y), allow_unused_input=True)
    graphed(x, y).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert y.grad is None


def test_a_replay_does_not_read_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    graphed = make_graphed_callables(
        nn.Linear(2, 2), (torch.ones(1, 2),), backend=EmulatedBackend()
    )

    def read(*_: Any, **__: Any) -> str:
        raise AssertionError("a replay formats a tensor, which waits for the device")

    monkeypatch.setattr(Tensor, "__repr__", read)
    graphed(torch.ones(1, 2)).sum().backward()


def test_poison_can_be_left_out() -> None:
    graphed = make_graphed_callables(
        nn.Linear(2, 2), (torch.ones(1, 2),), backend=EmulatedBackend(poisons=False)
    )
    out = graphed(torch.ones(1, 2))
    out.sum().backward()
    assert math.isfinite(out.sum().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_weak_tensor_is_the_same_memory(dtype: torch.dtype) -> None:
    owner = torch.zeros(4, 6, dtype=dtype)[1:, ::2]
    weak = weak_tensor(owner)
    assert (weak.data_ptr(), weak.stride(), weak.shape, weak.dtype) == (
        owner.data_ptr(), owner.stride(), owner.shape, dtype
    )  # fmt: skip
    weak.fill_(1)
    assert owner.bool().all()


def test_a_weak_tensor_has_no_history_and_no_owner() -> None:
    leaf = torch.ones(3, requires_grad=True)
    weak = weak_tensor(2 * leaf)
    assert weak.grad_fn is None
    assert not weak.requires_grad
    memory = np.zeros(3)
    num_owners = sys.getrefcount(memory)
    weak = weak_tensor(torch.from_numpy(memory))
    assert sys.getrefcount(memory) == num_owners
    memory[1] = 4.0
    assert weak.tolist() == [0.0, 4.0, 0.0]
    for tensor in (weak[0], torch.zeros(2, 0), torch.zeros(3, dtype=torch.float8_e4m3fn)):
        again = weak_tensor(tensor)
        assert (again.shape, again.dtype) == (tensor.shape, tensor.dtype)


def test_what_is_not_memory_alone_has_no_weak_tensor() -> None:
    conjugated = torch.zeros(1, dtype=torch.complex64).conj()
    sparse, meta = torch.zeros(1).to_sparse(), torch.zeros(1, device="meta")
    for tensor in (conjugated, sparse, meta):
        with pytest.raises(ValueError, match="no tensor without ownership can be made of"):
            weak_tensor(tensor)
