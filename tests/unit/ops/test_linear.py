"""Products of linear layers: both ways agree, and each is taken where it should be."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.library import opcheck

from megacore.ops import linear as module
from megacore.ops.grouped_product import grouped_product
from megacore.ops.kernel_choice import (
    LINEAR_MACS,
    PRODUCT_NAMES,
    SIZES,
    Product,
    Size,
    leaving,
    linear_name,
)
from megacore.ops.linear import linear, multiply_, multiply_input_grad, multiply_weight_grad_
from megacore.ops.split_backward import backward_input


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


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products that our kernel has computed so far."""
    calls: list[str] = []

    def noted(product: Product, *args: object, **kwargs: object) -> Tensor:
        calls.append(product)
        return grouped_product(product, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "grouped_product", noted)
    return calls


@pytest.mark.parametrize("product", PRODUCT_NAMES)
@pytest.mark.parametrize(
    ("rows", "side", "size"),
    [*zip([8, 9, 256, 640], [400, 400, 256, 640], SIZES, strict=True)],
)
def test_each_size_and_pass_has_its_choice(
    rows: int, side: int, size: Size, product: Product, products: list[str]
) -> None:
    name = linear_name("float32", size, product)
    x, weight = random(rows, side), random(side, side)
    expected = gradients(nn.functional.linear, x, weight, None)
    with leaving({name}, "cpu"):
        found = gradients(linear, x, weight, None)
    assert {*products} == {*PRODUCT_NAMES} - {product}
    assert torch.equal(found[PRODUCT_NAMES.index(product)], expected[PRODUCT_NAMES.index(product)])
    products.clear()
    with leaving({*LINEAR_MACS} - {name}, "cpu"):
        again = gradients(linear, x, weight, None)
    assert products == [product]
    for each, one, other in zip(PRODUCT_NAMES, again, expected, strict=True):
        assert each == product or torch.equal(one, other)


@pytest.mark.parametrize("left", [*PRODUCT_NAMES, None])
def test_passes_by_different_products_split_and_recompute_to_the_bit(left: Product | None) -> None:
    names = [name for name in LINEAR_MACS if name.endswith(f".{left}")]
    x, weight = random(64, 160).requires_grad_(), nn.Parameter(random(256, 160))
    with leaving(names, "cpu"):
        y, grad_x, grad_weight = gradients(linear, x, weight, None)
        halves = linear(x, weight)
        found, later = backward_input(get_gradient_edge(halves), random(64, 256), x)
        later.run()
        with torch.no_grad():
            recomputed = linear(x, weight)
    assert torch.equal(y, recomputed)
    assert found is not None
    assert torch.equal(found, grad_x)
    assert weight.grad is not None
    assert torch.equal(weight.grad, grad_weight)


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


def with_main_grad(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    weight = nn.Parameter(random(*shape).to(dtype))
    weight.main_grad = torch.ones(shape)  # type: ignore[attr-defined]
    return weight


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_of_a_narrow_weight_is_added_in_float32(
    dtype: torch.dtype, bias: bool
) -> None:
    weight, x = with_main_grad(2, 64, 96, dtype=dtype), random(17, 5, 96).to(dtype)
    offset = random(128).to(dtype) if bias else None
    leaves = [t.requires_grad_() for t in (x, offset) if t is not None]
    grad = random(17, 5, 128).to(dtype)
    y = linear(x, weight, offset)
    found = torch.autograd.grad(y, [*leaves, weight], grad, allow_unused=True)
    flat = weight.detach().flatten(0, 1).requires_grad_()
    z = nn.functional.linear(x, flat, offset)
    assert torch.equal(y, z)
    for one, other in zip(found, torch.autograd.grad(z, leaves, grad), strict=False):
        assert torch.equal(one, other)
    assert found[-1] is None
    product = grad.double().view(-1, 128).t() @ x.detach().double().view(-1, 96)
    torch.testing.assert_close(
        weight.main_grad.double(), 1 + product.view(2, 64, 96), rtol=1e-5, atol=1e-4
    )


def test_small_gradients_are_not_lost_beside_large_ones() -> None:
    weight = with_main_grad(1, 1)
    x = torch.tensor([[256.0], [0.5]], dtype=torch.bfloat16)
    linear(x, weight).sum().backward()
    assert weight.main_grad.item() == 257.5  # 258 if the product were rounded


def test_a_visit_without_a_gradient_is_the_signal() -> None:
    weight, visits = with_main_grad(4, 8), []
    weight.register_post_accumulate_grad_hook(lambda each: visits.append(each.grad))
    x = torch.ones(3, 8, dtype=torch.bfloat16)
    (linear(x, weight) + linear(2 * x, weight)).sum().backward()
    assert visits == [None]
    assert weight.main_grad.eq(1 + 9).all()


def test_halves_of_a_backward_pass_add_once() -> None:
    weight, x = with_main_grad(4, 8), torch.ones(3, 8, dtype=torch.bfloat16).requires_grad_()
    y = linear(x.clone(), weight)
    grad, later = backward_input(get_gradient_edge(y.sum()), None, x)
    assert grad is not None
    assert weight.main_grad.eq(1).all()
    later.run()
    assert weight.main_grad.eq(1 + 3).all()


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_weights_keep_no_input(frozen: bool) -> None:
    x = random(512, 64).requires_grad_()
    weight = random(160, 64).requires_grad_(not frozen)
    saved: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = linear(x, weight)
    assert y.grad_fn is not None
    assert "_Linear" in y.grad_fn.name()
    assert ((512, 64) in saved) == (not frozen)
    (grad,) = torch.autograd.grad(y.sum(), [x])
    assert torch.allclose(grad, weight.detach().sum(0).expand(512, 64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reason", ["left to torch", "float32", "no gradient buffer", "frozen"])
def test_other_gradients_go_to_autograd(reason: str) -> None:
    dtype = torch.float32 if reason == "float32" else torch.bfloat16
    weight, x = with_main_grad(4, 8, dtype=dtype), torch.ones(3, 8, dtype=dtype).requires_grad_()
    if reason == "no gradient buffer":
        del weight.main_grad
    weight.requires_grad_(reason != "frozen")
    with leaving(["add_weight_grad_"] if reason == "left to torch" else [], "cpu"):
        linear(x, weight).sum().backward()
    if reason == "frozen":
        assert weight.grad is None
    else:
        assert weight.grad is not None
        assert weight.grad.eq(3).all()
    if reason != "no gradient buffer":
        assert weight.main_grad.eq(1).all()


def test_transformed_and_compiled_calls_return_the_gradient() -> None:
    weight, x = with_main_grad(4, 8), torch.ones(3, 8, dtype=torch.bfloat16)
    found = torch.func.grad(lambda w: linear(x, w).sum())(weight)
    assert found.eq(3).all()
    assert weight.main_grad.eq(1).all()


def test_torch_finds_no_fault_in_the_operation() -> None:
    arguments = torch.ones(4, 8), torch.ones(3, 4).bfloat16(), torch.ones(3, 8).bfloat16()
    opcheck(torch.ops.megacore.add_weight_grad_.default, arguments)
