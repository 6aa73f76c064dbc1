"""Grouped matrix product: every expert multiplies its own rows by its own weight.

Shapes: M rows of all experts, E experts, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.ops import gemm_cpu, gemm_torch
from megacore.ops.gemm_cuda import PRODUCTS, choose_backend
from megacore.ops.grouped_product import grouped_product, product_on_cpu, product_on_cuda
from megacore.ops.kernel_choice import Product
from megacore.ops.register import define_gradient, define_op, describe


def grouped_gemm(
    x: Tensor,
    w: Tensor,
    m_splits: Tensor,
    *,
    main_grad: Tensor | None = None,
    accumulate: bool | Tensor = True,
    clear_padding: bool = True,
    expected_rows: int = 0,
    out: Callable[[], Tensor] | None = None,
    grad_out: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Multiply consecutive groups of rows by one weight each.

    ``y[rows of e] = x[rows of e] @ w[e].T``. The rows of expert 0 come first, then those of expert
    1, and so on. Rows beyond ``sum(m_splits)`` are padding: they are not read, and by default they
    are zero in the result and in the gradient of ``x``. Sums are formed in float32 for narrower
    dtypes.

    **Weight gradient.** Without ``main_grad``, it is returned to autograd. With ``main_grad``, the
    backward pass adds the gradient to ``main_grad`` in float32, and autograd gets none. Autograd
    still visits a leaf ``w`` when all its gradients are complete, and runs its post-accumulate
    hooks with ``w.grad`` unchanged. A gradient buffer treats a visit without a gradient as the
    signal that ``main_grad`` is ready. :class:`megacore.buffers.ParamGradBuffer` does so for
    expert parameters and sets their ``main_grad``, see :func:`main_grad_of`.

    Args:
        x: Rows in expert order, ``(M, K)``.
        w: One weight per expert, ``(E, N, K)``, dtype and device of ``x``.
        m_splits: Rows per expert, ``(E,)``, int64, same device. Zeros are allowed.
        main_grad: Buffer for the gradient of ``w``, ``(E, N, K)``, float32, contiguous.
        accumulate: Add to ``main_grad``; otherwise overwrite it. A bool tensor ``(E,)`` on the
            same device decides per expert.
        clear_padding: Set padding rows to zero, in the result and in the gradient of ``x``;
            otherwise they may have any value.
        expected_rows: Expected rows of an expert, a hint for the choice of a kernel on GPUs. 0: the
            mean, ``M / E``, which is too high if M is a capacity.
        out: Returns memory for the result, ``(M, N)`` contiguous; called right before it is
            written, and not at all where a kernel cannot write there. Nothing may write to it
            afterwards. ``None`` for new memory.
        grad_out: The same for the gradient of ``x``, ``(M, K)``.

    Returns:
        ``(M, N)``, dtype of ``x``.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit, or (on the CPU) if ``m_splits`` has a
            negative entry or more than M rows in all.

    Sync:
        None on a GPU of compute capability 9.0 or 10.0 for bf16 and fp16 with features that are
        multiples of 8: one kernel reads ``m_splits`` on the device and truncates counts that exceed
        the rows. Where such a GPU lacks our kernel, ``torch._grouped_mm`` computes bf16 products,
        also without a sync. Other CUDA cases run one ``torch.mm`` per expert and copy ``m_splits``
        to the host, with a warning for bf16 and fp16.

    Source:
        MegaBlocks, arXiv:2211.15841.

    Example:
        >>> x, w = torch.eye(3), torch.tensor([[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]]])
        >>> grouped_gemm(x, w, torch.tensor([2, 0])).flatten().tolist()
        [1.0, 2.0, 0.0]
    """
    _check(x, w, m_splits, main_grad)
    split = _split(accumulate, w)
    inputs = x, w, m_splits, main_grad, *split, clear_padding, expected_rows
    if out is None and grad_out is None:
        result: Tensor = _grouped_gemm(*inputs)
    else:
        result = _Placed.apply(*inputs, out, grad_out)  # type: ignore[no-untyped-call]
    return result


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Return the float32 gradient buffer of a parameter for :func:`grouped_gemm`, or ``None``.

    Example:
        >>> main_grad_of(torch.nn.Parameter(torch.ones(1))) is None
        True
    """
    main_grad = getattr(weight, "main_grad", None)
    if isinstance(main_grad, Tensor) and main_grad.dtype == torch.float32:
        return main_grad
    return None


def _check(x: Tensor, w: Tensor, m_splits: Tensor, main_grad: Tensor | None) -> None:
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(
            f"x {describe(x)} and w {describe(w)} do not fit; expected (M, K) and (E, N, K)"
        )
    if x.dtype != w.dtype or x.device != w.device or m_splits.device != x.device:
        raise ValueError(
            f"x {describe(x)}, w {describe(w)} and m_splits {describe(m_splits)} must share a "
            "device, and x and w a dtype"
        )
    if m_splits.dtype != torch.int64 or m_splits.shape != w.shape[:1]:
        raise ValueError(f"m_splits {describe(m_splits)} must be ({w.shape[0]},) int64")
    if main_grad is not None and (
        main_grad.dtype != torch.float32
        or main_grad.shape != w.shape
        or main_grad.device != w.device
        or not main_grad.is_contiguous()
    ):
        raise ValueError(
            f"main_grad {describe(main_grad)} must be {tuple(w.shape)} float32 on {w.device}, "
            "contiguous"
        )


def _split(accumulate: bool | Tensor, w: Tensor) -> tuple[bool, Tensor | None]:
    """Split ``accumulate`` into a bool for all experts and an optional mask per expert."""
    if isinstance(accumulate, bool):
        return accumulate, None
    mask = accumulate
    if mask.dtype != torch.bool or mask.shape != w.shape[:1] or mask.device != w.device:
        raise ValueError(
            f"accumulate {describe(mask)} must be a bool, or ({w.shape[0]},) bool on {w.device}"
        )
    return True, mask


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, w, m_splits, main_grad, accumulate, accumulate_mask, *hints = inputs
    # Only the gradient of the weights needs the rows.
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w, m_splits)
    # Not saved by autograd: other backward passes write to it in the meantime.
    ctx.main_grad, ctx.accumulate, ctx.mask = main_grad, accumulate, accumulate_mask
    ctx.clear_padding, ctx.expected_rows = hints
    ctx.grad_out = None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, m_splits = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = grad_w = None
    if ctx.needs_input_grad[0]:
        hints = ctx.clear_padding, ctx.expected_rows
        grad_x = product_into(ctx.grad_out, "input_grad", grad, w, m_splits, *hints)
    if ctx.needs_input_grad[1]:
        add = ctx.main_grad is not None
        if not add and not w.is_cuda and _has_torch_loop(x, w):
            grad_w = torch._grouped_mm(grad.t(), x, offs=m_splits.cumsum(0, dtype=torch.int32))
        elif not add:
            grad_w = torch.empty_like(w, memory_format=torch.contiguous_format)
            hint = ctx.expected_rows
            grouped_product("weight_grad", grad, x, m_splits, out=grad_w, expected_rows=hint)
        else:
            grouped_product(
                "weight_grad",
                grad,
                x,
                m_splits,
                out=ctx.main_grad,
                mask=ctx.mask,
                accumulate=ctx.accumulate,
                expected_rows=ctx.expected_rows,
            )
    return grad_x, grad_w, *(None,) * 6


class _Placed(torch.autograd.Function):
    """`grouped_gemm` that writes its result, and the gradient of ``x``, into given memory."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *inputs, out, grad_out = args
        _setup(ctx, tuple(inputs), inputs[0])
        ctx.grad_out = grad_out
        x, w, m_splits, *_, clear_padding, expected_rows = inputs
        return product_into(out, "forward", x, w, m_splits, clear_padding, expected_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, grad), None, None


def product_into(
    out: Callable[[], Tensor] | None,
    product: Literal["forward", "input_grad"],
    rows: Tensor,
    w: Tensor,
    m_splits: Tensor,
    clear_padding: bool,
    expected_rows: int,
) -> Tensor:
    """Compute a product of rows without gradients; for ``out`` see `grouped_gemm`."""
    return grouped_product(
        product,
        rows,
        w,
        m_splits,
        out=out() if out is not None and _writes_anywhere(product, rows, w) else None,
        clear_padding=clear_padding,
        expected_rows=expected_rows,
    )


def _has_torch_loop(x: Tensor, w: Tensor) -> bool:
    """Return whether torch computes the weight gradients of all experts on the CPU in one call."""
    has_loop = gemm_torch.has_grouped_mm(x, *w.shape)
    return has_loop and not gemm_cpu.goes_to_float32("forward", x, w)


def _writes_anywhere(product: Product, rows: Tensor, w: Tensor) -> bool:
    """Return whether the kernel of a product is our own."""
    if rows.is_cuda:
        return choose_backend(rows, *w.shape) == "native"
    return rows.dtype == torch.float32 or gemm_cpu.goes_to_float32(product, rows, w)


def _forward(
    x: Tensor,
    w: Tensor,
    m_splits: Tensor,
    main_grad: Tensor | None,
    accumulate: bool,
    accumulate_mask: Tensor | None = None,
    clear_padding: bool = True,
    expected_rows: int = 0,
) -> Tensor:
    del main_grad, accumulate, accumulate_mask
    run = product_on_cpu if x.is_cpu else product_on_cuda
    options = None, None, None, False, clear_padding, expected_rows
    return run(x, w, m_splits, PRODUCTS["forward"], *options)


def _forward_fake(
    x: Tensor,
    w: Tensor,
    m_splits: Tensor,
    main_grad: Tensor | None,
    accumulate: bool,
    accumulate_mask: Tensor | None = None,
    clear_padding: bool = True,
    expected_rows: int = 0,
) -> Tensor:
    del m_splits, main_grad, accumulate, accumulate_mask, clear_padding, expected_rows
    return x.new_empty(x.shape[0], w.shape[1])


_grouped_gemm = define_op(
    "grouped_gemm(Tensor x, Tensor w, Tensor m_splits, Tensor? main_grad, bool accumulate,"
    " Tensor? accumulate_mask=None, bool clear_padding=True, SymInt expected_rows=0) -> Tensor",
    cpu=_forward,
    cuda=_forward,
    fake=_forward_fake,
)
define_gradient(_grouped_gemm, _backward, _setup)
