"""The CUDA kernels on tokens against the CPU and against fp64, into poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from megacore.ops import (
    gelu,
    has_cuda_kernels,
    permute,
    permute_probs,
    sort_by_expert,
    swiglu,
    top_k,
    unpermute,
)
from megacore.ops.activations import gelu_reference, swiglu_reference
from megacore.ops.optim import sum_of_squares
from megacore.ops.permutation import permute_reference, unpermute_reference
from tests.support.gpu import capture, poisoned_memory, synchronising_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_cuda_kernels(), reason="built without CUDA kernels"),
]

Operation = Callable[..., Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Largest error relative to the largest element: one rounding, and sums of a few rounded terms.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def choices(num_tokens: int, k: int, num_experts: int, kind: str, seed: int = 0) -> Tensor:
    """Experts of each token; every token chooses an expert once, as routers do."""
    random = generator(seed)
    if kind == "one":
        return torch.where(torch.arange(k) == 0, num_experts - 1, -1).repeat(num_tokens, 1)
    if kind == "none":
        return torch.full((num_tokens, k), -1)
    skew = torch.linspace(0, 3, num_experts) if kind == "skewed" else torch.zeros(num_experts)
    scores = torch.randn(num_tokens, num_experts, generator=random) + skew
    chosen = scores.topk(k, dim=-1).indices
    if kind == "dropped":
        chosen[torch.rand(chosen.shape, generator=random) < 0.3] = -1
    return chosen


CASES = [
    (0, 2, 4, "even"),
    (1, 1, 1, "even"),
    (1, 8, 256, "even"),
    (37, 2, 8, "dropped"),
    (513, 8, 256, "skewed"),
    (300, 3, 5, "one"),
    (300, 2, 16, "none"),
    (9000, 8, 512, "dropped"),
    (20_011, 4, 60, "skewed"),
]


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    scale = expected.abs().max().item() if expected.numel() else 0.0
    assert torch.isfinite(found).all()
    worst = (found - expected).abs().max().item() if expected.numel() else 0.0
    assert worst <= tolerance * max(scale, 1e-30), f"off by {worst:.3g}, scale {scale:.3g}"


@pytest.mark.parametrize("case", CASES)
def test_the_sort_has_the_rows_of_the_cpu(case: tuple[int, int, int, str]) -> None:
    expert_of, num_experts = choices(*case), case[2]
    expected = sort_by_expert(expert_of, num_experts)
    on_device = expert_of.cuda()
    with poisoned_memory(), synchronising_is_an_error():
        found = sort_by_expert(on_device, num_experts)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.cpu(), b)


def test_a_large_sort_has_the_rows_of_the_cpu() -> None:
    expert_of = torch.randint(-1, 256, (1 << 19, 8), generator=generator(1))
    for a, b in zip(
        sort_by_expert(expert_of.cuda(), 256), sort_by_expert(expert_of, 256), strict=True
    ):
        assert torch.equal(a.cpu(), b)


def test_more_experts_than_the_kernel_takes_are_sorted_too() -> None:
    expert_of = torch.randint(-1, 700, (999, 4), generator=generator(2))
    found = sort_by_expert(expert_of.cuda(), 700)
    for a, b in zip(found, sort_by_expert(expert_of, 700), strict=True):
        assert torch.equal(a.cpu(), b)


def test_an_expert_or_row_out_of_range_is_no_copy() -> None:
    expert_of = torch.tensor([[0, 7], [-5, 1], [1 << 40, 0]], device="cuda")
    row_map, counts = sort_by_expert(expert_of, 2)
    assert row_map.tolist() == [[0, -1], [-1, 2], [-1, 1]]
    assert counts.tolist() == [2, 1]
    tokens = torch.arange(1.0, 4.0, device="cuda")[:, None].expand(-1, 40)
    with poisoned_memory():
        rows = permute(tokens, row_map, 2)  # row 2 does not exist
        back = unpermute(rows, row_map)
    assert rows[:, 0].tolist() == [1.0, 3.0]
    assert back[:, 39].tolist() == [1.0, 0.0, 3.0]


WIDTHS = [1, 7, 8, 64, 1000, 7168]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", [(0, 2, 4, "even"), (1, 1, 1, "even"), (97, 6, 16, "dropped")])
def test_rows_and_their_gradients(
    case: tuple[int, int, int, str], width: int, weighted: bool, dtype: torch.dtype
) -> None:
    """Permute and unpermute, forward and backward, against fp64 on the CPU."""
    expert_of, num_experts = choices(*case), case[2]
    random = generator(width)
    num_rows = expert_of.numel() + 5
    tokens = torch.randn(case[0], width, generator=random).to(dtype)
    weights = torch.rand(expert_of.shape, generator=random) if weighted else None
    grad_rows = torch.randn(num_rows, width, generator=random).to(dtype)
    grad_tokens = torch.randn(case[0], width, generator=random).to(dtype)
    row_map = sort_by_expert(expert_of, num_experts)[0]

    def run(ops: tuple[Operation, Operation], to: Operation, wide: Operation) -> list[Tensor]:
        spread, collect = ops
        x = to(tokens).requires_grad_()
        w = None if weights is None else wide(weights).requires_grad_()
        leaves = [x] if w is None else [x, w]
        rows = spread(x, wide(row_map), num_rows, w)
        first = torch.autograd.grad(rows, leaves, to(grad_rows))
        y = to(grad_rows).requires_grad_()
        leaves = [y] if w is None else [y, w]
        back = collect(y, wide(row_map), w)
        second = torch.autograd.grad(back, leaves, to(grad_tokens))
        return [rows, *first, back, *second]

    with poisoned_memory():
        found = run((permute, unpermute), lambda t: t.cuda(), lambda t: t.cuda())
    expected = run(
        (permute_reference, unpermute_reference),
        lambda t: t.double(),
        lambda t: t.double() if t.is_floating_point() else t,
    )
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, TOLERANCE[dtype] * (4 if a.dtype == torch.float32 else 1))
    used = row_map[row_map >= 0]
    unused = torch.ones(num_rows, dtype=torch.bool)
    unused[used] = False
    assert not found[0].detach().cpu()[unused].any()
    if not weighted:  # copies keep their bits
        assert torch.equal(found[0].detach().cpu(), permute_reference(tokens, row_map, num_rows))


@pytest.mark.parametrize("dtype", FLOATS)
def test_unused_rows_are_not_read_and_odd_pointers_are_fine(dtype: torch.dtype) -> None:
    expert_of = choices(50, 2, 4, "dropped")
    row_map = sort_by_expert(expert_of, 4)[0].cuda()
    storage = torch.full((1 + 120 * 64,), float("nan"), dtype=dtype, device="cuda")
    rows = storage[1:].view(120, 64)  # no 16-byte boundary
    used = row_map[row_map >= 0]
    rows[used] = torch.randn(len(used), 64, device="cuda", dtype=dtype)
    found = unpermute(rows, row_map)
    assert torch.isfinite(found).all()
    expected = unpermute_reference(rows.nan_to_num(), row_map)
    assert_close(found, expected, TOLERANCE[dtype])
    again = permute(found, row_map, 120)
    assert torch.equal(again, permute_reference(found, row_map, 120))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probs_move_with_their_rows(dtype: torch.dtype) -> None:
    expert_of = choices(1000, 6, 64, "dropped")
    probs = torch.rand(expert_of.shape, generator=generator(3)).to(dtype)
    row_map = sort_by_expert(expert_of, 64)[0]
    with poisoned_memory():
        on_device = probs.cuda().requires_grad_()
        found = permute_probs(on_device, row_map.cuda(), 7000)
        (grad,) = torch.autograd.grad(
            found, on_device, torch.arange(7000.0, device="cuda").to(dtype)
        )
    assert torch.equal(found.detach().cpu(), permute_probs(probs, row_map, 7000))
    assert torch.equal(grad.cpu(), torch.where(row_map < 0, 0, row_map).to(dtype))


@pytest.mark.parametrize(
    ("rows", "columns", "k"),
    [
        (0, 4, 2),
        (1, 1, 1),
        (1000, 8, 2),
        (77, 33, 33),
        (4096, 256, 8),
        (300, 1024, 10),
        (9, 3000, 4),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_top_k_chooses_as_the_cpu_does(rows: int, columns: int, k: int, dtype: torch.dtype) -> None:
    random = generator(columns)
    scores = torch.randint(-4, 5, (rows, columns), generator=random).to(dtype)
    special = torch.rand(scores.shape, generator=random)
    scores[special < 0.02] = float("nan")
    scores[(special > 0.02) & (special < 0.04)] = -0.0
    scores[special > 0.98] = float("-inf")
    expected = top_k(scores, k)
    on_device = scores.cuda()
    with poisoned_memory(), synchronising_is_an_error():
        found = top_k(on_device, k)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "shape", [(0, 64), (1, 1), (5, 7), (64, 96), (33, 1024), (10, 1030), (7, 8192)]
)
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_activations_and_their_gradients(
    name: str, shape: tuple[int, int], weighted: bool, dtype: torch.dtype
) -> None:
    kernel, reference = {
        "swiglu": (swiglu, swiglu_reference),
        "gelu": (gelu, gelu_reference),
    }[name]
    rows, width = shape
    random = generator(width)
    x = (3 * torch.randn(rows, width * (2 if name == "swiglu" else 1), generator=random)).to(dtype)
    probs = torch.rand(rows, generator=random) if weighted else None
    grad = torch.randn(rows, width, generator=random).to(dtype)

    def run(op: Operation, to: Operation) -> list[Tensor]:
        leaves = [to(t).requires_grad_() for t in (x, probs) if t is not None]
        y = op(*leaves)
        return [y, *torch.autograd.grad(y, leaves, to(grad))]

    with poisoned_memory():
        found = run(kernel, lambda t: t.cuda())
    for a, b in zip(found, run(reference, lambda t: t.double()), strict=True):
        assert_close(a, b, 4 * TOLERANCE[a.dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("used", [0, 5, 300, 400])
def test_activations_stop_at_the_row_that_the_device_says(used: int, dtype: torch.dtype) -> None:
    x, probs = torch.randn(300, 1040, device="cuda").to(dtype), torch.rand(300, device="cuda")
    num_rows = torch.tensor(used, device="cuda")
    grad = torch.randn(300, 1040, device="cuda").to(dtype)
    for op, width in ((swiglu, 520), (gelu, 1040)):
        leaves = [t.clone().requires_grad_() for t in (x, probs)]
        whole = op(*leaves)
        expected = [whole, *torch.autograd.grad(whole, leaves, grad[:, :width])]
        with poisoned_memory(), synchronising_is_an_error():
            y = op(*leaves, num_rows=num_rows)
            found = [y, *torch.autograd.grad(y, leaves, grad[:, :width].contiguous())]
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a[:used], b[:used])
            assert a[used:].isnan().all()


def test_extreme_gates_saturate() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, 88.0, 200.0, 1e30], device="cuda")
    x = torch.stack([gate, torch.ones_like(gate)], dim=1).requires_grad_()
    y = swiglu(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert y.flatten().tolist() == pytest.approx([0, 0, 0, 88.0, 200.0, 1e30], rel=1e-6, abs=1e-30)
    assert grad[:, 0].tolist() == pytest.approx([0, 0, 0, 1, 1, 1], rel=1e-6, abs=1e-30)


def expert_layer(
    scores: Tensor, x: Tensor, scale: Tensor, *, k: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """From the router's scores to the sum over experts, with a cheap stand-in for the products."""
    chosen = top_k(scores, k)
    probs = torch.softmax(scores, dim=-1).gather(1, chosen)
    row_map, tokens_per_expert = sort_by_expert(chosen, num_experts)
    rows = permute(x, row_map, x.shape[0] * k + 16)
    row_probs = permute_probs(probs, row_map, rows.shape[0])
    hidden = swiglu(torch.cat([rows, rows * scale], dim=-1), row_probs)
    return unpermute(hidden, row_map), tokens_per_expert, row_map


def layer_inputs(seed: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    random = generator(seed)
    scores = torch.randn(512, 64, generator=random) + torch.linspace(0, seed % 5, 64)
    x = torch.randn(512, 128, generator=random).to(dtype)
    scale = torch.randn(128, generator=random).to(dtype)
    return [t.to(device).requires_grad_() for t in (scores, x, scale)]


def layer_pass(scores: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    out, counts, row_map = expert_layer(scores, x, scale, k=4, num_experts=64)
    grads = torch.autograd.grad(out.float().square().sum(), [scores, x, scale])
    return (out.detach(), counts, row_map, *grads)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_layer_neither_waits_nor_depends_on_timing(dtype: torch.dtype) -> None:
    inputs = layer_inputs(0, "cuda", dtype)
    with synchronising_is_an_error():
        first = layer_pass(*inputs)
        second = layer_pass(*inputs)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    expected = layer_pass(*layer_inputs(0, "cpu", dtype))
    assert torch.equal(first[1].cpu(), expected[1])
    assert torch.equal(first[2].cpu(), expected[2])
    for a, b in [(first[0], expected[0]), *zip(first[3:], expected[3:], strict=True)]:
        assert_close(a, b, 10 * TOLERANCE[dtype])


def test_a_captured_layer_follows_changing_ids() -> None:
    static = layer_inputs(0, "cuda", torch.bfloat16)
    graph, outputs = capture(lambda: layer_pass(*static))
    counts: list[Tensor] = []
    for seed in range(20):
        fresh = layer_inputs(seed, "cuda", torch.bfloat16)
        with torch.no_grad():
            for target, source in zip(static, fresh, strict=True):
                target.copy_(source)
        graph.replay()
        once = [t.clone() for t in outputs]
        graph.replay()
        for a, b, c in zip(once, outputs, layer_pass(*fresh), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)
        counts.append(once[1])
    assert not any(torch.equal(a, b) for a, b in pairwise(counts))


def test_the_kernels_run_on_the_current_stream() -> None:
    tokens = torch.ones(4096, 1024, device="cuda")
    row_map = torch.arange(4096, device="cuda")[:, None]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        tokens.mul_(2.0)
        rows = permute(tokens, row_map, 4096)
    assert not stream.query()
    torch.cuda.synchronize()
    assert rows.min().item() == 2.0


@pytest.mark.parametrize("numel", [0, 1, 5, 100_003, 9_000_001])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_sum_of_squares_is_exact_to_fp64_and_stays_on_the_device(
    numel: int, dtype: torch.dtype
) -> None:
    values = torch.randn(numel, generator=generator(numel)).to(dtype)
    storage = torch.empty(numel + 1, dtype=dtype, device="cuda")
    storage[1:] = values.cuda()
    aligned = storage[1:].clone()
    with poisoned_memory(), synchronising_is_an_error():
        total = sum_of_squares(aligned)
        unaligned = sum_of_squares(storage[1:])
    assert torch.equal(total, unaligned)  # the order depends on the size only
    assert total.item() == pytest.approx(values.double().square().sum().item(), rel=1e-12)
    if numel > 4:
        aligned[numel // 2] = float("inf")
        assert not torch.isfinite(sum_of_squares(aligned))


@pytest.mark.real_gpu
def test_the_operations_keep_torchs_rules() -> None:
    ops = torch.ops.megacore
    tokens = torch.randn(4, 16, device="cuda", requires_grad=True)
    rows = torch.randn(8, 16, device="cuda", requires_grad=True)
    expert_of = torch.tensor([[0, 1], [1, 2], [2, -1], [0, 2]], device="cuda")
    row_map, _ = sort_by_expert(expert_of, 3)
    weights = torch.rand(4, 2, device="cuda", requires_grad=True)
    opcheck(ops.sort_by_expert.default, (expert_of, 3))
    opcheck(ops.top_k.default, (tokens.detach(), 2))
    opcheck(ops.row_dots.default, (tokens.detach(), rows.detach(), row_map))
    for w in (None, weights):
        opcheck(ops.permute.default, (tokens, row_map, 8, w))
        opcheck(ops.unpermute.default, (rows, row_map, w))
    probs = torch.rand(4, device="cuda", requires_grad=True)
    for p in (None, probs):
        opcheck(ops.swiglu.default, (tokens, p))
        opcheck(ops.gelu.default, (tokens, p))
    grad = torch.randn(4, 8, device="cuda")
    opcheck(ops.swiglu_backward.default, (grad, tokens.detach(), probs.detach()))
