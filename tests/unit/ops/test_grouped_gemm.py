from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.library import opcheck

from megacore.buffers import ParamGradBuffer
from megacore.ops import gemm_cpu, grouped_gemm, main_grad_of
from megacore.ops.split_backward import backward_input
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import Group
from tests.support.grouped_gemm import grouped_gemm_reference

# Relative to the largest value; sums of up to some hundred products.
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = expected.abs().max().clamp(min=1e-30) if expected.numel() else 1.0
    error = (found.double() - expected.double()).abs() / scale
    assert error.numel() == 0 or error.max() <= TOLERANCE[dtype]


def token_loop(x: Tensor, w: Tensor, m_splits: list[int]) -> Tensor:
    """Every row by itself, in float64."""
    y = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    row = 0
    for expert, count in enumerate(m_splits):
        for _ in range(count):
            y[row] = w[expert].double() @ x[row].double()
            row += 1
    return y


def make(m_splits: list[int], spare: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    rows = sum(m_splits) + spare
    x = torch.randn(rows, k, generator=generator).to(dtype)
    w = torch.randn(len(m_splits), n, k, generator=generator).to(dtype)
    grad = torch.randn(rows, n, generator=generator).to(dtype)
    return x, w, grad


def run(
    op: Any, x: Tensor, w: Tensor, grad: Tensor, m_splits: list[int], **options: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = op(x, w, torch.tensor(m_splits), **options)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("m_splits", "n", "k"),
    [
        ([3, 0, 9, 1], 45, 70),  # nothing is a multiple of anything
        ([0, 0, 0], 8, 16),  # no rows at all
        ([0, 1, 0], 5, 3),  # one token
        ([300, 0, 20], 31, 33),  # more rows than one block
        ([16, 17], 64, 600),  # more depth than one block
        ([8, 9], 600, 300),
        ([2], 1, 1),
    ],
)
def test_forward_and_gradients_equal_a_loop_over_tokens(
    m_splits: list[int], n: int, k: int, dtype: torch.dtype
) -> None:
    x, w, grad = make(m_splits, 3, n, k, dtype)
    used = sum(m_splits)
    x[used:], grad[used:] = torch.nan, torch.nan
    for op in (grouped_gemm, grouped_gemm_reference):
        y, grad_x, grad_w = run(op, x, w, grad, m_splits)
        assert y.dtype == grad_x.dtype == dtype
        assert_near(y, token_loop(x, w, m_splits), dtype)
        assert_near(grad_x, token_loop(grad, w.transpose(1, 2), m_splits), dtype)
        assert grad_w is not None
        starts = torch.tensor([0, *m_splits]).cumsum(0).tolist()
        expected = torch.stack(
            [grad[a:b].double().T @ x[a:b].double() for a, b in itertools.pairwise(starts)]
        )
        assert_near(grad_w, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("goes", [True, False])
def test_processors_with_and_without_instructions_for_it_round_16_bits_once(
    monkeypatch: pytest.MonkeyPatch, goes: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(
        gemm_cpu, "goes_to_float32", lambda _, x, __: goes and x.dtype.itemsize == 2
    )
    m_splits = [40, 0, 9]
    x, w, grad = make(m_splits, 2, 24, 33, dtype)
    found = run(grouped_gemm, x, w, grad, m_splits)
    wide = run(grouped_gemm_reference, x.double(), w.double(), grad.double(), m_splits)
    for value, expected in zip(found, wide, strict=True):
        assert value is not None
        assert expected is not None
        assert value.dtype == dtype
        ulp = torch.finfo(dtype).eps
        bound = 0.5 * ulp * expected.abs() + 1e-5 * expected.abs().max()
        assert ((value.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("rows", "width", "goes"), [(8, 32, True), (64, 128, True), (64, 512, False), (4096, 64, False)]
)
def test_only_small_products_of_16_bits_are_computed_in_float32(
    monkeypatch: pytest.MonkeyPatch, rows: int, width: int, goes: bool
) -> None:
    monkeypatch.setattr(gemm_cpu, "has_fast_products", lambda _: True)
    x, w = torch.empty(rows, width).bfloat16(), torch.empty(2, width, width).bfloat16()
    assert gemm_cpu.goes_to_float32("forward", x, w) == goes
    assert not gemm_cpu.goes_to_float32("forward", x.float(), w.float())


@settings(max_examples=60, deadline=None)
@given(
    m_splits=st.lists(st.sampled_from([0, 0, 1, 2, 7, 8, 9, 15, 16, 17, 33, 64]), max_size=6),
    spare=st.integers(0, 3),
    n=st.integers(1, 70),
    k=st.integers(1, 70),
    threads=st.integers(1, 3),
)
def test_any_sizes_equal_the_reference(
    m_splits: list[int], spare: int, n: int, k: int, threads: int
) -> None:
    x, w, grad = make(m_splits or [0], spare, n, k, torch.float32)
    splits = m_splits or [0]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = run(grouped_gemm, x, w, grad, splits)
    finally:
        torch.set_num_threads(before)
    for found, expected in zip(ours, run(grouped_gemm_reference, x, w, grad, splits), strict=True):
        assert found is not None
        assert expected is not None
        assert_near(found, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_and_input_gradients_go_where_the_caller_wants_them(dtype: torch.dtype) -> None:
    m_splits = [3, 0, 5]
    x, w, grad = make(m_splits, 2, 6, 4, dtype)
    expected = run(grouped_gemm, x, w, grad, m_splits)
    given: list[Tensor] = []

    def place(width: int) -> Tensor:
        given.append(torch.full((10, width), torch.nan, dtype=dtype))
        return given[-1]

    places = {"out": lambda: place(6), "grad_out": lambda: place(4)}
    found = run(grouped_gemm, x, w, grad, m_splits, **places)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    # Not where torch multiplies, which takes memory of its own.
    is_ours = dtype != torch.float64
    assert [tensor.shape[1] for tensor in given] == ([6, 4] if is_ours else [])
    if is_ours:
        assert found[0].data_ptr() == given[0].data_ptr()
        assert torch.equal(given[1], expected[1])


def test_memory_for_an_input_gradient_is_asked_for_where_one_is_computed() -> None:
    m_splits = [3, 5]
    x, w, grad = make(m_splits, 0, 6, 4, torch.float32)
    w.requires_grad_()
    asked: list[int] = []

    def place() -> Tensor:
        asked.append(0)
        return torch.empty(8, 4)

    hidden = x.clone().requires_grad_()
    for rows, times in ((x, 0), (hidden, 1)):
        grouped_gemm(rows, w, torch.tensor(m_splits), grad_out=place).backward(grad)
        assert len(asked) == times
    y = grouped_gemm(hidden, w, torch.tensor(m_splits), grad_out=place)
    _, weights = backward_input(get_gradient_edge(y), grad, hidden)
    assert len(asked) == 2
    weights.run()
    assert len(asked) == 2


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    x, w, grad = make([200, 3, 0, 90], 5, 300, 200, torch.float32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(grouped_gemm, x, w, grad, [200, 3, 0, 90]))
    torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_16_bit_products_are_those_of_float32_rounded_once(dtype: torch.dtype) -> None:
    m_splits = [13, 0, 17, 9]  # up to 8 rows, float32 has a kernel that sums in another order
    x, w, grad = make(m_splits, 2, 128, 32, dtype)
    found = run(grouped_gemm, x, w, grad, m_splits)
    wide = run(grouped_gemm, x.float(), w.float(), grad.float(), m_splits)
    for result, expected in zip(found, wide, strict=True):
        assert result is not None
        assert expected is not None
        assert torch.equal(result, expected.to(dtype))


def test_large_16_bit_products_are_those_of_a_loop_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemm_cpu, "goes_to_float32", lambda *_: False)
    m_splits = [300, 0, 0, 120]
    x, w, grad = make(m_splits, 5, 256, 384, torch.bfloat16)
    y, grad_x, grad_w = run(grouped_gemm, x, w, grad, m_splits)
    loop = run(grouped_gemm_reference, x, w, grad, m_splits)
    assert torch.equal(y, loop[0])
    assert torch.equal(grad_x, loop[1])
    assert grad_w is not None
    assert loop[2] is not None
    assert_near(grad_w, loop[2], torch.bfloat16)  # the loop adds in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [grouped_gemm, grouped_gemm_reference])
def test_main_grad_receives_the_weight_gradient_in_float32(op: Any, dtype: torch.dtype) -> None:
    splits = [4, 0, 13]
    x, w, grad = make(splits, 1, 20, 30, dtype)
    exact = torch.stack(
        [grad[a:b].float().T @ x[a:b].float() for a, b in ((0, 4), (4, 4), (4, 17))]
    )
    main_grad = torch.ones(3, 20, 30)
    _, _, grad_w = run(op, x, w, grad, splits, main_grad=main_grad)
    assert grad_w is None
    assert_near(main_grad, exact + 1, torch.float32)
    run(op, x, w, grad, splits, main_grad=main_grad, accumulate=False)
    assert_near(main_grad, exact, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [grouped_gemm, grouped_gemm_reference])
def test_each_expert_adds_to_main_grad_or_overwrites_it(op: Any, dtype: torch.dtype) -> None:
    splits = [4, 0, 13, 0]
    x, w, grad = make(splits, 1, 20, 30, dtype)
    exact = torch.zeros(4, 20, 30)
    exact[0] = grad[:4].float().T @ x[:4].float()
    exact[2] = grad[4:17].float().T @ x[4:17].float()
    adds = torch.tensor([True, True, False, False])
    main_grad = torch.ones(4, 20, 30)
    main_grad[~adds] = torch.nan
    run(op, x, w, grad, splits, main_grad=main_grad, accumulate=adds)
    assert_near(main_grad, exact + adds[:, None, None].float(), torch.float32)


@pytest.mark.parametrize(
    "mask", [torch.ones(3, dtype=torch.bool), torch.ones(2), torch.ones(2, 1, dtype=torch.bool)]
)
@pytest.mark.parametrize("op", [grouped_gemm, grouped_gemm_reference])
def test_a_mask_has_one_bool_per_expert(op: Any, mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"accumulate .* must be a bool, or \(2,\) bool on cpu"):
        op(
            torch.zeros(4, 3), torch.zeros(2, 5, 3), torch.tensor([1, 2]),
            main_grad=torch.zeros(2, 5, 3), accumulate=mask,
        )  # fmt: skip


def test_a_buffer_learns_of_gradients_that_went_straight_to_main_grad() -> None:
    weight = nn.Parameter(torch.randn(2, 3, 4))
    info = ParamInfo(name="w", full_shape=(2, 3, 4), tp_dim=None, expert=True)
    buffer = ParamGradBuffer([(info, weight)], dp_group=Group.solo())
    reported: list[int] = []
    buffer.on_grad(reported.append)
    assert main_grad_of(weight) is not None
    assert buffer.missing_grads() == ["w"]
    x = torch.randn(5, 4)
    splits = torch.tensor([2, 3])
    for _ in range(2):  # two microbatches
        y = grouped_gemm(x, weight, splits, main_grad=main_grad_of(weight))
        y.sum().backward()
    assert reported == [0, 0]
    assert buffer.missing_grads() == []
    assert weight.grad is None
    expected = torch.stack([x[:2].sum(0).expand(3, 4), x[2:].sum(0).expand(3, 4)]) * 2
    assert_near(buffer.main_grad(0), expected, torch.float32)


def test_a_weight_used_twice_is_reported_once_per_backward_pass() -> None:
    weight = nn.Parameter(torch.randn(2, 4, 4))
    info = ParamInfo(name="w", full_shape=(2, 4, 4), tp_dim=None, expert=True)
    buffer = ParamGradBuffer([(info, weight)], dp_group=Group.solo())
    reported: list[int] = []
    buffer.on_grad(reported.append)
    x, splits = torch.randn(5, 4), torch.tensor([2, 3])
    hidden = grouped_gemm(x, weight, splits, main_grad=main_grad_of(weight))
    grouped_gemm(hidden, weight, splits, main_grad=main_grad_of(weight)).sum().backward()
    assert reported == [0]
    twin = weight.detach().clone().requires_grad_()
    grouped_gemm(grouped_gemm(x, twin, splits), twin, splits).sum().backward()
    assert twin.grad is not None
    assert_near(buffer.main_grad(0), twin.grad, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 5)}, "do not fit; expected"),
        ({"x": torch.zeros(4, 3, dtype=torch.float64)}, "x and w a dtype"),
        ({"m_splits": torch.tensor([1])}, r"must be \(2,\) int64"),
        ({"m_splits": torch.tensor([1, 1], dtype=torch.int32)}, r"must be \(2,\) int64"),
        ({"m_splits": torch.tensor([4, 1])}, r"must lie in \[0, 0\]"),
        ({"m_splits": torch.tensor([-1, 1])}, r"must lie in \[0, 4\]"),
        ({"main_grad": torch.zeros(2, 5, 3, dtype=torch.bfloat16)}, "main_grad .* float32"),
        ({"main_grad": torch.zeros(2, 3, 5).transpose(1, 2)}, "contiguous"),
    ],
)
def test_mistakes_are_explained(change: dict[str, Tensor], message: str) -> None:
    arguments = {
        "x": torch.zeros(4, 3),
        "w": torch.zeros(2, 5, 3),
        "m_splits": torch.tensor([1, 2]),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        grouped_gemm(**arguments)


def test_torch_can_trace_and_differentiate_the_operations() -> None:
    x, w, grad = make([2, 0, 3], 2, 5, 4, torch.float32)
    splits = torch.tensor([2, 0, 3])
    x.requires_grad_()
    w.requires_grad_()
    ops = torch.ops.megacore
    opcheck(ops.grouped_gemm.default, (x, w, splits, None, True))
    opcheck(ops.grouped_gemm.default, (x, w, splits, torch.zeros(3, 5, 4), True))
    rows, weights = x.detach(), w.detach()
    for product in (ops.grouped_product.default, ops._grouped_product.default):
        opcheck(product, (rows, weights, splits, 0))
        opcheck(product, (grad, weights, splits, 1, None, None, None, False, True, 3))
        opcheck(product, (grad, weights, splits, 1, torch.zeros(7, 4)))
    target = torch.zeros(3, 5, 4)
    first = torch.tensor(2)
    for product in (ops.grouped_product.default, ops._grouped_product.default):
        opcheck(product, (grad, rows, splits, 2, target, None, None, True))
        opcheck(product, (grad, rows, splits, 2, target, first))
    mask = torch.tensor([True, False, True])
    opcheck(ops.grouped_gemm.default, (x, w, splits, torch.zeros(3, 5, 4), True, mask))
    for product in (ops.grouped_product.default, ops._grouped_product.default):
        opcheck(product, (grad, rows, splits, 2, target, None, mask, True))
    twice = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: grouped_gemm(a, b, splits), twice)


def test_a_split_backward_pass_adds_the_weight_gradient_once_and_late() -> None:
    weight = nn.Parameter(torch.randn(2, 4, 4))
    info = ParamInfo(name="w", full_shape=(2, 4, 4), tp_dim=None, expert=True)
    buffer = ParamGradBuffer([(info, weight)], dp_group=Group.solo())
    reported: list[int] = []
    buffer.on_grad(reported.append)
    x, splits = torch.randn(5, 4, requires_grad=True), torch.tensor([2, 3])
    y = grouped_gemm(x, weight, splits, main_grad=main_grad_of(weight)).square().sum()
    grad_x, weights = backward_input(get_gradient_edge(y), None, x)
    assert reported == []
    assert not buffer.main_grad(0).any()
    weights.run()
    assert reported == [0]
    twin, x_twin = (t.detach().clone().requires_grad_() for t in (weight, x))
    grouped_gemm(x_twin, twin, splits).square().sum().backward()
    assert twin.grad is not None
    assert torch.equal(buffer.main_grad(0), twin.grad)
    assert grad_x is not None
    assert x_twin.grad is not None
    assert torch.equal(grad_x, x_twin.grad)
