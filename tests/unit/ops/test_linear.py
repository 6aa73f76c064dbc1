"""Products of linear layers: both ways agree, and each is taken where it should be."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from megacore.ops import linear as module
from megacore.ops.kernel_choice import LINEAR_MACS, leaving, linear_names
from megacore.ops.linear import linear, multiply_, multiply_input_grad, multiply_weight_grad_


@pytest.fixture(params=[(), tuple(LINEAR_MACS)], ids=["ours", "torch"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    with leaving(request.param, "cpu"):
        yield


@pytest.fixture
def ours() -> Iterator[None]:
    with leaving((), "cpu"):
        yield


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def gradients(function: object, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = function(*leaves)  # type: ignore[operator]
    return [y, *torch.autograd.grad(y, leaves, random(*y.shape).to(y.dtype))]


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(17, 5, 96, 200), (3, 100, 160, 80)])
def test_linear_and_its_gradients_are_those_of_torch(
    shape: tuple[int, int, int, int], bias: bool
) -> None:
    seq, batch, num_inputs, num_outputs = shape
    x, weight = random(seq, batch, num_inputs), random(num_outputs, num_inputs)
    offset = random(num_outputs) if bias else None
    found = gradients(linear, x, weight, offset)
    wide = [None if t is None else t.double() for t in (x, weight, offset)]
    expected = gradients(nn.functional.linear, *wide)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-3)
        assert one.dtype == torch.float32


@pytest.mark.usefixtures("both_ways")
def test_products_into_given_memory_are_those_of_torch() -> None:
    x, weight, grad = random(128, 96), random(120, 96), random(128, 120)
    y, grad_weight = torch.full((128, 120), torch.nan), torch.full((120, 96), torch.nan)
    multiply_(y, x, weight)
    multiply_weight_grad_(grad_weight, grad, x)
    torch.testing.assert_close(y, x @ weight.t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad_weight, grad.t() @ x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        multiply_input_grad(grad, weight), grad @ weight, rtol=1e-4, atol=1e-4
    )


@pytest.mark.usefixtures("both_ways")
def test_rows_of_a_larger_tensor_are_products_of_their_own() -> None:
    x, weight = random(4, 64, 256), random(128, 128)
    part = x[..., 64:192]  # neither starts nor rows are contiguous
    torch.testing.assert_close(
        linear(part, weight), nn.functional.linear(part, weight), rtol=1e-4, atol=1e-4
    )


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.bfloat16, 2), (torch.float64, 512), (torch.float32, 2)]
)
def test_other_dtypes_and_small_products_are_those_of_torch_to_the_bit(
    dtype: torch.dtype, rows: int
) -> None:
    x, weight = random(rows, 128).to(dtype), random(64, 128).to(dtype)
    assert torch.equal(linear(x, weight), nn.functional.linear(x, weight))


def errors(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [
        float((one - other).detach().norm() / other.detach().norm())
        for one, other in zip(results, exact, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(60, 100, 700), (300, 200, 130), (16, 512, 1100)])
def test_errors_of_16_bit_products_are_at_most_those_of_torch(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows, num_outputs, num_inputs = shape
    x, weight = random(rows, num_inputs).to(dtype), random(num_outputs, num_inputs).to(dtype)
    exact = gradients(nn.functional.linear, x.double(), weight.double(), None)
    found = {}
    for way, left in {"ours": (), "torch": tuple(LINEAR_MACS)}.items():
        with leaving(left, "cpu"):
            results = gradients(linear, x, weight, None)
        assert all(one.dtype == dtype for one in results)
        found[way] = errors(results, exact)
    for ours, other in zip(found["ours"], found["torch"], strict=True):
        assert ours <= 1.001 * other
        assert ours < torch.finfo(dtype).eps


@pytest.mark.usefixtures("ours")
def test_rows_do_not_depend_on_the_other_rows_of_our_product() -> None:
    x, weight = random(300, 256), random(192, 256)
    assert torch.equal(linear(x, weight)[:100], linear(x[:100], weight))


@pytest.mark.parametrize("size", [128, 256, 640])
def test_each_size_of_products_has_its_choice(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(module, "grouped_product", lambda *_, **__: calls.append(size))
    (name,) = (n for n in linear_names("float32") if 1 <= size**3 / LINEAR_MACS[n] < 16)
    out, x, weight = torch.empty(size, size), random(size, size), random(size, size)
    with leaving({name}, "cpu"):
        multiply_(out, x, weight)
    assert torch.equal(out, x @ weight.t())
    assert not calls
    with leaving({*LINEAR_MACS} - {name}, "cpu"):
        multiply_(out, x, weight)
    assert calls


@pytest.mark.usefixtures("ours")
def test_compiled_transformed_and_cast_products_are_torchs() -> None:
    x, weight = random(256, 128), random(64, 128)
    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, weight), nn.functional.linear(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    expected = nn.functional.linear(x, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.func imports torch.jit's
        _, tangent = torch.func.jvp(lambda rows: linear(rows, weight), (x,), (x,))
    assert torch.equal(tangent, expected)
    with forward_ad.dual_level():
        y = linear(forward_ad.make_dual(x, x), weight)
        assert torch.equal(forward_ad.unpack_dual(y).tangent, expected)


def test_empty_inputs_have_empty_or_zero_results() -> None:
    assert linear(torch.ones(0, 3, 5), torch.ones(4, 5)).shape == (0, 3, 4)
    assert torch.equal(linear(torch.ones(2, 0), torch.ones(4, 0)), torch.zeros(2, 4))
