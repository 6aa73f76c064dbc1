"""Grouped products in Triton, as a peer: tiles found from running sums of the counts, plain loads.

One program per tile. A program of the forward product or the input gradient finds its expert from
the sums; there are as many programs as the worst counts need, and those left over return at once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_CONFIGS = [
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64}, num_warps=4, num_stages=4),
]


@triton.autotune(configs=_CONFIGS, key=["rows", "columns", "depth", "num_experts"])
@triton.jit(do_not_specialize=["num_experts"])
def _rows_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    offsets,
    out,
    rows,  # noqa: ARG001 - one of the keys
    columns,
    depth,
    num_experts,
    b_expert,
    b_depth,
    b_column,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile, column_tile = tl.program_id(1), tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    real = experts < num_experts
    ends = tl.load(offsets + experts, mask=real, other=0)
    starts = tl.load(offsets + experts - 1, mask=real & (experts > 0), other=0)
    tiles = tl.where(real, tl.cdiv(ends - starts, BLOCK_M), 0)
    sums = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where(real & (sums <= tile), 1, 0), 0)
    if expert < num_experts:
        mine = experts == expert
        first = tl.sum(tl.where(mine, starts + (tile - sums + tiles) * BLOCK_M, 0), 0)
        end = tl.sum(tl.where(mine, ends, 0), 0)
        m = first + tl.arange(0, BLOCK_M)
        n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        a_at = a + m[:, None].to(tl.int64) * depth + k[None, :]
        b_at = b + expert.to(tl.int64) * b_expert + k[:, None] * b_depth + n[None, :] * b_column
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(0, tl.cdiv(depth, BLOCK_K)):
            inside = k < depth - step * BLOCK_K
            left = tl.load(a_at, mask=(m[:, None] < end) & inside[None, :], other=0.0)
            right = tl.load(b_at, mask=inside[:, None] & (n[None, :] < columns), other=0.0)
            total = tl.dot(left, right, total)
            a_at += BLOCK_K
            b_at += BLOCK_K * b_depth
        to = out + m[:, None].to(tl.int64) * columns + n[None, :]
        fits = (m[:, None] < end) & (n[None, :] < columns)
        tl.store(to, total.to(out.dtype.element_ty), mask=fits)


@triton.autotune(
    configs=_CONFIGS, key=["out_features", "in_features", "rows"], restore_value=["out"]
)
@triton.jit
def _weights_kernel(  # type: ignore[no-untyped-def]
    dy,
    x,
    offsets,
    out,
    rows,  # noqa: ARG001 - one of the keys
    out_features,
    in_features,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.program_id(2)
    end = tl.load(offsets + expert)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    if end > start:
        m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = start + tl.arange(0, BLOCK_K)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(0, tl.cdiv(end - start, BLOCK_K)):
            row = (k + step * BLOCK_K).to(tl.int64)
            left_mask = (row[None, :] < end) & (m[:, None] < out_features)
            left = tl.load(dy + row[None, :] * out_features + m[:, None], left_mask, other=0.0)
            right_mask = (row[:, None] < end) & (n[None, :] < in_features)
            right = tl.load(x + row[:, None] * in_features + n[None, :], right_mask, other=0.0)
            total = tl.dot(left, right, total)
        at = out + expert.to(tl.int64) * out_features * in_features
        at += m[:, None].to(tl.int64) * in_features + n[None, :]
        fits = (m[:, None] < out_features) & (n[None, :] < in_features)
        tl.store(at, tl.load(at, mask=fits, other=0.0) + total, mask=fits)


def grouped(product: str, a: Tensor, b: Tensor, offsets: Tensor, out: Tensor) -> None:
    """What ``launch_grouped`` does; the weight gradient is added to ``out``."""
    if product == "weight_grad":
        num_experts, out_features, in_features = out.shape

        def weight_grid(config: dict[str, Any]) -> tuple[int, int, int]:
            return (
                triton.cdiv(in_features, config["BLOCK_N"]),
                triton.cdiv(out_features, config["BLOCK_M"]),
                num_experts,
            )

        _weights_kernel[weight_grid](a, b, offsets, out, a.shape[0], out_features, in_features)
        return
    b = b.transpose(1, 2) if product == "forward" else b
    rows, columns = out.shape
    num_experts = b.shape[0]

    def grid(config: dict[str, Any]) -> tuple[int, int]:
        tiles = triton.cdiv(rows, config["BLOCK_M"]) + num_experts
        return triton.cdiv(columns, config["BLOCK_N"]), tiles

    _rows_kernel[grid](
        a,
        b,
        offsets,
        out,
        rows,
        columns,
        a.shape[1],
        num_experts,
        *b.stride(),
        EXPERTS=max(256, triton.next_power_of_2(num_experts)),  # one compilation for all
    )
