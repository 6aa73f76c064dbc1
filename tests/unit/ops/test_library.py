"""Calls that nothing observes skip torch's dispatch, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.ops import (
    grouped_gemm,
    permute,
    routing,  # noqa: F401  registers its operations
    sort_by_expert,
    swiglu,
    unpermute,
)
from megacore.ops.dense import rms_norm


class Operations(TorchDispatchMode):
    """Names of our operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "megacore":
            self.names.append(func.name().removeprefix("megacore::"))
        return func(*args, **(kwargs or {}))


def experts(x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
    row_map, counts = sort_by_expert(torch.tensor([[1, 0], [0, -1], [1, 1]]), 2)
    rows = permute(rms_norm(x, norm, 1e-5), row_map, 6)
    return unpermute(swiglu(grouped_gemm(rows, w, counts)), row_map, torch.full((3, 2), 0.5))


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 8), (2, 16, 8), (8,)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    y = experts(*leaves)
    return [y, *torch.autograd.grad(y.square().sum(), leaves)]


def test_both_ways_have_the_same_bits() -> None:
    with Operations() as seen:
        dispatched = gradients()
    assert {"rms_norm", "grouped_gemm", "grouped_product", "permute"} <= set(seen.names)
    for found, expected in zip(gradients(), dispatched, strict=True):
        assert torch.equal(found, expected)


def test_the_profiler_sees_operations_by_name() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        gradients()
    assert {"megacore::swiglu", "megacore::unpermute"} <= {
        row.key for row in recorded.key_averages()
    }


def test_fake_tensors_have_the_shapes_of_the_results() -> None:
    with FakeTensorMode():
        y = rms_norm(torch.empty(4, 8, requires_grad=True), torch.empty(8), 1e-5)
        assert y.shape == (4, 8)


@pytest.mark.filterwarnings("ignore")
def test_calls_under_other_transforms_go_through_torch() -> None:
    x, tangent = torch.randn(2, 8), torch.randn(2, 8)
    traced = torch.jit.trace(lambda a: swiglu(a), x)  # type: ignore[no-untyped-call]
    assert torch.equal(traced(tangent), swiglu(tangent))
    x.requires_grad_()
    y = rms_norm(x, torch.ones(8), 1e-6)
    grads = torch.randn(3, 2, 8)
    [batched] = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    for grad, found in zip(grads, batched, strict=True):
        torch.testing.assert_close(found, torch.autograd.grad(y, x, grad, retain_graph=True)[0])


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    [grad] = torch.autograd.grad(swiglu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_kernel_of_one_dtype_gets_no_tensors_of_two() -> None:
    # The first argument alone would fit: these went to a kernel that read the others wrongly.
    ops = torch.ops.megacore
    grad, logits, ids = torch.ones(2, 1), torch.zeros(2, 4).bfloat16(), torch.zeros(2, 1).long()
    rule = None, None, None, 1, False, False, True, 1.0, 0.0, 0.0
    assert ops.route_backward(grad, logits, ids, *rule).dtype == torch.bfloat16
    assert ops.row_dots(torch.ones(1, 2), torch.ones(1, 2).double(), ids[:1]).tolist() == [[2.0]]
    grad_x, _ = ops.swiglu_backward(torch.ones(2, 1), torch.ones(2, 2).bfloat16(), None)
    assert grad_x.dtype == torch.bfloat16
