"""The products of `grouped_gemm` as one operation: forward, and the gradients of rows and weights.

Shapes: M rows of all experts, E experts, N output features, K input features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megacore.ops import gemm_cpu, gemm_torch
from megacore.ops.gemm_cuda import PRODUCTS, choose_backend, launch_grouped
from megacore.ops.kernel_choice import Product, is_left
from megacore.ops.register import compiled, define_op

_FORWARD, _WEIGHT_GRAD = PRODUCTS["forward"], PRODUCTS["weight_grad"]
_NAMES = tuple(PRODUCTS)
_SCHEMA = (
    "grouped_product(Tensor a, Tensor b, Tensor m_splits, int product, Tensor(a!)? out=None,"
    " Tensor? first_row=None, Tensor? mask=None, bool accumulate=False, bool clear_padding=True,"
    " SymInt expected_rows=0) -> Tensor"
)


def grouped_product(
    product: Product,
    a: Tensor,
    b: Tensor,
    m_splits: Tensor,
    *,
    out: Tensor | None = None,
    first_row: Tensor | None = None,
    mask: Tensor | None = None,
    accumulate: bool = False,
    clear_padding: bool = True,
    expected_rows: int = 0,
) -> Tensor:
    """Multiply the rows of each expert by its weight, or by rows; not differentiable.

    Args:
        product: ``"forward"``: ``out[rows of e] = a[rows of e] @ b[e].T``; ``"input_grad"``: the
            same without ``.T``; ``"weight_grad"``: ``out[e] = a[rows of e].T @ b[rows of e]``, zero
            for experts without rows.
        a: Rows ``(M, K)`` in the forward product, else their gradient ``(M, N)``.
        b: Weights ``(E, N, K)``, or for a weight gradient rows ``(M, K)``; dtype of ``a``.
        m_splits: Rows per expert, ``(E,)``, int64.
        out: Written, ``(M, N)``, ``(M, K)`` or ``(E, N, K)``. A weight gradient needs it; that of
            16-bit rows may be float32. Default: new memory with the dtype of ``a``.
        first_row: First row of the first expert, int64 scalar, for results in ``out``. Rows of
            ``out`` that belong to no expert are unchanged. Default: row 0.
        mask: Experts that add to their part of a weight gradient with ``accumulate``, ``(E,)``,
            bool; others overwrite it. Default: all.
        accumulate: Add a weight gradient to ``out``.
        clear_padding: Without ``first_row``, set rows of no expert to zero; otherwise they may have
            any value.
        expected_rows: As in `grouped_gemm`.

    Returns:
        ``out``, or the new memory.

    Raises:
        ValueError: On the CPU, if ``m_splits`` has a negative entry or too many rows in all.

    Sync:
        As in `grouped_gemm`.

    Example:
        >>> x, w, out = torch.eye(3), torch.ones(1, 1, 3), torch.zeros(3, 1)
        >>> one = torch.tensor(1)
        >>> grouped_product("forward", x, w, one[None], out=out, first_row=one).flatten().tolist()
        [0.0, 1.0, 0.0]
    """
    options = out, first_row, mask, accumulate, clear_padding, expected_rows
    result: Tensor = _grouped_product(a, b, m_splits, PRODUCTS[product], *options)
    return result if out is None else out


def product_on_cpu(
    a: Tensor,
    b: Tensor,
    m_splits: Tensor,
    product: int,
    out: Tensor | None = None,
    first_row: Tensor | None = None,
    mask: Tensor | None = None,
    accumulate: bool = False,
    clear_padding: bool = True,
    expected_rows: int = 0,
) -> Tensor:
    """Choose between our kernel and torch's products of CPU tensors."""
    if out is not None:
        increment_version(out)
    is_ours_to_write = out is None or (
        out.is_contiguous()
        and (out.dtype == torch.float32 or (out.dtype == a.dtype and not accumulate))
    )
    if is_left("grouped_product", "cpu"):
        is_ours = False
    elif product == _WEIGHT_GRAD:
        assert out is not None
        is_ours = out.dtype == torch.float32 or gemm_cpu.goes_to_float32("forward", a, out)
    else:
        is_ours = a.dtype == torch.float32 == b.dtype
        is_ours = is_ours or gemm_cpu.goes_to_float32(_NAMES[product], a, b)
    if is_ours and is_ours_to_write:
        options = out, first_row, mask, accumulate, clear_padding, expected_rows
        return _kernel(a, b, m_splits, product, *options)  # type: ignore[no-any-return]
    if out is None:
        weights = b.transpose(1, 2) if product == _FORWARD else b
        return gemm_cpu.rows_product(a, weights, m_splits, clear_padding)
    start, end = _rows_of(m_splits, first_row, a)
    if product == _WEIGHT_GRAD:
        rows = a[start:], b[start:]
        gemm_cpu.weight_grad_reference_(*rows, m_splits, out, accumulate, mask)
    elif end > start:
        out[start:end] = product_on_cpu(a[start:end], b, m_splits, product)
    return a.new_empty(0)


def product_on_cuda(
    a: Tensor,
    b: Tensor,
    m_splits: Tensor,
    product: int,
    out: Tensor | None = None,
    first_row: Tensor | None = None,
    mask: Tensor | None = None,
    accumulate: bool = False,
    clear_padding: bool = True,
    expected_rows: int = 0,
) -> Tensor:
    """Choose between our kernel and torch's products of CUDA tensors."""
    if out is not None:
        increment_version(out)
    rows, weights, fits = a, b, True
    if product == _WEIGHT_GRAD:
        assert out is not None
        # A 16-bit result is always overwritten.
        rows, weights = b, out
        fits = out.dtype == torch.float32 or (out.dtype == b.dtype and not accumulate)
        fits = fits and out.is_contiguous()
    backend = choose_backend(rows, *weights.shape) if fits else "reference"
    if backend == "native":
        result = _new_result(a, b, product) if out is None else out
        launch_grouped(
            _NAMES[product],
            a,
            b,
            m_splits,
            result,
            accumulate=accumulate,
            accumulate_mask=mask if accumulate else None,
            clear_tail=clear_padding and first_row is None and product != _WEIGHT_GRAD,
            first_row=first_row,
            expected_rows=expected_rows,
        )
        return result if out is None else a.new_empty(0)
    ways = gemm_torch.WAYS if backend == "torch" else gemm_cpu.REFERENCES
    if out is None:
        return ways[_NAMES[product]](a, b, m_splits, clear_padding)  # type: ignore[no-any-return]
    start, end = _rows_of(m_splits, first_row, a)
    if product == _WEIGHT_GRAD:
        ways["weight_grad"](a[start:], b[start:], m_splits, out, accumulate, mask)
    elif end > start:
        out[start:end] = ways[_NAMES[product]](a[start:end], b, m_splits, True)
    return a.new_empty(0)


def _rows_of(m_splits: Tensor, first_row: Tensor | None, a: Tensor) -> tuple[int, int]:
    """Return the first row of the experts and the end; all rows of ``a`` without ``first_row``."""
    if first_row is None:
        return 0, a.shape[0]
    start = int(first_row)
    return start, start + int(m_splits.sum())


def _new_result(a: Tensor, b: Tensor, product: int) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1 if product == _FORWARD else 2])


def _fake(
    a: Tensor,
    b: Tensor,
    m_splits: Tensor,
    product: int,
    out: Tensor | None = None,
    first_row: Tensor | None = None,
    mask: Tensor | None = None,
    accumulate: bool = False,
    clear_padding: bool = True,
    expected_rows: int = 0,
) -> Tensor:
    del m_splits, first_row, mask, accumulate, clear_padding, expected_rows
    return _new_result(a, b, product) if out is None else a.new_empty(0)


_kernel = compiled(_SCHEMA, _fake)
_grouped_product = define_op(_SCHEMA, cpu=product_on_cpu, cuda=product_on_cuda, fake=_fake)
_grouped_product.pass_autograd()
