"""The arguments of a grouped product, read from memory, and worked out the slow way."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torch import Tensor

FORWARD, INPUT_GRAD, WEIGHT_GRAD = range(3)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call; addresses are numbers."""

    product: int
    m_splits: list[int]
    num_rows: int
    out_features: int
    in_features: int
    operand_bytes: int
    result_bytes: int
    accumulate: bool
    mask: list[bool] | None
    a: int
    b: int
    d: int
    first_row: int | None = None
    a_scale: int = 0  # of factors of one byte
    b_scale: int = 0


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """One entry per group, in the order of the launch."""

    shapes: list[tuple[int, int, int]]
    a: list[int]
    b: list[int]
    d: list[int]
    a_stride: list[int]
    b_stride: list[int]
    d_stride: list[int]
    beta: list[float]
    a_scale: list[int]  # both empty for factors of more than one byte
    b_scale: list[int]


def read_arguments(memory: Tensor, num_experts: int, operand_bytes: int = 2) -> Arguments:
    """Take the arrays apart: one after the other, each at a multiple of 256 bytes."""
    data = bytes(memory.cpu().numpy())
    position = 0

    def take(code: str, count: int) -> list[int]:
        nonlocal position
        size = struct.calcsize(f"<{count}{code}")
        values = list(struct.unpack(f"<{count}{code}", data[position : position + size]))
        position += -(-size // 256) * 256
        return values

    sizes = take("i", 3 * num_experts)
    wide = [take(code, num_experts) for code in "QQQqqqQQ"]
    shapes = [(sizes[i], sizes[i + 1], sizes[i + 2]) for i in range(0, len(sizes), 3)]
    beta = [float(value) for value in take("f", num_experts)]
    a, b, d, a_stride, b_stride, d_stride, a_scale, b_scale = wide
    if operand_bytes > 1:
        a_scale, b_scale = [], []
    return Arguments(
        shapes=shapes, a=a, b=b, d=d, a_stride=a_stride, b_stride=b_stride, d_stride=d_stride,
        beta=beta, a_scale=a_scale, b_scale=b_scale,
    )  # fmt: skip


def expected_arguments(problem: Problem) -> Arguments:
    """What the arrays must hold."""
    n, k = problem.out_features, problem.in_features
    groups, used = [], min(max(problem.first_row or 0, 0), problem.num_rows)
    for expert, count in enumerate(problem.m_splits):
        count = min(max(count, 0), problem.num_rows - used)
        groups.append((expert, used, count))
        used += count
    if problem.product == WEIGHT_GRAD:
        groups.sort(key=lambda group: -group[2])  # stable
    is_scaled = problem.operand_bytes == 1
    scales: list[tuple[int, int]] = []
    # Per group: shape, elements before each matrix, strides.
    rows: list[tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]] = []
    for expert, start, count in groups:
        weight = expert * n * k
        if is_scaled and problem.product == WEIGHT_GRAD:
            # Rows are padded to blocks of 128, and those of an expert begin with a new one.
            block, depth = start // 128 + expert, -(-count // 128) * 128
            shape = (n if count else 0, k, depth)
            rows.append((shape, (block * 128 * n, block * 128 * k, weight), (depth, depth, k)))
            scales.append((block * n, block * k))
            continue
        scales.append((start * -(-k // 128), expert * -(-n // 128) * -(-k // 128)))
        if problem.product == FORWARD:
            rows.append(((count, n, k), (start * k, weight, start * n), (k, k, n)))
        elif problem.product == INPUT_GRAD:
            rows.append(((count, k, n), (start * n, weight, start * k), (n, k, k)))
        else:
            shape = (n if count else 0, k, count)
            rows.append((shape, (start * n, start * k, weight), (n, k, k)))
    adds = problem.mask or [problem.accumulate] * len(groups)
    return Arguments(
        shapes=[shape for shape, _, _ in rows],
        a=[problem.a + offset[0] * problem.operand_bytes for _, offset, _ in rows],
        b=[problem.b + offset[1] * problem.operand_bytes for _, offset, _ in rows],
        d=[problem.d + offset[2] * problem.result_bytes for _, offset, _ in rows],
        a_stride=[stride[0] for _, _, stride in rows],
        b_stride=[stride[1] for _, _, stride in rows],
        d_stride=[stride[2] for _, _, stride in rows],
        beta=[float(adds[expert]) for expert, _, _ in groups],
        a_scale=[problem.a_scale + 4 * scale for scale, _ in scales] if is_scaled else [],
        b_scale=[problem.b_scale + 4 * scale for _, scale in scales] if is_scaled else [],
    )
