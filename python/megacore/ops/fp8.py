"""Matrix products of 8-bit floats with one scale per block, forward and backward.

Activations and gradients have one scale per 128 consecutive elements along the summed dimension,
weights one per 128 x 128 elements. All three products of a layer take such operands: the output,
the gradient of the input, and the gradient of the weight, which sums over rows and so has
activations and gradients scaled along rows. The layer keeps its input in 8 bits for the backward
pass.

GPUs of compute capability 9.0 multiply 8-bit operands, see `takes_fp8_kernels` for the conditions.
Elsewhere the products are emulated: values are scaled back, then multiplied, in float32 on CPUs and
in the dtype of the activations on GPUs.

Shapes: M rows, N output features, K input features, E experts; G blocks of rows.

Source:
    DeepSeek-V3, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megacore.ops.gemm_cuda import launch_grouped, takes_fp8_kernels
from megacore.ops.grouped_product import grouped_product
from megacore.ops.linear import added_grad_of
from megacore.ops.quantize import (
    BLOCK,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    row_blocks,
)
from megacore.ops.register import define_op
from megacore.ops.rounded_weight import RoundedWeight, rounded_of

# clear_padding and expected_rows of a product of groups of rows.
_Hints = tuple[bool, int]


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias`` with 8-bit operands: ``(..., K)`` to ``(..., N)``.

    Args:
        x: ``(..., K)``, any float dtype, which is that of the result.
        weight: ``(..., K)``, whose first dimensions are flattened to N; the parameter itself, so
            that its `RoundedWeight` and its gradient buffer are found.
        bias: ``(N,)``, added in the dtype of ``x``.

    Sync:
        None.
    """
    w_1NK = weight.flatten(0, -2)[None]
    rows, hints = x.reshape(-1, x.shape[-1]), (False, 0)
    added = added_grad_of(weight)
    main_grad = None if added is None else added[None]
    y: Tensor = _Product.apply(rows, w_1NK, None, main_grad, hints, rounded_of(weight))  # type: ignore[no-untyped-call]
    y = y.view(*x.shape[:-1], w_1NK.shape[1])
    return y if bias is None else y + bias


def fp8_grouped_gemm(
    x_MK: Tensor,
    w_ENK: Tensor,
    m_splits: Tensor,
    *,
    main_grad: Tensor | None = None,
    clear_padding: bool = True,
    expected_rows: int = 0,
    rounded: RoundedWeight | None = None,
) -> Tensor:
    """Multiply consecutive groups of rows by one weight each, with 8-bit operands.

    As `megacore.ops.gemm.grouped_gemm`, also in the treatment of ``main_grad`` and padding; a block
    of rows never contains rows of two experts.

    Args:
        x_MK: Rows in expert order, ``(M, K)``.
        w_ENK: One weight per expert, ``(E, N, K)``.
        m_splits: Rows per expert, ``(E,)``, int64, on the device of ``x_MK``.
        main_grad: Buffer to which the gradient of the weights is added, ``(E, N, K)``, float32.
        clear_padding: As in ``grouped_gemm``.
        expected_rows: As in ``grouped_gemm``.
        rounded: Rounded copy of the weights. Default: round in this product.

    Sync:
        None where there are kernels, and where ``grouped_gemm`` has none for the dtype of
        ``x_MK``.
    """
    y: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        x_MK, w_ENK, m_splits, main_grad, (clear_padding, expected_rows), rounded
    )
    return y


@dataclass(frozen=True, kw_only=True)
class Fp8Product:
    """One product with 8-bit operands of a model.

    Attributes:
        name: Name of the weight in the model.
        module: The module that owns the weight.
        weight: The parameter.
        sizes: ``(E, N, K)``, with one expert for a linear layer.
    """

    name: str
    module: nn.Module
    weight: nn.Parameter
    sizes: tuple[int, int, int]


def fp8_products(model: nn.Module) -> Iterator[Fp8Product]:
    """Yield the products of linear layers and experts that take 8-bit operands.

    Their modules have `fp8_linear` as ``linear``, or `fp8_grouped_gemm` as ``product``.
    """
    for name, module in model.named_modules():
        is_linear = getattr(module, "linear", None) is fp8_linear
        is_experts = getattr(module, "product", None) is fp8_grouped_gemm
        if not is_linear and not is_experts:
            continue
        for key, param in module.named_parameters(recurse=False):
            if param.dim() < 2 or key == "bias":  # which may have several dimensions
                continue
            num, width = (param.shape[0] if is_experts else 1), param.shape[-1]
            yield Fp8Product(
                name=f"{name}.{key}" if name else key,
                module=module,
                weight=param,
                sizes=(num, param.numel() // (num * width), width),
            )


class _Product(torch.autograd.Function):
    """Product of rows with one weight, or with one per group of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        m_splits: Tensor | None,
        main_grad: Tensor | None,
        hints: _Hints,
        rounded: RoundedWeight | None,
    ) -> Tensor:
        values = scales = None
        if ctx.needs_input_grad[1]:
            values, scales = _quantize_columns(x, w, m_splits)
        ctx.save_for_backward(values, scales, w, m_splits)
        # Not saved by autograd: other backward passes write to it in the meantime.
        ctx.main_grad, ctx.hints, ctx.rounded = main_grad, hints, rounded
        rows = quantize_rows(x, _rows_in_use(m_splits))
        weights = quantize_blocks(w) if rounded is None else rounded.blocks()
        y: Tensor = _product(*rows, *weights, m_splits, x.dtype, *hints)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, scales, w, m_splits = ctx.saved_tensors
        grad_x = grad_w = None
        # A split backward pass requests one of the two at a time.
        if ctx.needs_input_grad[0]:
            rows = quantize_rows(grad, _rows_in_use(m_splits))
            if ctx.rounded is None:
                weights = quantize_blocks(w, transposed=True)
            else:
                weights = ctx.rounded.blocks(transposed=True)
            grad_x = _product(*rows, *weights, m_splits, grad.dtype, *ctx.hints)
        if ctx.needs_input_grad[1]:
            columns = _quantize_columns(grad, w, m_splits)
            factors = *columns, values, scales, m_splits, len(grad), grad.dtype
            adds = ctx.main_grad is not None
            out = ctx.main_grad if adds else torch.empty_like(w, dtype=torch.float32)
            _weight_grad_(*factors, out, adds, ctx.hints[1])
            grad_w = None if adds else out.to(w.dtype)
        return grad_x, grad_w, None, None, None, None


def _rows_in_use(m_splits: Tensor | None) -> Tensor | None:
    return None if m_splits is None else m_splits.sum()


def _quantize_columns(x: Tensor, w: Tensor, m_splits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round for the gradient of the weights, in the layout of the kernels where they run."""
    return quantize_columns(x, m_splits, transposed=takes_fp8_kernels(x, *w.shape))


def _product_reference(
    values: Tensor,
    scales: Tensor,
    w_values: Tensor,
    w_scales: Tensor,
    m_splits: Tensor | None,
    dtype: torch.dtype,
    clear_padding: bool,
    expected_rows: int,
) -> Tensor:
    """Multiply rows by the transpose of weights, all scaled back."""
    wide = _product_dtype(values, dtype)
    per_column = scales.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
    x = (values.float() * per_column).to(wide)
    _, height, width = w_values.shape
    per_element = w_scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    w = (w_values.float() * per_element[:, :height, :width]).to(wide)
    if m_splits is None:
        return (x @ w[0].t()).to(dtype)
    hints: dict[str, Any] = {"clear_padding": clear_padding, "expected_rows": expected_rows}
    return grouped_product("forward", x, w, m_splits, **hints).to(dtype)


def _product_cuda(
    values: Tensor,
    scales: Tensor,
    w_values: Tensor,
    w_scales: Tensor,
    m_splits: Tensor | None,
    dtype: torch.dtype,
    clear_padding: bool,
    expected_rows: int,
) -> Tensor:
    y = values.new_empty(len(values), w_values.shape[1], dtype=dtype)
    if not takes_fp8_kernels(y, *w_values.shape):
        factors = values, scales, w_values, w_scales, m_splits
        return _product_reference(*factors, dtype, clear_padding, expected_rows)
    launch_grouped(
        "forward",
        values,
        w_values,
        m_splits,
        y,
        scales=(scales, w_scales),
        clear_tail=clear_padding,
        expected_rows=expected_rows,
    )
    return y


def _product_fake(
    values: Tensor, scales: Tensor, w_values: Tensor, w_scales: Tensor, *others: Any
) -> Tensor:
    del scales, w_scales
    return values.new_empty(len(values), w_values.shape[1], dtype=others[1])


def _weight_grad_reference_(
    grad: Tensor,
    grad_scales: Tensor,
    x: Tensor,
    x_scales: Tensor,
    m_splits: Tensor | None,
    num_rows: int,
    dtype: torch.dtype,
    out: Tensor,
    accumulate: bool,
    expected_rows: int,
) -> None:
    """Write or add the product of gradients and activations, both scaled back, along rows."""
    wide = _product_dtype(grad, dtype)
    if m_splits is None:
        blocks = torch.arange(num_rows, device=grad.device) // BLOCK
    else:
        blocks, num_blocks = row_blocks(m_splits, num_rows)
        blocks = blocks.clamp_max(num_blocks - 1)  # rows of no expert, which no product reads
    grad, x = (
        (values.float() * scales[blocks]).to(wide)
        for values, scales in ((grad, grad_scales), (x, x_scales))
    )
    if m_splits is None:
        product = (grad.t() @ x)[None]
        out.copy_(out + product if accumulate else product)
        return
    options: dict[str, Any] = {"accumulate": accumulate, "expected_rows": expected_rows}
    grouped_product("weight_grad", grad, x, m_splits, out=out, **options)


def _weight_grad_cuda_(
    grad: Tensor,
    grad_scales: Tensor,
    x: Tensor,
    x_scales: Tensor,
    m_splits: Tensor | None,
    num_rows: int,
    dtype: torch.dtype,
    out: Tensor,
    accumulate: bool,
    expected_rows: int,
) -> None:
    if grad.dim() == 2:  # not in the layout of the kernels
        factors = grad, grad_scales, x, x_scales, m_splits
        _weight_grad_reference_(*factors, num_rows, dtype, out, accumulate, expected_rows)
        return
    launch_grouped(
        "weight_grad",
        grad,
        x,
        m_splits,
        out,
        scales=(grad_scales, x_scales),
        num_rows=num_rows,
        accumulate=accumulate,
        expected_rows=expected_rows,
    )


def _weight_grad_fake_(*args: Any) -> None:
    del args


def _product_dtype(values: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if values.is_cuda else torch.float32


_product = define_op(
    "fp8_product(Tensor values, Tensor scales, Tensor w_values, Tensor w_scales, Tensor? m_splits,"
    " ScalarType dtype, bool clear_padding, SymInt expected_rows) -> Tensor",
    cpu=_product_reference,
    cuda=_product_cuda,
    fake=_product_fake,
)
_weight_grad_ = define_op(
    "fp8_weight_grad_(Tensor grad, Tensor grad_scales, Tensor x, Tensor x_scales, Tensor? m_splits,"
    " SymInt num_rows, ScalarType dtype, Tensor(a!) out, bool accumulate, SymInt expected_rows)"
    " -> ()",
    cpu=_weight_grad_reference_,
    cuda=_weight_grad_cuda_,
    fake=_weight_grad_fake_,
)
