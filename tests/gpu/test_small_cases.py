"""Every kernel on little data, for compute-sanitizer: scripts/gpu_check.sh --sanitize.

It slows kernels down by one or two orders of magnitude, so that the other tests would take too
long. Sizes are odd on purpose: ragged and empty groups, rows that end within a block.
"""

from __future__ import annotations

import pytest
import torch

from megacore.moe import plan_offload, plan_offload_on_device
from megacore.ops import (
    cuda_kernels,
    gelu,
    permute,
    sort_by_expert,
    swiglu,
    top_k,
    unpermute,
)
from megacore.ops.dense import rms_norm
from megacore.ops.fp8 import fp8_grouped_gemm
from megacore.ops.gemm_cuda import Product, launch_grouped
from megacore.ops.optim import AdamWSettings, StepRules, adamw_step_, decide_step_, sum_of_squares
from megacore.ops.quantize import quantize_blocks, quantize_columns, quantize_rows
from megacore.ops.rotation import split_and_rotate
from megacore.ops.routing import RouterLosses, route

pytestmark = pytest.mark.gpu

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = [70, 0, 1, 200, 9]


@pytest.mark.parametrize("copy", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [3, 1030])
def test_small_optimizer_step(numel: int, copy: torch.dtype) -> None:
    param, grad, exp_avg, exp_avg_sq = (torch.rand(numel, device="cuda") for _ in range(4))
    copy_out = torch.empty(numel, dtype=copy, device="cuda")
    state = torch.tensor([0.0, 0.0, 2.0, 0.0], dtype=torch.float64, device="cuda")
    sums = torch.stack([sum_of_squares(grad), *torch.zeros(2, device="cuda").double()])
    control = torch.ones(6, dtype=torch.float64, device="cuda")
    decide_step_(state, sums, control, StepRules(beta1=0.9, beta2=0.99, clip_grad=1.0))
    settings = AdamWSettings(step=1, lr=0.1)
    adamw_step_(param, grad, exp_avg, exp_avg_sq, settings, copy_out=copy_out, control=control)
    assert torch.equal(copy_out, param.to(copy))


@pytest.mark.parametrize("width", [5, 136])
@pytest.mark.parametrize("dtype", FLOATS)
def test_small_tokens_there_and_back(dtype: torch.dtype, width: int) -> None:
    scores = torch.rand(37, 9, device="cuda")
    chosen = top_k(scores, 3)
    chosen[::4, 1] = -1
    row_map, counts = sort_by_expert(chosen, 9)
    tokens = torch.ones(37, width, dtype=dtype, device="cuda", requires_grad=True)
    weights = torch.rand(37, 3, device="cuda", requires_grad=True)
    back = unpermute(permute(tokens, row_map, 120, weights), row_map, weights)
    back.sum().backward()
    assert int(counts.sum()) == int((chosen >= 0).sum())
    assert tokens.grad is not None
    assert bool(tokens.grad.isfinite().all())


@pytest.mark.parametrize("shape", [(5, 7), (3, 1030)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_small_activations(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, width = shape
    probs = torch.rand(rows, device="cuda", requires_grad=True)
    for op, factor in ((swiglu, 2), (gelu, 1)):
        x = torch.randn(rows, factor * width, dtype=dtype, device="cuda", requires_grad=True)
        op(x, probs).sum().backward()
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_small_activations_that_end_early(dtype: torch.dtype) -> None:
    x = torch.randn(9, 2 * 40, dtype=dtype, device="cuda", requires_grad=True)
    probs = torch.rand(9, device="cuda", requires_grad=True)
    y = swiglu(x, probs, num_rows=torch.tensor(4, device="cuda"))
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert bool(x.grad[:4].isfinite().all())


@pytest.mark.parametrize("width", [40, 1032, 2304])
@pytest.mark.parametrize("dtype", FLOATS)
def test_small_norms(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(11, width, dtype=dtype, device="cuda", requires_grad=True)
    weight = torch.ones(width, dtype=dtype, device="cuda", requires_grad=True)
    rms_norm(x, weight, 1e-5).sum().backward()
    for leaf in (x, weight):
        assert leaf.grad is not None
        assert bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize(("head_dim", "rotated"), [(32, 32), (6, 4)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_small_rotations(dtype: torch.dtype, head_dim: int, rotated: int) -> None:
    qkv = torch.randn(5, 2, 2, 4 * head_dim, dtype=dtype, device="cuda", requires_grad=True)
    angles = torch.rand(5, rotated // 2, device="cuda")
    parts = split_and_rotate(qkv, angles.cos(), angles.sin(), head_dim=head_dim)
    sum(part.float().sum() for part in parts).backward()  # type: ignore[union-attr]
    assert qkv.grad is not None
    assert bool(qkv.grad.isfinite().all())


@pytest.mark.parametrize("after", [False, True])
def test_small_routers(after: bool) -> None:
    logits = torch.randn(39, 70, device="cuda", requires_grad=True)
    probs, ids, stats, losses = route(
        logits,
        losses=RouterLosses(aux_scale=1.0, aux_slope=1.0, z_scale=1.0, z_slope=1.0),
        top_k=6,
        num_pools=3,
        is_sigmoid=False,
        softmax_after_top_k=after,
        normalize=True,
        scaling=1.0,
    )
    probs.square().sum().backward()
    assert int(stats[0].sum()) == ids.numel()
    assert bool(losses.isfinite().all())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_small_plan() -> None:
    counts = torch.tensor([[50, 0, 3, 9], [70, 1, 0, 2]])
    found = plan_offload_on_device(counts.cuda(), rank=0, num_spare_slots=1)
    assert int(found.summary[0]) == plan_offload(counts, num_spare_slots=1).max_load


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", ["wide", "middle", "narrow"])
def test_small_grouped_products(plan: str, dtype: torch.dtype) -> None:
    major, minor = torch.cuda.get_device_capability()
    if f"{major}{minor}a" not in cuda_kernels().grouped_gemm_archs():
        pytest.skip(f"this build has no grouped product for sm_{major}{minor}")
    num_experts, n, k, rows = len(COUNTS), 72, 40, sum(COUNTS) + 3
    splits = torch.tensor(COUNTS, device="cuda")
    x, dy = (torch.ones(rows, width, dtype=dtype, device="cuda") for width in (k, n))
    w = torch.ones(num_experts, n, k, dtype=dtype, device="cuda")

    def run(product: Product, a: torch.Tensor, b: torch.Tensor, width: int) -> torch.Tensor:
        out = torch.full((rows, width), torch.nan, dtype=dtype, device="cuda")
        launch_grouped(product, a, b, splits, out, clear_tail=True, plan=plan)
        return out

    y, dx = run("forward", x, w, n), run("input_grad", dy, w, k)
    assert y[:, 0].tolist() == [k] * sum(COUNTS) + [0] * 3
    assert dx[:, 0].tolist() == [n] * sum(COUNTS) + [0] * 3
    adds = torch.tensor([True, False, False, True, False], device="cuda")
    dw = torch.where(adds, 5.0, torch.nan)[:, None, None].repeat(1, n, k)
    launch_grouped("weight_grad", dy, x, splits, dw, accumulate_mask=adds)
    assert dw[:, -1, -1].tolist() == [75, 0, 1, 205, 9]
    narrow = torch.full((num_experts, n, k), torch.nan, dtype=dtype, device="cuda")
    launch_grouped("weight_grad", dy, x, splits, narrow)
    assert narrow[:, -1, -1].tolist() == COUNTS


@pytest.mark.parametrize("width", [40, 131, 1032])
@pytest.mark.parametrize("dtype", FLOATS)
def test_small_rounding(dtype: torch.dtype, width: int) -> None:
    splits = torch.tensor(COUNTS, device="cuda")
    x = torch.ones(sum(COUNTS) + 3, width, dtype=dtype, device="cuda")
    rows = quantize_rows(x, splits.sum())
    assert bool((rows[0][: sum(COUNTS)].float() == 448).all())
    for turned in (False, True):
        blocks = quantize_blocks(x[None], transposed=turned)
        assert bool((blocks[0].float() == 448).all())
        columns = quantize_columns(x, splits, transposed=turned)
        assert bool((columns[0].flatten()[: width * COUNTS[0]].float() == 448).any())


def test_small_grouped_products_of_8_bits() -> None:
    num_experts, n, k = len(COUNTS), 80, 48
    splits = torch.tensor(COUNTS, device="cuda")
    x = torch.ones(sum(COUNTS) + 3, k, device="cuda").bfloat16().requires_grad_()
    w = torch.ones(num_experts, n, k, device="cuda").bfloat16().requires_grad_()
    main_grad = torch.ones(num_experts, n, k, device="cuda")
    y = fp8_grouped_gemm(x, w, splits, main_grad=main_grad)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert y[:, 0].tolist() == [k] * sum(COUNTS) + [0] * 3
    assert x.grad[:, 0].tolist() == [n] * sum(COUNTS) + [0] * 3
    torch.testing.assert_close(main_grad[:, -1, -1], splits + 1.0)
