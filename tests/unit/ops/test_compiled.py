"""Operations that are compiled functions of torch's stable C interface (`megacore._ops`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from megacore.ops.dense import add_rms_norm, rms_norm

OPS = torch.ops.megacore


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def norm_arguments(dtype: torch.dtype = torch.float32) -> dict[str, tuple[Any, ...]]:
    """Arguments of every operation of the norms, by its name."""
    x, weight = draw(3, 2, 8, dtype=dtype), draw(8, dtype=dtype)
    scale = draw(3, 2, 1).abs()
    return {
        "rms_norm": (x, weight, 1e-5),
        "add_rms_norm": (x, x.flip(0), weight, 1e-5),
        "rms_norm_backward": (x, x.flip(0), weight, scale, True, True, x.flip(1)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", norm_arguments())
def test_torch_finds_no_fault_in_a_kernel(name: str, dtype: torch.dtype) -> None:
    arguments = norm_arguments(dtype)[name]
    opcheck(getattr(OPS, f"_{name}").default, arguments)
    opcheck(getattr(OPS, name).default, arguments)


@pytest.mark.parametrize("name", norm_arguments())
def test_a_kernel_takes_any_strides(name: str) -> None:
    arguments = norm_arguments()[name]
    strided = [torch.stack([x, x], -1)[..., 0] if isinstance(x, Tensor) else x for x in arguments]
    kernel = getattr(OPS, f"_{name}")
    for found, expected in zip(kernel(*strided), kernel(*arguments), strict=True):
        assert found.is_contiguous()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", norm_arguments())
def test_calls_of_a_kernel_leave_no_trace_in_autograd(name: str) -> None:
    arguments = [x.requires_grad_() if isinstance(x, Tensor) else x for x in norm_arguments()[name]]
    for operation in (f"_{name}", name) if name.endswith("backward") else (f"_{name}",):
        results = getattr(OPS, operation)(*arguments)
        assert all(y.grad_fn is None and not y.requires_grad for y in results)


def test_gradients_that_are_not_wanted_have_no_elements() -> None:
    *tensors, _, _, _ = norm_arguments()["rms_norm_backward"]
    both = OPS._rms_norm_backward(*tensors, True, True)
    for wanted in ((True, False), (False, True), (False, False)):
        grads = OPS._rms_norm_backward(*tensors, *wanted)
        for grad, expected, is_wanted in zip(grads, both, wanted, strict=True):
            assert torch.equal(grad, expected if is_wanted else grad.new_empty(0))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rms_norm", {0: torch.tensor(1.0)}, r"x must have at least one axis, got \(\)"),
        ("rms_norm", {1: torch.ones(7)}, r"\(8,\), as wide as x \(3, 2, 8\), got \(7,\)"),
        ("rms_norm", {1: torch.ones(1, 8)}, r"weight must be \(8,\), .*, got \(1, 8\)"),
        ("rms_norm", {1: torch.ones(8).double()}, "weight must have the dtype of x"),
        ("rms_norm", {0: torch.ones(3, 8).half(), 1: torch.ones(8).half()}, "float32 or bfloat16"),
        ("add_rms_norm", {1: torch.ones(2, 8)}, r"added must .* x \(3, 2, 8\), got \(2, 8\)"),
        ("rms_norm_backward", {0: torch.ones(6, 8)}, "grad must have the shape of x"),
        ("rms_norm_backward", {0: torch.ones(3, 2, 8).double()}, "grad must have the dtype of x"),
        ("rms_norm_backward", {3: torch.ones(5)}, r"a float32 number per row .*, got \(5,\)"),
        ("rms_norm_backward", {6: torch.ones(8)}, "grad_sum must have the shape of x"),
    ],
)
def test_mistakes_are_explained(name: str, change: dict[int, Tensor], message: str) -> None:
    arguments = list(norm_arguments()[name])
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(ValueError, match=message):
        getattr(OPS, f"_{name}")(*arguments)


def test_fake_tensors_keep_symbolic_sizes_out_of_the_kernel() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 8, requires_grad=True)
        total, y = add_rms_norm(x, x, torch.empty(8), 1e-5)
        assert total.shape == y.shape == (4, 8)
        assert OPS._rms_norm(x, torch.empty(8), 1e-5)[1].shape == (4, 1)


def results(function: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in leaves]
    y = function(*leaves)
    return [y, *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_graph_has_no_break_and_the_same_bits(backend: str) -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        total, y = add_rms_norm(x, rms_norm(x, weight, 1e-5), weight, 1e-5)
        return total + y

    compiled = torch.compile(block, backend=backend, fullgraph=True)
    for rows in (3, 5, 6):  # the second call compiles for any number of rows
        leaves = [draw(rows, 8), draw(8)]
        for found, expected in zip(results(compiled, leaves), results(block, leaves), strict=True):
            assert torch.equal(found, expected)
        with torch.no_grad():
            assert torch.equal(compiled(*leaves), block(*leaves))
