"""Grouped products of a range of rows, whose first row is a number on the device.

Earlier rows belong to other groups with other weights. Used for clones, whose rows follow those of
the home experts.

Shapes: M rows of all groups, E groups here, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megacore.ops.gemm_cuda import Product, launch_grouped, takes_kernel
from megacore.ops.register import define_op


def part_product_(
    x: Tensor,
    w: Tensor,
    m_splits: Tensor,
    first_row: Tensor,
    out: Tensor,
    expected_rows: int = 0,
) -> None:
    """Compute ``out[rows of e] = x[rows of e] @ w[e].T``; other rows of ``out`` are unchanged.

    Args:
        x: ``(M, K)``.
        w: ``(E, N, K)``.
        m_splits: Rows of each group, ``(E,)``, int64.
        first_row: First row of the first group, int64 scalar.
        out: ``(M, N)``, written.
        expected_rows: As in `grouped_gemm`.

    Sync:
        None where the kernels of `grouped_gemm` compute it; otherwise as in `grouped_gemm`.

    Example:
        >>> x, w, out = torch.eye(3), torch.ones(1, 1, 3), torch.zeros(3, 1)
        >>> part_product_(x, w, torch.tensor([1]), torch.tensor(1), out)
        >>> out.flatten().tolist()
        [0.0, 1.0, 0.0]
    """
    _part_product_(x, w, m_splits, first_row, out, expected_rows)


def part_input_grad_(
    grad: Tensor,
    w: Tensor,
    m_splits: Tensor,
    first_row: Tensor,
    out: Tensor,
    expected_rows: int = 0,
) -> None:
    """Compute ``out[rows of e] = grad[rows of e] @ w[e]``: ``(M, N)`` to ``(M, K)``."""
    _part_input_grad_(grad, w, m_splits, first_row, out, expected_rows)


def part_weight_grad_(
    grad: Tensor,
    x: Tensor,
    m_splits: Tensor,
    first_row: Tensor,
    out: Tensor,
    expected_rows: int = 0,
) -> None:
    """Compute ``out[e] = grad[rows of e].T @ x[rows of e]``, ``(E, N, K)``; zero for empty groups.

    Args:
        grad: ``(M, N)``.
        x: ``(M, K)``.
        m_splits: Rows of each group, ``(E,)``, int64.
        first_row: First row of the first group, int64 scalar.
        out: Overwritten; float32 for 16-bit rows.
        expected_rows: As in `grouped_gemm`.
    """
    _part_weight_grad_(grad, x, m_splits, first_row, out, expected_rows)


def _rows(product: Callable[..., Tensor]) -> Callable[..., None]:
    """Return an implementation that slices rows and copies results. Sync: reads ``first_row``."""

    def run(
        a: Tensor,
        w: Tensor,
        m_splits: Tensor,
        first_row: Tensor,
        out: Tensor,
        expected_rows: int = 0,
    ) -> None:
        del expected_rows
        first = int(first_row)
        end = first + int(m_splits.sum())
        if end > first:
            out[first:end] = product(a[first:end], w, m_splits)

    return run


def _forward(x: Tensor, w: Tensor, m_splits: Tensor) -> Tensor:
    result: Tensor = torch.ops.megacore.grouped_gemm(x, w, m_splits, None, True)
    return result


def _input_grad(grad: Tensor, w: Tensor, m_splits: Tensor) -> Tensor:
    result: Tensor = torch.ops.megacore.grouped_gemm_input_grad(grad, w, m_splits)
    return result


def _weight_grad_sliced_(
    grad: Tensor,
    x: Tensor,
    m_splits: Tensor,
    first_row: Tensor,
    out: Tensor,
    expected_rows: int = 0,
) -> None:
    del expected_rows
    first = int(first_row)
    torch.ops.megacore.grouped_gemm_weight_grad_(grad[first:], x[first:], m_splits, out, False)


def _rows_cuda(kind: Product, product: Callable[..., Tensor]) -> Callable[..., None]:
    """Return an implementation that launches the kernel ``kind`` if it supports the tensors."""

    def run(
        a: Tensor,
        w: Tensor,
        m_splits: Tensor,
        first_row: Tensor,
        out: Tensor,
        expected_rows: int = 0,
    ) -> None:
        if not takes_kernel(a, *w.shape):
            return _rows(product)(a, w, m_splits, first_row, out)
        return launch_grouped(
            kind, a, w, m_splits, out, first_row=first_row, expected_rows=expected_rows
        )

    return run


def _weight_grad_cuda_(
    grad: Tensor,
    x: Tensor,
    m_splits: Tensor,
    first_row: Tensor,
    out: Tensor,
    expected_rows: int = 0,
) -> None:
    if not takes_kernel(x, *out.shape):
        return _weight_grad_sliced_(grad, x, m_splits, first_row, out)
    return launch_grouped(
        "weight_grad",
        grad,
        x,
        m_splits,
        out,
        first_row=first_row,
        expected_rows=expected_rows,
    )


def _fake(
    a: Tensor, b: Tensor, m_splits: Tensor, first_row: Tensor, out: Tensor, expected_rows: int = 0
) -> None:
    del a, b, m_splits, first_row, out, expected_rows


_part_product_ = define_op(
    "grouped_gemm_part_(Tensor x, Tensor w, Tensor m_splits, Tensor first_row, Tensor(a!) out,"
    " SymInt expected_rows=0) -> ()",
    cpu=_rows(_forward),
    cuda=_rows_cuda("forward", _forward),
    fake=_fake,
)
_part_input_grad_ = define_op(
    "grouped_gemm_part_input_grad_(Tensor grad, Tensor w, Tensor m_splits, Tensor first_row,"
    " Tensor(a!) out, SymInt expected_rows=0) -> ()",
    cpu=_rows(_input_grad),
    cuda=_rows_cuda("input_grad", _input_grad),
    fake=_fake,
)
_part_weight_grad_ = define_op(
    "grouped_gemm_part_weight_grad_(Tensor grad, Tensor x, Tensor m_splits, Tensor first_row,"
    " Tensor(a!) out, SymInt expected_rows=0) -> ()",
    cpu=_weight_grad_sliced_,
    cuda=_weight_grad_cuda_,
    fake=_fake,
)
