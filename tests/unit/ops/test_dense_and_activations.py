from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu

from megacore.ops.activations import geglu, swiglu
from megacore.ops.dense import rms_norm
from megacore.ops.normed_rotation import norm_and_rotate
from megacore.ops.rotation import split_and_rotate
from megatrain.config import ModelConfig
from megatrain.models.attention.rotary import RotaryTables
from tests.support.models import plain_rotate


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def rotary_tables(sequence: int, head_dim: int, *, base: float) -> tuple[Tensor, Tensor]:
    config = ModelConfig(seq_length=sequence, rope_base=base)
    return RotaryTables(config, head_dim, device=torch.device("cpu"))(sequence)


def test_rms_norm_equals_torch_forward_and_backward() -> None:
    inputs = [draw(3, 2, 8).requires_grad_(), draw(8, seed=1).requires_grad_()]
    ours = rms_norm(*inputs, 1e-3)
    theirs = torch_rms_norm(inputs[0], (8,), inputs[1], 1e-3)
    torch.testing.assert_close(ours, theirs)
    grad = draw(3, 2, 8, seed=2)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad)
    )


def test_rms_norm_of_bfloat16_is_computed_in_float32() -> None:
    x, weight = draw(64, 32, dtype=torch.bfloat16), draw(32, dtype=torch.bfloat16, seed=1)
    exact = rms_norm(x.double(), weight.double(), 1e-5)
    # Equal up to one rounding: half a unit in the last of 8 bits.
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_narrow_inputs_have_the_inputs_dtype(dtype: torch.dtype) -> None:
    x, weight = draw(4, 8, dtype=dtype).requires_grad_(), torch.ones(8, dtype=dtype)
    weight.requires_grad_()
    (rms_norm(x, weight, 1e-5).sum() + swiglu(x).sum()).backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == dtype


def test_swiglu_equals_its_formula_forward_and_backward() -> None:
    x = draw(3, 2, 10).requires_grad_()
    ours, theirs = swiglu(x), silu(x[..., :5]) * x[..., 5:]
    torch.testing.assert_close(ours, theirs)
    grad = draw(3, 2, 5, seed=1)
    torch.testing.assert_close(
        torch.autograd.grad(ours, x, grad), torch.autograd.grad(theirs, x, grad)
    )


def test_swiglu_gradient_is_right_for_a_gradient_with_gaps() -> None:
    x = draw(2, 3, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: swiglu(x)[..., ::2], x)


@pytest.mark.parametrize("q_per_kv", [1, 3])
def test_queries_and_keys_are_rotated_pair_by_pair_and_values_are_not(q_per_kv: int) -> None:
    sequence, batch, groups, head_dim = 5, 2, 2, 6
    qkv = draw(sequence, batch, groups, (q_per_kv + 2) * head_dim)
    cos, sin = rotary_tables(8, head_dim, base=100.0)
    q, k, v = split_and_rotate(qkv, cos, sin, head_dim=head_dim)
    heads = qkv.view(sequence, batch, groups, q_per_kv + 2, head_dim)
    for s in range(sequence):
        for g in range(groups):
            for j in range(q_per_kv):
                expected = plain_rotate(heads[s, 1, g, j], s, base=100.0)
                torch.testing.assert_close(q[s, 1, g * q_per_kv + j], expected, rtol=0, atol=1e-6)
            expected = plain_rotate(heads[s, 1, g, -2], s, base=100.0)
            torch.testing.assert_close(k[s, 1, g], expected, rtol=0, atol=1e-6)
            assert torch.equal(v[s, 1, g], heads[s, 1, g, -1])


@pytest.mark.parametrize("q_per_kv", [1, 2])
def test_the_gradient_of_the_rotation_is_right(q_per_kv: int) -> None:
    cos, sin = rotary_tables(3, 4, base=10.0)
    qkv = draw(3, 2, 2, (q_per_kv + 2) * 4).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: split_and_rotate(x, cos.double(), sin.double(), head_dim=4), qkv
    )


def test_rotated_scores_depend_on_the_distance_only() -> None:
    cos, sin = rotary_tables(10, 8, base=10.0)
    qkv = draw(1, 1, 1, 24).expand(10, 1, 1, 24)
    q, k, _ = split_and_rotate(qkv, cos.double(), sin.double(), head_dim=8)
    scores = q.view(10, 8) @ k.view(10, 8).T
    for distance in range(10):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-6)


def test_rotation_of_bfloat16_is_computed_in_float32() -> None:
    cos, sin = rotary_tables(100, 8, base=10.0)
    qkv = draw(100, 2, 1, 24, dtype=torch.bfloat16)
    q, k, _ = split_and_rotate(qkv, cos, sin, head_dim=8)
    exact_q, exact_k, _ = split_and_rotate(qkv.double(), cos, sin, head_dim=8)
    for ours, exact in ((q, exact_q), (k, exact_k)):
        torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-6)


def test_a_share_of_the_head_is_rotated_and_the_rest_is_unchanged() -> None:
    cos, sin = rotary_tables(5, 4, base=10.0)
    qkv = draw(5, 2, 3, 3 * 10).requires_grad_()
    q, k, v = split_and_rotate(qkv, cos.double(), sin.double(), head_dim=10)
    heads = qkv.view(5, 2, 3, 3, 10)
    torch.testing.assert_close(q[..., 4:], heads[..., 0, 4:])
    for position in range(5):
        turned = plain_rotate(heads[position, 1, 2, 1, :4], position, 10.0)
        torch.testing.assert_close(k[position, 1, 2, :4], turned, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(v, heads[..., 2, :])
    tables = cos.double(), sin.double()
    assert torch.autograd.gradcheck(lambda x: split_and_rotate(x, *tables, head_dim=10), qkv)


def test_geglu_equals_its_formula() -> None:
    x = draw(3, 2, 10)
    gate = torch.nn.functional.gelu(x[..., :5], approximate="tanh")
    torch.testing.assert_close(geglu(x), gate * x[..., 5:])


def test_swiglu_of_no_tokens() -> None:
    assert swiglu(torch.zeros(0, 1, 8)).shape == (0, 1, 4)


@pytest.mark.parametrize("shape", [(3, 0, 1, 12), (0, 2, 1, 12)])
def test_rotations_without_tokens_divide_by_no_zero(shape: tuple[int, ...]) -> None:
    qkv, table, weight = torch.zeros(shape, requires_grad=True), torch.ones(3, 2), torch.ones(4)
    normed = norm_and_rotate(qkv, weight, weight, table, table, head_dim=4, eps=1e-6)
    for heads in (normed, split_and_rotate(qkv, table, table, head_dim=4)):
        assert [x.shape for x in heads] == [(*shape[:3], 4)] * 3
        [grad] = torch.autograd.grad(sum(x.sum() for x in heads), qkv)
        assert grad.shape == shape
