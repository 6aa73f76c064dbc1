"""Matrix products of 8-bit floats with one scale per block, forward and backward.

Activations and gradients have one scale per 128 consecutive elements along the summed dimension,
weights one per 128 x 128 elements. All three products of a layer take such operands: the output,
the gradient of the input, and the gradient of the weight, which sums over rows and so has
activations and gradients scaled along rows. The products are emulated on every device: values are
rounded to 8 bits and scaled back, then multiplied, in float32 on CPUs and in the dtype of the
activations on GPUs. The layer keeps its input in 8 bits for the backward pass.

Shapes: M rows, N output features, K input features, E experts; G blocks of rows.

Source:
    DeepSeek-V3, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

BLOCK = 128
_FORMAT = torch.float8_e4m3fn
# clear_padding and expected_rows of a product of groups of rows; empty without groups.
_Hints = tuple[()] | tuple[bool, int]
_LARGEST = torch.finfo(_FORMAT).max


def fp8_linear(x: Tensor, w_NK: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ w.T + bias`` with 8-bit operands: ``(..., K)`` to ``(..., N)``.

    Args:
        x: ``(..., K)``, any float dtype, which is that of the result.
        w_NK: ``(N, K)``.
        bias: ``(N,)``, added in the dtype of ``x``.

    Sync:
        None.
    """
    y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), w_NK[None], None, None, ())  # type: ignore[no-untyped-call]
    y = y.view(*x.shape[:-1], len(w_NK))
    return y if bias is None else y + bias


def fp8_grouped_gemm(
    x_MK: Tensor,
    w_ENK: Tensor,
    m_splits: Tensor,
    *,
    main_grad: Tensor | None = None,
    clear_padding: bool = True,
    expected_rows: int = 0,
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

    Sync:
        None where ``grouped_gemm`` has none for the dtype of ``x_MK``.
    """
    y: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        x_MK, w_ENK, m_splits, main_grad, (clear_padding, expected_rows)
    )
    return y


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Round to 8 bits with one scale per row and 128 columns.

    Args:
        x_MK: ``(M, K)``, any float dtype.

    Returns:
        Values ``(M, K)`` float8_e4m3fn and scales ``(M, ceil(K / 128))`` float32; a value times its
        scale approximates the element. A block with a NaN or an infinity becomes NaN.

    Example:
        >>> values, scales = quantize_rows(torch.tensor([[1.0, -448.0, 3.3]]))
        >>> values.float().tolist(), scales.tolist()
        ([[1.0, -448.0, 3.25]], [[1.0]])
    """
    num_rows, width = x_MK.shape
    padded = pad(x_MK.float(), (0, -width % BLOCK))
    blocks = padded.view(num_rows, padded.shape[1] // BLOCK, BLOCK)
    scales = _scales(blocks.abs().amax(-1))
    values = (blocks / scales[..., None]).view(padded.shape)[:, :width]
    return values.to(_FORMAT), scales


def quantize_blocks(w_ENK: Tensor) -> tuple[Tensor, Tensor]:
    """Round to 8 bits with one scale per 128 x 128 elements of each matrix.

    Args:
        w_ENK: ``(E, N, K)``, any float dtype.

    Returns:
        Values ``(E, N, K)`` float8_e4m3fn and scales ``(E, ceil(N / 128), ceil(K / 128))`` float32,
        as `quantize_rows`.
    """
    num, height, width = w_ENK.shape
    padded = pad(w_ENK.float(), (0, -width % BLOCK, 0, -height % BLOCK))
    tall, wide = padded.shape[1:]
    blocks = padded.view(num, tall // BLOCK, BLOCK, wide // BLOCK, BLOCK)
    scales = _scales(blocks.abs().amax((2, 4)))
    values = (blocks / scales[:, :, None, :, None]).view(num, tall, wide)
    return values[:, :height, :width].to(_FORMAT), scales


def quantize_columns(x_MK: Tensor, blocks_M: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Round to 8 bits with one scale per column and block of rows.

    Args:
        x_MK: ``(M, K)``, any float dtype.
        blocks_M: Block of each row, from `row_blocks`.
        num_blocks: G.

    Returns:
        Values ``(M, K)`` float8_e4m3fn and scales ``(G, K)`` float32, as `quantize_rows`.
    """
    x_MK = x_MK.float()
    largest = x_MK.new_zeros(num_blocks, x_MK.shape[1])
    index = blocks_M[:, None].expand_as(x_MK)
    scales = _scales(largest.scatter_reduce_(0, index, x_MK.abs(), "amax"))
    return (x_MK / scales[blocks_M]).to(_FORMAT), scales


def row_blocks(m_splits: Tensor, num_rows: int) -> tuple[Tensor, int]:
    """Return the block of each row, and the number of blocks at most.

    Blocks are 128 consecutive rows of one expert, the last of each expert fewer; rows of no expert
    share a block.

    Example:
        >>> blocks, num_blocks = row_blocks(torch.tensor([130, 1]), 132)
        >>> blocks[[0, 127, 128, 130, 131]].tolist(), num_blocks
        ([0, 0, 1, 2, 3], 4)
    """
    ends = m_splits.cumsum(0)
    blocks_of = (m_splits + BLOCK - 1) // BLOCK
    first = torch.cat((blocks_of.new_zeros(1), blocks_of.cumsum(0)))
    starts = torch.cat((ends.new_zeros(1), ends))
    rows = torch.arange(num_rows, device=m_splits.device)
    expert = torch.searchsorted(ends, rows, right=True)
    inside = (rows - starts[expert]) // BLOCK
    # Without a host sync the number of padding rows is unknown, so they cannot have blocks of 128.
    inside = inside * (expert < len(m_splits))
    return first[expert] + inside, num_rows // BLOCK + len(m_splits) + 1


def _scales(largest: Tensor) -> Tensor:
    """Return scales that map the largest magnitudes to the largest 8-bit value; never 0."""
    return (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)


def _rounded_rows(x: Tensor) -> Tensor:
    values, scales = quantize_rows(x)
    wide = scales.repeat_interleave(BLOCK, dim=1)[:, : x.shape[1]]
    return (values.float() * wide).to(_operand_dtype(x))


def _rounded_blocks(w: Tensor) -> Tensor:
    values, scales = quantize_blocks(w)
    wide = scales.repeat_interleave(BLOCK, dim=1).repeat_interleave(BLOCK, dim=2)
    return (values.float() * wide[:, : w.shape[1], : w.shape[2]]).to(_operand_dtype(w))


def _operand_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_cuda else torch.float32


def _multiply(x: Tensor, w: Tensor, m_splits: Tensor | None, hints: _Hints) -> Tensor:
    if m_splits is None:
        return x @ w[0].t()
    product = torch.ops.megacore.grouped_gemm
    result: Tensor = product(x, w, m_splits, None, True, None, *hints)
    return result


def _multiply_transposed(grad: Tensor, w: Tensor, m_splits: Tensor | None, hints: _Hints) -> Tensor:
    if m_splits is None:
        return grad @ w[0]
    product = torch.ops.megacore.grouped_gemm_input_grad
    result: Tensor = product(grad, w, m_splits, *hints)
    return result


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
    ) -> Tensor:
        blocks, num_blocks = _blocks_of(x, m_splits)
        values = scales = None
        if ctx.needs_input_grad[1]:
            values, scales = quantize_columns(x, blocks, num_blocks)
        ctx.save_for_backward(values, scales, blocks, w, m_splits)
        # Not saved by autograd: other backward passes write to it in the meantime.
        ctx.main_grad, ctx.num_blocks = main_grad, num_blocks
        ctx.hints = hints
        return _multiply(_rounded_rows(x), _rounded_blocks(w), m_splits, hints).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, scales, blocks, w, m_splits = ctx.saved_tensors
        grad_x = grad_w = None
        # A split backward pass requests one of the two at a time.
        if ctx.needs_input_grad[0]:
            factors = _rounded_rows(grad), _rounded_blocks(w)
            grad_x = _multiply_transposed(*factors, m_splits, ctx.hints).to(grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_values, grad_scales = quantize_columns(grad, blocks, ctx.num_blocks)
            wide_grad = (grad_values.float() * grad_scales[blocks]).to(_operand_dtype(grad))
            wide_x = (values.float() * scales[blocks]).to(_operand_dtype(grad))
            grad_w = _weight_grad(wide_grad, wide_x, w, m_splits, ctx.main_grad, ctx.hints)
        return grad_x, grad_w, None, None, None


def _blocks_of(x: Tensor, m_splits: Tensor | None) -> tuple[Tensor, int]:
    if m_splits is not None:
        return row_blocks(m_splits, len(x))
    return torch.arange(len(x), device=x.device) // BLOCK, -(-len(x) // BLOCK)


def _weight_grad(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    m_splits: Tensor | None,
    main_grad: Tensor | None,
    hints: _Hints,
) -> Tensor | None:
    """Return the gradient of the weights, or add it to ``main_grad``."""
    if m_splits is None:
        return (grad.t() @ x)[None].to(w.dtype)
    out = torch.empty_like(w, dtype=torch.float32) if main_grad is None else main_grad
    add_to = torch.ops.megacore.grouped_gemm_weight_grad_
    add_to(grad, x, m_splits, out, main_grad is not None, None, *hints[1:])
    return out.to(w.dtype) if main_grad is None else None
