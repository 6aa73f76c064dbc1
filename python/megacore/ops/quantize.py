"""Rounding to 8-bit floats (e4m3) with one float32 scale per block.

A value times its scale approximates the element. A block with a NaN or an infinity becomes NaN.
Native for float32 and bfloat16 on CPUs and for these and float16 on GPUs; elsewhere, and as the
reference of the kernels, torch operations. All give the same bits, but for the sign of a NaN.

Shapes: M rows, K columns, E experts or matrices, N rows of a matrix; G blocks of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megacore.ops.gemm_cuda import MAX_EXPERTS
from megacore.ops.register import define_compiled

BLOCK = 128
_FORMAT = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FORMAT).max


def quantize_rows(x_MK: Tensor, num_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round to 8 bits with one scale per row and 128 columns.

    Args:
        x_MK: ``(M, K)``, any float dtype.
        num_rows: Number of rows in use, int64 scalar on the device of ``x_MK``; the others may have
            any value in the result. Default: all.

    Returns:
        Values ``(M, K)`` float8_e4m3fn and scales ``(M, ceil(K / 128))`` float32.

    Sync:
        None.

    Example:
        >>> values, scales = quantize_rows(torch.tensor([[1.0, -448.0, 3.3]]))
        >>> values.float().tolist(), scales.tolist()
        ([[1.0, -448.0, 3.25]], [[1.0]])
    """
    values, scales = _quantize_rows(x_MK, num_rows)
    return values, scales


def quantize_columns(
    x_MK: Tensor, m_splits: Tensor | None = None, *, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Round to 8 bits with one scale per column and block of rows, see `row_blocks`.

    Args:
        x_MK: ``(M, K)``, any float dtype.
        m_splits: Rows per expert, ``(E,)``, int64, on the device of ``x_MK``. Other rows may have
            any value in the result. Default: one expert with all rows.
        transposed: Return the values of each expert as ``(K, 128 * blocks)``, zero beyond its rows,
            one expert after the other in flat memory: those of an expert begin at element
            ``128 * K`` times its first block. Products along rows on GPUs take this layout.

    Returns:
        Values ``(M, K)``, or ``(G * 128 * K,)`` if transposed, float8_e4m3fn, and scales ``(G, K)``
        float32; blocks that no expert uses may have any.

    Sync:
        None; with transposed values only where there is a kernel.
    """
    values, scales = _quantize_columns(x_MK, m_splits, transposed)
    return values, scales


def quantize_blocks(
    w_ENK: Tensor, *, transposed: bool = False, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Round to 8 bits with one scale per 128 x 128 elements of each matrix.

    Args:
        w_ENK: ``(E, N, K)``, any float dtype.
        transposed: Return both results for the transposed matrices ``(E, K, N)``.
        out: Memory of `block_buffers` for the results. Default: new memory.

    Returns:
        Values ``(E, N, K)`` float8_e4m3fn and scales ``(E, ceil(N / 128), ceil(K / 128))`` float32.

    Sync:
        None.
    """
    values, scales = block_buffers(w_ENK, transposed=transposed) if out is None else out
    # As bytes: torch's checks of operations cannot copy an 8-bit float that is written to.
    _quantize_blocks_(w_ENK, transposed, values.view(torch.uint8), scales)
    return values, scales


def block_buffers(w_ENK: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return memory for the results of `quantize_blocks`.

    Example:
        >>> values, scales = block_buffers(torch.ones(1, 3, 300), transposed=True)
        >>> list(values.shape), list(scales.shape)
        ([1, 300, 3], [1, 3, 1])
    """
    num, height, width = w_ENK.shape
    if transposed:
        height, width = width, height
    shape = num, -(-height // BLOCK), -(-width // BLOCK)
    scales = w_ENK.new_empty(shape, dtype=torch.float32)
    return w_ENK.new_empty(num, height, width, dtype=_FORMAT), scales


def row_blocks(m_splits: Tensor, num_rows: int) -> tuple[Tensor, int]:
    """Return the block of each row, and the number of blocks.

    Blocks are 128 consecutive rows of one expert, the last of each expert fewer. The first block of
    an expert is its number plus the blocks of 128 rows before it, so some numbers are not used.
    Rows of no expert get the number of blocks.

    Example:
        >>> blocks, num_blocks = row_blocks(torch.tensor([130, 1]), 132)
        >>> blocks[[0, 127, 128, 130, 131]].tolist(), num_blocks
        ([0, 0, 1, 2, 3], 3)
    """
    num_blocks = num_rows // BLOCK + len(m_splits)
    ends = m_splits.cumsum(0)
    starts = torch.cat((ends - m_splits, ends[-1:]))
    first = starts // BLOCK + torch.arange(len(starts), device=starts.device)
    rows = torch.arange(num_rows, device=m_splits.device)
    expert = torch.searchsorted(ends, rows, right=True)
    blocks = first[expert] + (rows - starts[expert]) // BLOCK
    return blocks.where(expert < len(m_splits), num_blocks), num_blocks


def _scales(largest: Tensor) -> Tensor:
    """Return scales that map the largest magnitudes to the largest 8-bit value; never 0."""
    return (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)


def quantize_rows_reference(x: Tensor, num_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute :func:`quantize_rows` with torch operations, on any device."""
    del num_rows
    rows, width = x.shape
    padded = pad(x.float(), (0, -width % BLOCK))
    blocks = padded.view(rows, padded.shape[1] // BLOCK, BLOCK)
    scales = _scales(blocks.abs().amax(-1))
    values = (blocks / scales[..., None]).view(padded.shape)[:, :width]
    return values.to(_FORMAT), scales


def quantize_columns_reference(
    x: Tensor, m_splits: Tensor | None, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Compute :func:`quantize_columns` with torch operations, on any device."""
    x = x.float()
    splits = torch.full((1,), len(x), device=x.device) if m_splits is None else m_splits
    blocks, num_blocks = row_blocks(splits, len(x))
    largest = x.new_zeros(num_blocks + 1, x.shape[1])
    index = blocks[:, None].expand_as(x)
    scales = _scales(largest.scatter_reduce_(0, index, x.abs(), "amax"))
    values = (x / scales[blocks]).to(_FORMAT)
    if transposed:
        values = _transposed(values, splits)
    return values, scales[:num_blocks]


def _transposed(values: Tensor, m_splits: Tensor) -> Tensor:
    num_rows, width = values.shape
    starts = m_splits.cumsum(0) - m_splits
    depths = -(-m_splits // BLOCK) * BLOCK
    first = (starts // BLOCK + torch.arange(len(m_splits), device=starts.device)) * BLOCK
    used = int(m_splits.sum())
    expert = torch.repeat_interleave(m_splits)
    inside = torch.arange(used, device=starts.device) - starts[expert]
    columns = torch.arange(width, device=starts.device)
    places = first[expert, None] * width + columns * depths[expert, None] + inside[:, None]
    numel = (num_rows // BLOCK + len(m_splits)) * BLOCK * width
    flat = torch.zeros(numel, dtype=torch.uint8, device=values.device)
    flat[places] = values[:used].view(torch.uint8)
    return flat.view(_FORMAT)


def quantize_blocks_reference(w: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Compute :func:`quantize_blocks` with torch operations, on any device."""
    w = w.transpose(1, 2) if transposed else w
    num, height, width = w.shape
    padded = pad(w.float(), (0, -width % BLOCK, 0, -height % BLOCK))
    tall, wide = padded.shape[1:]
    blocks = padded.reshape(num, tall // BLOCK, BLOCK, wide // BLOCK, BLOCK)
    scales = _scales(blocks.abs().amax((2, 4)))
    values = (blocks / scales[:, :, None, :, None]).view(num, tall, wide)
    return values[:, :height, :width].to(_FORMAT).contiguous(), scales


def _rows_fake(x: Tensor, num_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    del num_rows
    scales = x.new_empty(len(x), -(-x.shape[1] // BLOCK), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=_FORMAT), scales


def _columns_fake(x: Tensor, m_splits: Tensor | None, transposed: bool) -> tuple[Tensor, Tensor]:
    num_blocks = len(x) // BLOCK + (1 if m_splits is None else len(m_splits))
    shape = (num_blocks * BLOCK * x.shape[1],) if transposed else x.shape
    scales = x.new_empty(num_blocks, x.shape[1], dtype=torch.float32)
    return x.new_empty(shape, dtype=_FORMAT), scales


def _write_blocks(w: Tensor, transposed: bool, values: Tensor, scales: Tensor) -> None:
    found = quantize_blocks_reference(w, transposed)
    values.copy_(found[0].view(torch.uint8))
    scales.copy_(found[1])


def _blocks_fake(w: Tensor, transposed: bool, values: Tensor, scales: Tensor) -> None:
    del w, transposed, values, scales


def _columns_fit(x: Tensor, m_splits: Tensor | None, transposed: bool) -> bool:
    del x, transposed
    return m_splits is None or 1 <= len(m_splits) <= MAX_EXPERTS


_quantize_rows = define_compiled(
    "quantize_rows(Tensor x, Tensor? num_rows=None) -> (Tensor, Tensor)",
    reference=quantize_rows_reference,
    fake=_rows_fake,
)
_quantize_columns = define_compiled(
    "quantize_columns(Tensor x, Tensor? m_splits, bool transposed) -> (Tensor, Tensor)",
    reference=quantize_columns_reference,
    cuda_fits=_columns_fit,
    fake=_columns_fake,
)
_quantize_blocks_ = define_compiled(
    "quantize_blocks_(Tensor w, bool transposed, Tensor(a!) values, Tensor(b!) scales) -> ()",
    reference=_write_blocks,
    fake=_blocks_fake,
)
