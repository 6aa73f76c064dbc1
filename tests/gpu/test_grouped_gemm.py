"""Grouped products on the GPU against fp64, eagerly and replayed from a graph."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megacore.ops import cuda_kernels, grouped_gemm
from megacore.ops.gemm_cuda import Product, launch_grouped

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
PLANS = ["wide", "middle", "narrow", "wide-columns", "narrow-columns"]
TAIL = 37  # rows of nobody
SPLITS = {
    "ragged": [100, 0, 1, 300, 7, 129, 0, 64],
    "first empty": [0, 0, 5, 200],
    "one expert of many": [0, 0, 0, 777, 0, 0, 0, 0],
    "a single expert": [513],
    "all empty": [0, 0, 0, 0],
    "one token": [0, 1, 0],
    "equal": [128, 128, 128, 128],
    "256 experts": [(7 * i) % 40 if i % 3 else 0 for i in range(256)],
}
# Largest difference relative to the norm of the result's row, and the mean of it.
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def _needs_a_kernel() -> None:
    major, minor = torch.cuda.get_device_capability()
    if f"{major}{minor}a" not in cuda_kernels().grouped_gemm_archs():
        pytest.skip(f"this build has no grouped product for sm_{major}{minor}")


def random_tensor(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def groups(counts: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in enumerate(counts):
        yield expert, slice(start, start + count)
        start += count


def reference(product: Product, a: Tensor, b: Tensor, counts: list[int], out: Tensor) -> Tensor:
    """In fp64; what no product writes is left as it was."""
    out = out.double()
    for expert, rows in groups(counts):
        if product == "forward":
            out[rows] = a[rows].double() @ b[expert].double().T
        elif product == "input_grad":
            out[rows] = a[rows].double() @ b[expert].double()
        else:
            out[expert] = a[rows].double().T @ b[rows].double()
    return out


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all()
    if not expected.numel():
        return
    norm = expected.norm(dim=-1, keepdim=True) / expected.shape[-1] ** 0.5
    error = (found.double() - expected).abs() / norm.clamp(min=1e-3)
    bound = BOUND[found.dtype]
    assert error.max() <= 8 * bound, f"largest {error.max()}"
    assert (found.double() - expected).norm() <= bound * expected.norm() + 1e-12


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def factors(
    product: Product, counts: list[int], n: int, k: int, dtype: torch.dtype, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Two random factors; the rows of nobody are NaN, so that reading one shows."""
    rows = sum(counts) + TAIL
    a = random_tensor(rows, k if product == "forward" else n, dtype=dtype, seed=seed)
    a[sum(counts) :] = torch.nan
    if product == "weight_grad":
        b = random_tensor(rows, k, dtype=dtype, seed=seed + 1)
        b[sum(counts) :] = torch.nan
    else:
        b = random_tensor(len(counts), n, k, dtype=dtype, seed=seed + 1)
    return a, b


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("product", ["forward", "input_grad"])
@pytest.mark.parametrize("kind", SPLITS)
def test_rows_equal_fp64_and_rows_of_nobody_stay(
    kind: str, product: Product, dtype: torch.dtype, plan: str
) -> None:
    counts, n, k = SPLITS[kind], 264, 200
    a, b = factors(product, counts, n, k, dtype)
    columns = n if product == "forward" else k
    out = torch.full((a.shape[0], columns), torch.nan, device="cuda", dtype=dtype)
    splits = torch.tensor(counts, device="cuda")
    with synchronising_is_an_error():
        launch_grouped(product, a, b, splits, out, plan=plan)
    used = sum(counts)
    assert_near(out[:used], reference(product, a, b, counts, out)[:used])
    assert out[used:].isnan().all()
    launch_grouped(product, a, b, splits, out, plan=plan, clear_tail=True)
    assert not out[used:].any()


@pytest.mark.parametrize("shape", [(8, 8), (16, 1024), (1000, 24), (512, 512)])
@pytest.mark.parametrize("product", ["forward", "input_grad", "weight_grad"])
def test_features_need_to_be_multiples_of_eight_only(
    product: Product, shape: tuple[int, int]
) -> None:
    counts, (n, k) = SPLITS["ragged"], shape
    a, b = factors(product, counts, n, k, torch.bfloat16)
    out_shape = {
        "forward": (a.shape[0], n),
        "input_grad": (a.shape[0], k),
        "weight_grad": (len(counts), n, k),
    }[product]
    out = torch.full(out_shape, torch.nan, device="cuda", dtype=torch.bfloat16)
    launch_grouped(product, a, b, torch.tensor(counts, device="cuda"), out, clear_tail=True)
    expected = reference(product, a, b, counts, torch.zeros_like(out))
    assert_near(out, expected)


@pytest.mark.parametrize("result", ["float32", "operand"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SPLITS)
def test_weight_gradients_overwrite(kind: str, dtype: torch.dtype, result: str) -> None:
    counts, n, k = SPLITS[kind], 136, 264
    dy, x = factors("weight_grad", counts, n, k, dtype)
    out_dtype = torch.float32 if result == "float32" else dtype
    out = torch.full((len(counts), n, k), torch.nan, device="cuda", dtype=out_dtype)
    splits = torch.tensor(counts, device="cuda")
    with synchronising_is_an_error():
        launch_grouped("weight_grad", dy, x, splits, out)
    assert_near(out, reference("weight_grad", dy, x, counts, torch.zeros_like(out)))
    for expert, count in enumerate(counts):
        assert count or not out[expert].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SPLITS)
def test_weight_gradients_accumulate(kind: str, dtype: torch.dtype) -> None:
    counts, n, k = SPLITS[kind], 136, 264
    dy, x = factors("weight_grad", counts, n, k, dtype)
    before = random_tensor(len(counts), n, k, dtype=torch.float32, seed=5)
    out = before.clone()
    splits = torch.tensor(counts, device="cuda")
    launch_grouped("weight_grad", dy, x, splits, out, accumulate=True)
    gradient = reference("weight_grad", dy, x, counts, torch.zeros_like(out))
    assert_near(out, gradient + before.double())
    for expert, count in enumerate(counts):
        assert count or torch.equal(out[expert], before[expert])


@pytest.mark.parametrize("pattern", ["first adds", "first overwrites", "all add", "none adds"])
@pytest.mark.parametrize("kind", ["ragged", "256 experts", "all empty"])
def test_each_expert_adds_or_overwrites_as_its_entry_says(kind: str, pattern: str) -> None:
    counts, n, k = SPLITS[kind], 136, 264
    adds = torch.arange(len(counts), device="cuda") % 2 == (pattern == "first overwrites")
    # The longest group is launched first: it must not decide for the others.
    if pattern in ("all add", "none adds"):
        adds[:] = pattern == "all add"
    dy, x = factors("weight_grad", counts, n, k, torch.bfloat16)
    before = random_tensor(len(counts), n, k, dtype=torch.float32, seed=5)
    before[~adds] = torch.nan
    out, splits = before.clone(), torch.tensor(counts, device="cuda")
    with synchronising_is_an_error():
        launch_grouped("weight_grad", dy, x, splits, out, accumulate_mask=adds)
    gradient = reference("weight_grad", dy, x, counts, torch.zeros_like(out))
    expected = torch.where(adds[:, None, None], before.double() + gradient, gradient)
    assert_near(out, expected)


def random_counts(rng: random.Random, num_experts: int, num_rows: int) -> list[int]:
    """Ragged counts with empty experts whose sum is at most ``num_rows``."""
    weights = [rng.choice([0.0, rng.random(), 5 * rng.random()]) for _ in range(num_experts)]
    total = sum(weights) or 1.0
    share = rng.choice([0.0, 0.3, 1.0])
    return [int(share * num_rows * weight / total) for weight in weights]


@pytest.mark.parametrize("plan", ["wide", "middle", "narrow"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_capture_serves_any_counts_with_equal_bits(dtype: torch.dtype, plan: str) -> None:
    num_experts, num_rows, n, k = 16, 2000, 512, 256
    x = random_tensor(num_rows, k, dtype=dtype, seed=1)
    dy = random_tensor(num_rows, n, dtype=dtype, seed=2)
    w = random_tensor(num_experts, n, k, dtype=dtype, seed=3)
    before = random_tensor(num_experts, n, k, dtype=torch.float32, seed=4)
    adds = torch.arange(num_experts, device="cuda") % 3 != 0
    splits = torch.zeros(num_experts, dtype=torch.int64, device="cuda")
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    sums, fresh = torch.empty_like(before), torch.empty_like(w)

    def run() -> None:
        launch_grouped("forward", x, w, splits, y, clear_tail=True, plan=plan)
        launch_grouped("input_grad", dy, w, splits, dx, clear_tail=True, plan=plan)
        launch_grouped("weight_grad", dy, x, splits, sums, accumulate_mask=adds)
        launch_grouped("weight_grad", dy, x, splits, fresh)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    rng = random.Random(0)
    for _ in range(20):
        counts = random_counts(rng, num_experts, num_rows)
        splits.copy_(torch.tensor(counts))
        found = []
        for _ in range(2):
            for tensor in (y, dx, fresh):
                tensor.fill_(torch.nan)
            sums.copy_(before)
            graph.replay()
            found.append([t.clone() for t in (y, dx, sums, fresh)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert_near(y, reference("forward", x, w, counts, torch.zeros_like(y)))
        assert_near(dx, reference("input_grad", dy, w, counts, torch.zeros_like(dx)))
        gradient = reference("weight_grad", dy, x, counts, torch.zeros_like(sums))
        assert_near(fresh, gradient)
        assert_near(sums, torch.where(adds[:, None, None], before.double() + gradient, gradient))


def test_calls_on_two_streams_do_not_disturb_each_other() -> None:
    counts = SPLITS["ragged"]
    splits = torch.tensor(counts, device="cuda")
    a, b = factors("forward", counts, 2048, 2048, torch.bfloat16)
    dy, x = factors("weight_grad", counts, 1024, 1024, torch.bfloat16)
    y = torch.empty(a.shape[0], 2048, device="cuda", dtype=torch.bfloat16)
    dw = torch.empty(len(counts), 1024, 1024, device="cuda")
    launch_grouped("forward", a, b, splits, y, clear_tail=True)
    launch_grouped("weight_grad", dy, x, splits, dw)
    expected = y.clone(), dw.clone()
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(10):
        y.fill_(torch.nan)
        dw.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            launch_grouped("forward", a, b, splits, y, clear_tail=True)
        with torch.cuda.stream(streams[1]):
            launch_grouped("weight_grad", dy, x, splits, dw)
        torch.cuda.synchronize()
        assert torch.equal(y, expected[0])
        assert torch.equal(dw, expected[1])


def test_counts_that_do_not_fit_stay_within_the_matrices() -> None:
    x = random_tensor(64, 64, dtype=torch.bfloat16, seed=1)
    w = random_tensor(3, 64, 64, dtype=torch.bfloat16, seed=2)
    memory = torch.full((3 * 64, 64), 7.0, device="cuda", dtype=torch.bfloat16)
    y = memory[64:128]
    launch_grouped("forward", x, w, torch.tensor([-5, 40, 1000], device="cuda"), y)
    assert_near(y, reference("forward", x, w, [0, 40, 24], torch.zeros_like(y)))
    assert (memory[:64] == 7).all()
    assert (memory[128:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operation_and_its_gradients_take_the_kernels_and_do_not_wait(
    dtype: torch.dtype,
) -> None:
    counts, n, k = SPLITS["ragged"], 264, 200
    x, w = factors("forward", counts, n, k, dtype)
    x.requires_grad_()
    w.requires_grad_()
    grad = random_tensor(x.shape[0], n, dtype=dtype, seed=9)
    grad[sum(counts) :] = torch.nan
    splits = torch.tensor(counts, device="cuda")
    main_grad = torch.ones(len(counts), n, k, device="cuda")
    adds = torch.arange(len(counts), device="cuda") % 2 == 0
    grouped_gemm(x, w, splits).backward(grad)  # autograd's own first-time work
    x.grad = w.grad = None
    with synchronising_is_an_error():
        y = grouped_gemm(x, w, splits)
        y.backward(grad)
        late = grouped_gemm(x, w, splits, main_grad=main_grad, accumulate=adds)
        late.backward(grad)
    gradient = reference("weight_grad", grad, x.detach(), counts, torch.zeros_like(main_grad))
    plain = x.detach()
    assert_near(y.detach(), reference("forward", plain, w.detach(), counts, torch.zeros_like(y)))
    assert x.grad is not None
    expected = reference("input_grad", grad, w.detach(), counts, torch.zeros_like(plain))
    assert_near(x.grad, 2 * expected)
    assert w.grad is not None
    assert w.grad.dtype == dtype
    assert_near(w.grad, gradient)
    assert_near(main_grad, gradient + adds[:, None, None].double())


def test_matrices_that_start_anywhere_are_taken() -> None:
    counts = [5, 3]
    splits = torch.tensor(counts, device="cuda")
    x = random_tensor(8 * 64 + 1, dtype=torch.bfloat16, seed=1)[1:].view(8, 64)
    w = random_tensor(2, 64, 48, dtype=torch.bfloat16, seed=2).transpose(1, 2)
    y = grouped_gemm(x, w, splits)
    assert_near(y, reference("forward", x, w, counts, torch.zeros_like(y)))


def test_what_has_no_kernel_takes_the_reference_and_says_so() -> None:
    x = random_tensor(8, 20, dtype=torch.bfloat16, seed=1)
    w = random_tensor(2, 12, 20, dtype=torch.bfloat16, seed=2)
    splits = torch.tensor([5, 3], device="cuda")
    with pytest.warns(UserWarning, match=r"out_features is 12, which is not a multiple of 8"):
        y = grouped_gemm(x, w, splits)
    assert_near(y, reference("forward", x, w, [5, 3], torch.zeros_like(y)))
