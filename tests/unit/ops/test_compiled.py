"""Operations that are compiled functions of torch's stable C interface (`megacore._ops`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.moe.echo import device_plan, reroute  # noqa: F401  registers
from megacore.ops import (  # noqa: F401  registers
    dropout,
    echo_counts,
    normed_rotation,
    optim,
    quantize,
    rotation,
    routing,
    topk,
)
from megacore.ops.dense import add_rms_norm, rms_norm
from megacore.ops.gemm import grouped_gemm
from megacore.ops.grouped_product import grouped_product

OPS = torch.ops.megacore
DIFFERENTIABLE = (
    *("rms_norm", "add_rms_norm", "swiglu", "gelu"),
    *("permute", "unpermute", "permute_both", "unpermute_both"),
    *("split_and_rotate", "norm_and_rotate", "counter_dropout"),
)
# Operations that take no strides in any argument.
CONTIGUOUS = ("adamw_step_", "decide_step_", "sum_of_squares")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def arguments_of(dtype: torch.dtype = torch.float32) -> dict[str, list[Any]]:
    """Arguments of every operation with a kernel, by its name."""
    x, weight = draw(3, 2, 8, dtype=dtype), draw(8, dtype=dtype)
    scale = draw(3, 2, 1).abs()
    rows, w, m_splits = draw(7, 8, dtype=dtype), draw(3, 4, 8, dtype=dtype), torch.tensor([2, 0, 3])
    row_map, tokens = torch.tensor([[3, 0], [-1, 6], [2, 1]]), draw(3, 8, dtype=dtype)
    qkv, cos, weights = draw(3, 2, 2, 24, dtype=dtype), draw(4, 2), draw(2, 6, dtype=dtype)
    heads = draw(3, 2, 4, 6, dtype=dtype), *draw(2, 3, 2, 2, 6, dtype=dtype)
    first, slots = torch.zeros(8).long(), torch.tensor([[[-1, 3], [0, 1]], [[0, 1], [1, 2]]])
    plan = slots[0], torch.tensor([6, 2]), torch.arange(6), torch.tensor([3000])
    sums = torch.full((8,), 0.25, dtype=torch.float64)
    control = torch.tensor([0.5, 0.1, 0.2, 1.0, 3.0, 2.0], dtype=torch.float64)
    settings, rules = (0.1, 0.9, 0.99, 1e-8, 0.1, 1.0, 1.0, 1.0), (0.9, 0.99, 1.0, 2.0, 3.0)
    state = torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    routed = 2, 1, False, False, True, 1.5, True, 0.1, 0.1
    return {
        "rms_norm": [x, weight, 1e-5],
        "add_rms_norm": [x, x.flip(0), weight, 1e-5],
        "rms_norm_backward": [x, x.flip(0), weight, scale, True, True, x.flip(1)],
        "grouped_product": [rows, w, m_splits, 0, None, None],
        "sort_by_expert": [torch.tensor([[1, 0], [-1, 2], [2, 1]]), 3],
        "permute": [tokens, row_map, 7, draw(3, 2)],
        "unpermute": [rows, row_map, draw(3, 2, dtype=dtype)],
        "permute_both": [tokens, draw(3, 2), row_map, 7],
        "unpermute_both": [rows, draw(7), row_map],
        "row_dots": [tokens, rows, row_map],
        "top_k": [rows, 3],
        "adamw_step_": [*draw(3, 9), draw(9).abs(), draw(9).bfloat16(), control, *settings],
        "decide_step_": [state, torch.tensor([4.0, 0.0, 7.0]).double(), control, *rules],
        "sum_of_squares": [rows],
        "plan_offload": [torch.tensor([[30, 10, 0, 7], [50, 10, 3, 0]]), 1, 2, True, 0, 10**6, 0],
        "reroute": [row_map, torch.tensor([2, 2, 1, 1, 0, 0, 1, 0]), first, *slots],
        "count_plan_": [sums, *plan, torch.arange(12), 8],
        "count_held_": [sums, slots[0], 2, 5, 100],
        "quantize_rows": [rows, None],
        "quantize_columns": [rows, torch.tensor([7]), True],
        "quantize_blocks_": [w, True, torch.zeros(3, 8, 4).byte(), torch.zeros(3, 1, 1)],
        "route": [draw(7, 4), draw(4), None, torch.zeros(4).long(), *routed],
        "route_backward": [
            *(draw(7, 2), draw(7, 4), torch.tensor([[0, 1]] * 7), draw(1, 4)),
            *(torch.tensor(0.5), draw(7), *routed[1:6], 0.1, 0.1),
        ],
        "counter_dropout": [tokens[:, None], torch.tensor([4]), torch.arange(3), None, 7, 0.5],
        "split_and_rotate": [qkv, cos, cos.flip(0), 6],
        "split_and_rotate_backward": [*heads, cos, cos.flip(0)],
        "norm_and_rotate": [qkv, *weights, cos, cos.flip(0), 6, 1e-5],
        "norm_and_rotate_backward": [
            *(*heads, qkv, *weights, draw(3, 2, 2, 3), cos, cos.flip(0)),
            *(True, True),
        ],
        "swiglu": [rows, draw(7), None],
        "swiglu_backward": [rows[:, :4], rows, draw(7, dtype=dtype), torch.tensor(7)],
        "gelu": [rows, None, torch.tensor(7)],
        "gelu_backward": [rows, rows.flip(0), draw(7), None],
    }


def strided_arguments(name: str, arguments: list[Any]) -> list[Any]:
    """Copies with other strides, but for what has to be contiguous: what is written, above all."""
    declared = getattr(OPS, name).default._schema.arguments
    copies = []
    for x, each in zip(arguments, declared, strict=False):  # some have defaults
        if isinstance(x, Tensor):
            is_contiguous = each.alias_info is not None or name in CONTIGUOUS
            x = x.clone() if is_contiguous else torch.stack([x, x], -1)[..., 0]
        copies.append(x)
    return copies


def run(name: str, arguments: list[Any]) -> list[Tensor]:
    found = getattr(OPS, name)(*arguments)
    return [found] if isinstance(found, Tensor) else without_times(name, list(found or ()))


def without_times(name: str, results: list[Tensor]) -> list[Tensor]:
    """The results that are the same in each call."""
    return results[:-1] if name.strip("_") == "plan_offload" else results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", arguments_of())
def test_torch_finds_no_fault_in_a_kernel(name: str, dtype: torch.dtype) -> None:
    arguments = tuple(arguments_of(dtype)[name])
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if name != "plan_offload":  # has the time among its results, which that test compares
        tests.append("test_aot_dispatch_dynamic")
    opcheck(getattr(OPS, f"_{name}").default, arguments, test_utils=tests)
    opcheck(getattr(OPS, name).default, arguments, test_utils=tests)


@pytest.mark.parametrize("name", arguments_of())
def test_a_kernel_takes_any_strides(name: str) -> None:
    arguments = arguments_of()[name]
    found = run(f"_{name}", strided_arguments(name, arguments))
    for one, expected in zip(found, run(f"_{name}", arguments), strict=True):
        assert one.is_contiguous()
        assert torch.equal(one, expected)


@pytest.mark.parametrize("name", arguments_of())
def test_calls_of_a_kernel_leave_no_trace_in_autograd(name: str) -> None:
    arguments = arguments_of()[name]
    for x in arguments:
        if isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_()
    for operation in (f"_{name}",) if name in DIFFERENTIABLE else (f"_{name}", name):
        found = run(operation, arguments)
        assert all(y.grad_fn is None and not y.requires_grad for y in found)


def test_gradients_that_are_not_wanted_have_no_elements() -> None:
    *tensors, _, _, _ = arguments_of()["rms_norm_backward"]
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
        ("swiglu", {0: torch.ones(7, 5)}, r"x must be \(M, 2 F\), got \(7, 5\)"),
        ("gelu", {1: torch.ones(6)}, r"probs must be \(7,\), got \(6,\)"),
        ("gelu", {2: torch.tensor(7.0)}, "num_rows must be an int64 scalar"),
        ("swiglu_backward", {0: torch.ones(7, 8)}, r"grad must be \(7, 4\) with the dtype of x"),
        ("sort_by_expert", {0: torch.ones(3)}, "expert_of must be int64"),
        ("sort_by_expert", {1: -1}, "num_experts must be at least 0, got -1"),
        ("permute", {0: torch.ones(4, 8)}, r"tokens must be \(3, H\), .*, got \(4, 8\)"),
        ("permute", {1: torch.ones(3, 2)}, r"row_map must be \(T, k\) int64, got \(3, 2\)"),
        ("permute", {2: -1}, "num_rows must be at least 0, got -1"),
        ("unpermute", {2: torch.ones(2, 3)}, r"weights must .* row_map \(3, 2\), got \(2, 3\)"),
        ("permute_both", {1: torch.ones(3, 2).double()}, "probs must be float32 with the shape"),
        ("unpermute_both", {1: torch.ones(6)}, r"row_probs \(M,\) float32, got .* and \(6,\)"),
        ("row_dots", {1: torch.ones(7, 9)}, r"rows must be \(M, 8\) .*, got \(7, 9\)"),
        ("top_k", {1: 9}, r"k must be in \[1, E\] for scores \(T, E\), got 9 for \(7, 8\)"),
        ("split_and_rotate", {3: 7}, r"qkv must be \(S, B, G, \(Q \+ 2\) 7\), got \(3, 2, 2, 24\)"),
        ("split_and_rotate", {1: torch.ones(2, 2)}, r"cos and sin must be float32, \(3, R\) or"),
        ("split_and_rotate", {3: 2}, "cos must have at most 1 columns, got 2"),
        ("split_and_rotate_backward", {2: torch.ones(3, 2, 1, 6)}, "q, k and v do not fit"),
        ("split_and_rotate_backward", {2: torch.ones(3, 2, 2, 6).half()}, "must have one dtype"),
        ("norm_and_rotate", {1: torch.ones(5)}, r"weights of norms must be \(D,\), got \(5,\)"),
        ("norm_and_rotate", {2: torch.ones(6).half()}, "weights of norms must have the dtype"),
        ("norm_and_rotate_backward", {6: torch.ones(7)}, "a float32 number per normalized head"),
        ("adamw_step_", {0: torch.ones(3, 3)}, r"param \(3, 3\) must be flat"),
        (
            "adamw_step_",
            {1: torch.ones(8)},
            r"grad \(8,\) must be flat and of the size of .* \(9,\)",
        ),
        ("adamw_step_", {2: torch.ones(9).double()}, r"exp_avg \(9,\) must be float32"),
        ("adamw_step_", {3: torch.ones(18)[::2]}, r"exp_avg_sq \(9,\) must be contiguous"),
        ("adamw_step_", {4: torch.ones(9)}, r"copy_out \(9,\) must be bfloat16 or float16"),
        ("adamw_step_", {5: torch.ones(5).double()}, r"control \(5,\) must .* of 6 numbers"),
        ("decide_step_", {0: torch.ones(4)}, r"state \(4,\) must be a flat float64 tensor of 4"),
        ("decide_step_", {1: torch.ones(2).double()}, r"sums \(2,\) must .* of 3 numbers"),
        ("sum_of_squares", {0: torch.ones(8)[::2]}, r"values \(4,\) must be contiguous"),
        ("plan_offload", {0: torch.ones(2, 4)}, r"counts must be \(R, E\) int64, got \(2, 4\)"),
        ("plan_offload", {0: torch.ones(2, 3).long()}, "3 experts do not divide over 2 ranks"),
        ("plan_offload", {0: torch.tensor([[1, 2], [-1, 3]])}, "-1"),
        ("plan_offload", {1: 2}, r"rank must be in \[0, 2\), got 2"),
        ("plan_offload", {2: -1}, "-1"),
        ("reroute", {0: torch.ones(3, 2)}, "expert_ids must be int64"),
        ("reroute", {1: torch.ones(8)}, r"total must be \(E,\) int64, got \(8,\)"),
        ("reroute", {1: torch.ones(7).long()}, "7 experts do not divide over 2 ranks"),
        ("reroute", {2: torch.ones(7).long()}, r"first must be \(8,\) int64, got \(7,\)"),
        ("reroute", {3: torch.ones(4).long()}, r"slot_expert must be \(R, S\) int64, got \(4,\)"),
        ("reroute", {4: torch.ones(2, 2)}, r"tokens must be \(2, 2\) int64, got \(2, 2\)"),
        ("reroute", {0: torch.tensor([[8]])}, "copy 0 is for expert 8; there are 8"),
        ("count_plan_", {0: torch.ones(8)}, r"sums must be \(8,\) float64, contiguous, got \(8,\)"),
        ("count_plan_", {2: torch.ones(3).long()}, r"load_before must be \(2,\) int64, got"),
        ("count_plan_", {3: torch.ones(2).long()}, r"summary must be \(6,\) int64, got \(2,\)"),
        ("count_plan_", {6: 10}, r"copies_of_place must be \(14,\) int64, got \(12,\)"),
        ("count_held_", {1: torch.ones(4)}, "slot_expert must be int64"),
        ("quantize_rows", {0: torch.ones(7)}, r"x must be \(M, K\), got \(7,\)"),
        ("quantize_rows", {1: torch.tensor(7.0)}, "num_rows must be an int64 scalar"),
        ("quantize_columns", {1: torch.tensor([7.0])}, r"m_splits must be \(E,\) int64, got \(1,"),
        ("quantize_blocks_", {0: torch.ones(7, 8)}, r"w must be \(E, N, K\), got \(7, 8\)"),
        ("quantize_blocks_", {2: torch.ones(3)}, r"values must be \(3, 8, 4\) uint8, .*got \(3,\)"),
        (
            "quantize_blocks_",
            {3: torch.ones(3)},
            r"scales must be \(3, 1, 1\) float32, .*got",
        ),
        ("route", {0: torch.ones(7, 4).double()}, r"logits must be \(T, E\) float32"),
        ("route", {1: torch.ones(5)}, r"bias must be \(4,\), got \(5,\)"),
        ("route", {2: torch.ones(7, 3).long()}, r"chosen must be \(7, 2\), got \(7, 3\)"),
        ("route", {3: torch.ones(4)}, "seen must be int64 and contiguous"),
        ("route", {4: 5}, "k must be 1 to 4, the number of experts, got 5"),
        ("route", {5: 2}, "num_pools must be at least 1 and divide 7 tokens, got 2"),
        ("route_backward", {0: torch.ones(7, 1)}, r"grad_probs must be \(7, 2\), got \(7, 1\)"),
        ("route_backward", {3: torch.ones(2, 4)}, r"counts must be \(1, 4\) float32, got \(2, 4\)"),
        ("route_backward", {5: torch.ones(0)}, r"z_factor must have at least one .*, got \(0,\)"),
        ("counter_dropout", {1: torch.ones(2).long()}, r"sample_ids must be \(1,\) .* got \(2,\)"),
        ("counter_dropout", {3: torch.ones(2).long()}, "key must be an int64 scalar"),
        ("counter_dropout", {5: 1.0}, r"p must be in \[0, 1\), got 1"),
        ("grouped_product", {3: 3}, "product must be 0, 1 or 2, got 3"),
        ("grouped_product", {3: 2}, "a weight gradient must have an out"),
        ("grouped_product", {0: torch.ones(8)}, r"must have 2 axes and weights 3, got a \(8,\)"),
        ("grouped_product", {0: torch.ones(7, 9)}, r"a \(7, 9\) and b .* do not fit weights"),
        ("grouped_product", {2: torch.ones(3)}, r"m_splits must be \(3,\) int64, got \(3,\)"),
        ("grouped_product", {2: torch.tensor([9, 0, 0])}, r"must lie in \[0, 7\]"),
        ("grouped_product", {4: torch.ones(7, 5)}, r"out must be \(7, 4\), got \(7, 5\)"),
        (
            "grouped_product",
            {4: torch.ones(7, 4).half()},
            r"out must be float32 or, unless it is added to, of the dtype of a, and contiguous; "
            r"got \(7, 4\)",
        ),
        ("grouped_product", {5: torch.tensor(8)}, r"first_row must be in \[0, 7\], got 8"),
        ("grouped_product", {5: torch.tensor([1, 2])}, r"must be an int64 scalar, got \(2,\)"),
    ],
)
def test_mistakes_are_explained(name: str, change: dict[int, Any], message: str) -> None:
    arguments = arguments_of()[name]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(ValueError, match=message):
        run(f"_{name}", arguments)


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


def test_a_mask_of_a_product_is_checked() -> None:
    grad, rows, w, m_splits = draw(7, 4), draw(7, 8), draw(3, 4, 8), torch.tensor([2, 0, 3])
    for mask in (torch.ones(2).bool(), torch.ones(3), torch.ones(3, 2).bool()[:, 0]):
        with pytest.raises(ValueError, match=r"mask must be \(3,\) bool, contiguous, got"):
            OPS._grouped_product(grad, rows, m_splits, 2, w, None, mask, True)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # a kernel; torch's products
def test_written_arguments_have_another_version(dtype: torch.dtype, observed: bool) -> None:
    rows, w, m_splits = draw(7, 8, dtype=dtype), draw(3, 4, 8, dtype=dtype), torch.tensor([2, 0, 3])
    y, grad_w = torch.zeros(7, 4, dtype=dtype), torch.zeros_like(w)
    saved = torch.ones_like(y).requires_grad_() * y
    before = rows._version, w._version
    with Mode() if observed else nullcontext():
        assert grouped_product("forward", rows, w, m_splits, out=y) is y
        grouped_product("weight_grad", y, rows, m_splits, out=grad_w)
    assert y._version > 0
    assert grad_w._version > 0
    assert before == (rows._version, w._version)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_products_compile_without_a_break(backend: str) -> None:
    m_splits = torch.tensor([2, 0, 1])

    def block(x: Tensor, w: Tensor) -> Tensor:
        return grouped_gemm(x, w, m_splits, expected_rows=x.shape[0])  # a symbolic size

    def writes(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        grouped_product("forward", x, w, m_splits, out=out, first_row=m_splits[2])
        return out + 1

    compiled, compiled_writes = (
        torch.compile(function, backend=backend, fullgraph=True) for function in (block, writes)
    )
    for num_rows in (4, 5, 6):
        leaves = [draw(num_rows, 8), draw(3, 4, 8)]
        for found, expected in zip(results(compiled, leaves), results(block, leaves), strict=True):
            assert torch.equal(found, expected)
        outs = torch.zeros(2, num_rows, 4)
        assert torch.equal(compiled_writes(*leaves, outs[0]), writes(*leaves, outs[1]))
        assert torch.equal(*outs)
        assert outs[0].any()
