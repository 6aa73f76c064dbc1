from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from megacore.ops.dense import add_rms_norm, rms_norm
from megacore.ops.normed_rotation import norm_and_rotate
from megacore.ops.rotation import split_and_rotate

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
WIDTHS = st.sampled_from([1, 2, 15, 16, 17, 96, 257])


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def grads_of(function: Any, inputs: list[Tensor], seed: int) -> list[Tensor]:
    """Results and gradients of the inputs, in float64, for the same gradient of the results."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    found = function(*inputs)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    grads = [draw(*y.shape, seed=seed + i).to(y.dtype) for i, y in enumerate(outputs)]
    return [x.double() for x in (*outputs, *torch.autograd.grad(outputs, inputs, grads))]


def check(function: Any, inputs: list[Tensor], dtype: torch.dtype, seed: int) -> None:
    """Compare the native kernels with the torch operations, which are those of float64."""
    narrow = [x.to(dtype) for x in inputs]
    exact = grads_of(function, [x.double() for x in narrow], seed)
    for found, expected in zip(grads_of(function, narrow, seed), exact, strict=True):
        limit = (1.5e-2 if dtype == torch.bfloat16 else 4e-6) * expected.abs().max().clamp(min=1)
        assert (found - expected).abs().max() <= limit


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 600), width=WIDTHS, dtype=DTYPES, seed=st.integers(0, 99))
def test_rms_norm_equals_float64(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    inputs = [draw(rows, 1, width, seed=seed), draw(width, seed=seed + 1)]
    check(lambda x, weight: rms_norm(x, weight, 1e-2), inputs, dtype, seed + 2)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 600), width=WIDTHS, dtype=DTYPES, seed=st.integers(0, 99))
def test_a_norm_with_the_sum_before_it_has_the_bits_of_both(
    rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    x, added = (draw(rows, 1, width, seed=seed + i).to(dtype) for i in (0, 1))
    weight = draw(width, seed=seed + 2).to(dtype)

    def in_turn(x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + added
        return total, rms_norm(total, weight, 1e-2)

    found = grads_of(lambda *args: add_rms_norm(*args, 1e-2), [x, added, weight], seed)
    for one, other in zip(found, grads_of(in_turn, [x, added, weight], seed), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("used", [0, 1])
def test_a_sum_with_norm_of_which_one_result_is_used_has_its_gradient(used: int) -> None:
    x, added = draw(4, 8, seed=0).float(), draw(4, 8, seed=1).float()
    weight, grad = draw(8, seed=2).float().requires_grad_(), draw(4, 8, seed=3).float()
    x.requires_grad_()
    add_rms_norm(x, added, weight, 1e-5)[used].backward(grad)
    twin, own = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    total = twin + added
    (total, rms_norm(total, own, 1e-5))[used].backward(grad)
    assert torch.equal(x.grad, twin.grad)
    assert weight.grad is own.grad or torch.equal(weight.grad, own.grad)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 3),
    q_per_kv=st.integers(1, 3),
    half=st.integers(1, 9),
    rest=st.integers(0, 3),
    per_sample=st.booleans(),
    dtype=DTYPES,
)
def test_rotation_equals_float64(
    groups: int, q_per_kv: int, half: int, rest: int, per_sample: bool, dtype: torch.dtype
) -> None:
    head_dim = 2 * half + rest
    qkv = draw(5, 2, groups, (q_per_kv + 2) * head_dim, seed=0)
    angles = draw(7, *((2,) if per_sample else ()), half, seed=1).float()
    check(
        lambda x: split_and_rotate(x, angles.cos(), angles.sin(), head_dim=head_dim),
        [qkv],
        dtype,
        3,
    )


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 3),
    q_per_kv=st.integers(1, 3),
    half=st.sampled_from([1, 3, 8, 32]),
    rest=st.integers(0, 3),
    tokens=st.integers(1, 90),
    per_sample=st.booleans(),
    dtype=DTYPES,
    tables_dtype=st.sampled_from([torch.float32, torch.float64]),  # native, and in turn
)
def test_rotation_behind_norms_has_the_bits_of_both(
    groups: int,
    q_per_kv: int,
    half: int,
    rest: int,
    tokens: int,
    per_sample: bool,
    dtype: torch.dtype,
    tables_dtype: torch.dtype,
) -> None:
    head_dim = 2 * half + rest
    inputs = [draw(tokens, 2, groups, (q_per_kv + 2) * head_dim, seed=0).to(dtype)]
    inputs += [draw(head_dim, seed=seed).to(dtype) for seed in (1, 2)]
    angles = draw(tokens, *((2,) if per_sample else ()), half, seed=3).to(tables_dtype)
    tables = angles.cos(), angles.sin()

    def in_turn(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        heads = qkv.view(*qkv.shape[:3], -1, head_dim)
        q = rms_norm(heads[..., :-2, :], q_weight, 1e-2)
        k = rms_norm(heads[..., -2:-1, :], k_weight, 1e-2)
        normed = torch.cat((q, k, heads[..., -1:, :]), dim=-2).flatten(-2)
        return split_and_rotate(normed, *tables, head_dim=head_dim)

    found = grads_of(
        lambda *leaves: norm_and_rotate(*leaves, *tables, head_dim=head_dim, eps=1e-2), inputs, 4
    )
    for one, other in zip(found, grads_of(in_turn, inputs, 4), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_some_gradients_of_a_rotation_behind_norms_are_those_of_all(
    wanted: tuple[bool, bool], dtype: torch.dtype
) -> None:
    inputs = [draw(3, 2, 2, 24, seed=0).to(dtype), draw(6, seed=1).to(dtype)]
    angles = draw(3, 2, seed=2).float()

    def run(qkv: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        tables = angles.cos(), angles.sin()
        return norm_and_rotate(qkv, weight, weight.detach(), *tables, head_dim=6, eps=1e-5)[::2]

    both = grads_of(run, inputs, 3)[2:]
    leaves = [x.requires_grad_(need) for x, need in zip(inputs, wanted, strict=True)]
    results = run(*leaves)
    grads = [draw(*y.shape, seed=3 + i).to(y.dtype) for i, y in enumerate(results)]
    (grad,) = torch.autograd.grad(results, leaves[wanted.index(True)], grads)
    assert torch.equal(grad.double(), both[wanted.index(True)])


def test_gradients_of_a_rotation_behind_norms_do_not_depend_on_strides() -> None:
    whole, weight, angles = (
        draw(3, 6, 2, 24, seed=0).float(),
        draw(6, seed=1).float(),
        draw(6, 3, seed=2),
    )

    def run(qkv: Tensor) -> tuple[Tensor, ...]:
        tables = angles.float().cos(), angles.float().sin()
        return norm_and_rotate(qkv, weight, weight, *tables, head_dim=6, eps=1e-5)

    turned = grads_of(lambda x: run(x.transpose(0, 1)), [whole], 3)
    leaf = whole.transpose(0, 1).requires_grad_()
    found = run(leaf)
    grads = [draw(*y.shape, seed=3 + i).to(y.dtype) for i, y in enumerate(found)]
    (grad,) = torch.autograd.grad(found, leaf, grads)
    expected = grads_of(run, [whole.transpose(0, 1).contiguous()], 3)
    assert torch.equal(grad.double(), expected[-1])
    assert torch.equal(turned[-1], expected[-1].transpose(0, 1))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, weight = draw(3000, 64, seed=0).float(), draw(64, seed=1).float()
    before, found = torch.get_num_threads(), []
    angles = draw(300, 3, seed=2).float()
    heads = [x.view(300, 1, 10, 64), weight[:16], weight[16:32]]

    def rotated(*leaves: Tensor) -> tuple[Tensor, ...]:
        return norm_and_rotate(*leaves, angles.cos(), angles.sin(), head_dim=16, eps=1e-5)

    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        parts = grads_of(lambda x, w: rms_norm(x, w, 1e-5), [x, weight], 2)
        found.append(parts + grads_of(rotated, heads, 3))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_one_of_the_two_gradients_of_a_norm_is_the_same(needed: tuple[bool, bool]) -> None:
    inputs = [draw(4, 8, seed=0).float(), draw(8, seed=1).float()]
    both = grads_of(lambda x, w: rms_norm(x, w, 1e-5), inputs, 2)[1:]
    leaves = [x.requires_grad_(need) for x, need in zip(inputs, needed, strict=True)]
    y = rms_norm(leaves[0], leaves[1], 1e-5)
    (grad,) = torch.autograd.grad(y, leaves[needed.index(True)], draw(4, 8, seed=2).float())
    assert torch.equal(grad.double(), both[needed.index(True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_finds_no_fault_in_the_registration(dtype: torch.dtype) -> None:
    x, weight = draw(3, 2, 8, seed=0).to(dtype), draw(8, seed=1).to(dtype)
    opcheck(
        torch.ops.megacore.rms_norm.default, (x.requires_grad_(), weight.requires_grad_(), 1e-5)
    )
    added = draw(3, 2, 8, seed=4).to(dtype).requires_grad_()
    opcheck(torch.ops.megacore.add_rms_norm.default, (x, added, weight, 1e-5))
    qkv, angles = draw(3, 2, 2, 24, seed=2).to(dtype), draw(3, 3, seed=3).float()
    arguments = (qkv.requires_grad_(), angles.cos(), angles.sin(), 6)
    opcheck(torch.ops.megacore.split_and_rotate.default, arguments)
    weights = [draw(6, seed=seed).to(dtype).requires_grad_() for seed in (5, 6)]
    normed = (qkv, *weights, angles.cos(), angles.sin(), 6, 1e-5)
    opcheck(torch.ops.megacore.norm_and_rotate.default, normed)


def test_operands_of_other_shapes_are_never_read_beyond_their_end() -> None:
    x = torch.randn(4, 2, 64)
    with pytest.raises(RuntimeError, match="size of tensor"):
        rms_norm(x, torch.ones(8), 1e-6)
    whole = rms_norm(x, torch.ones(64), 1e-6)
    torch.testing.assert_close(rms_norm(x, torch.ones(1), 1e-6), whole)
    qkv, angles = torch.randn(4, 2, 1, 24), torch.randn(4, 1, 4)
    of_sample = split_and_rotate(qkv, angles.cos(), angles.sin(), head_dim=8)
    by_position = split_and_rotate(qkv, angles[:, 0].cos(), angles[:, 0].sin(), head_dim=8)
    for found, expected in zip(of_sample, by_position, strict=True):
        torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="size of tensor"):
        split_and_rotate(qkv, angles[:2, 0].cos(), angles[:2, 0].sin(), head_dim=8)
    double = split_and_rotate(qkv, angles[:, 0].cos(), angles[:, 0].sin().double(), head_dim=8)
    torch.testing.assert_close(double[0], by_position[0])
