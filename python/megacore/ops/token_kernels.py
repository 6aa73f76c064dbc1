"""CUDA kernels on tokens as functions of tensors: the ``cuda=`` implementations of operations.

Every function has the signature and results of its reference, without host sync: results are
allocated by torch and filled on the current stream. Arguments are checked by the caller.
:func:`kernel_or` falls back to the reference if a kernel is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacore.ops.cuda_module import cuda_kernels, has_cuda_kernels

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def kernel_or(
    reference: Callable[..., Any], kernel: Callable[..., Any], takes: Callable[..., bool]
) -> Callable[..., Any]:
    """Return a function that calls ``kernel`` if it is installed and takes the arguments."""

    def run(*args: Any) -> Any:
        chosen = kernel if has_cuda_kernels() and takes(*args) else reference
        return chosen(*args)

    return run


def dtype_name(tensor: Tensor) -> str | None:
    """Return the kernels' name of the dtype; ``None`` for one that they do not support."""
    return _DTYPES.get(tensor.dtype)


def takes_float(tensor: Tensor, *args: Any) -> bool:
    """Return whether the kernels support the dtype of the first argument."""
    del args
    return tensor.dtype in _DTYPES


def takes_experts(expert_of: Tensor, num_experts: int) -> bool:
    """Return whether the kernel supports the sizes of the sort."""
    limit: int = cuda_kernels().MAX_SORTED_EXPERTS
    return 1 <= num_experts <= limit and expert_of.numel() < 2**31


def takes_scores(scores: Tensor, k: int) -> bool:
    """Return whether the kernel supports this dtype, k and number of columns."""
    limit: int = cuda_kernels().MAX_TOP_K_COLUMNS
    return scores.dtype in _DTYPES and k <= scores.shape[1] <= limit


def sort_by_expert(expert_of: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort copies by expert, then by position; ids out of range count as missing copies."""
    expert_of = expert_of.contiguous()
    row_map, counts = torch.empty_like(expert_of), expert_of.new_empty(num_experts)
    size = cuda_kernels().sort_workspace_numel(numel=expert_of.numel(), num_experts=num_experts)
    workspace = expert_of.new_empty(size, dtype=torch.int32)
    launch(
        "sort_by_expert",
        expert_of,
        expert_of=expert_of.data_ptr(),
        numel=expert_of.numel(),
        num_experts=num_experts,
        row_map=row_map.data_ptr(),
        tokens_per_expert=counts.data_ptr(),
        workspace=workspace.data_ptr(),
    )
    return row_map, counts


def permute(tokens: Tensor, row_map: Tensor, num_rows: int, weights: Tensor | None) -> Tensor:
    """Copy tokens to their rows and zero the others; rows out of range count as missing copies."""
    tokens, row_map = tokens.contiguous(), row_map.contiguous()
    weights = None if weights is None else weights.float().contiguous()
    rows = tokens.new_empty(num_rows, tokens.shape[1])
    is_written = tokens.new_empty(num_rows, dtype=torch.uint8)
    launch(
        "permute",
        tokens,
        tokens=tokens.data_ptr(),
        weights=pointer(weights),
        rows=rows.data_ptr(),
        is_written=is_written.data_ptr(),
        **_map_arguments(row_map, rows),
    )
    return rows


def unpermute(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the rows of each token in the order of its choices."""
    rows, row_map = rows.contiguous(), row_map.contiguous()
    weights = None if weights is None else weights.float().contiguous()
    tokens = rows.new_empty(row_map.shape[0], rows.shape[1])
    launch(
        "unpermute",
        rows,
        rows=rows.data_ptr(),
        weights=pointer(weights),
        tokens=tokens.data_ptr(),
        **_map_arguments(row_map, rows),
    )
    return tokens


def row_dots(tokens: Tensor, rows: Tensor, row_map: Tensor) -> Tensor:
    """Compute dot products of tokens with their rows, in fp32."""
    tokens, rows, row_map = tokens.contiguous(), rows.contiguous(), row_map.contiguous()
    dots = rows.new_empty(row_map.shape, dtype=torch.float32)
    launch(
        "row_dots",
        rows,
        tokens=tokens.data_ptr(),
        rows=rows.data_ptr(),
        dots=dots.data_ptr(),
        **_map_arguments(row_map, rows),
    )
    return dots


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the columns of the largest scores; widening preserves their order."""
    scores = scores.float().contiguous()
    chosen = scores.new_empty(scores.shape[0], k, dtype=torch.int64)
    launch(
        "top_k",
        scores,
        scores=scores.data_ptr(),
        rows=scores.shape[0],
        columns=scores.shape[1],
        k=k,
        chosen=chosen.data_ptr(),
    )
    return chosen


def swiglu(x: Tensor, probs: Tensor | None, num_rows: Tensor | None = None) -> Tensor:
    """Compute ``probs * silu(gate) * up``."""
    return _activate("swiglu", x, probs, num_rows, x.shape[1] // 2)


def gelu(x: Tensor, probs: Tensor | None, num_rows: Tensor | None = None) -> Tensor:
    """Return the tanh form of GELU, times ``probs``."""
    return _activate("gelu", x, probs, num_rows, x.shape[1])


def swiglu_backward(
    grad: Tensor, x: Tensor, probs: Tensor | None, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute gradients of :func:`swiglu` for ``x`` and ``probs`` (empty without)."""
    return _activate_backward("swiglu_backward", grad, x, probs, num_rows)


def gelu_backward(
    grad: Tensor, x: Tensor, probs: Tensor | None, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute gradients of :func:`gelu` for ``x`` and ``probs`` (empty without)."""
    return _activate_backward("gelu_backward", grad, x, probs, num_rows)


def sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of the squares of all elements in fp64, a 0-d tensor on the device."""
    total = values.new_empty((), dtype=torch.float64)
    partial_sums = values.new_empty(cuda_kernels().SUM_BLOCKS, dtype=torch.float64)
    launch(
        "sum_of_squares",
        values,
        values=values.data_ptr(),
        numel=values.numel(),
        dtype=_DTYPES[values.dtype],
        partial_sums=partial_sums.data_ptr(),
        total=total.data_ptr(),
    )
    return total


def _activate(
    name: str, x: Tensor, probs: Tensor | None, num_rows: Tensor | None, width: int
) -> Tensor:
    x = x.contiguous()
    probs = None if probs is None else probs.float().contiguous()
    y = x.new_empty(x.shape[0], width)
    launch(
        name,
        x,
        x=x.data_ptr(),
        probs=pointer(probs),
        y=y.data_ptr(),
        num_rows=pointer(num_rows),
        rows=x.shape[0],
        width=width,
        dtype=_DTYPES[x.dtype],
    )
    return y


def _activate_backward(
    name: str, grad: Tensor, x: Tensor, probs: Tensor | None, num_rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    grad, x = grad.contiguous(), x.contiguous()
    wide = None if probs is None else probs.float().contiguous()
    grad_x = torch.empty_like(x)
    grad_probs = grad.new_empty(0 if wide is None else wide.shape[0], dtype=torch.float32)
    launch(
        name,
        x,
        grad_y=grad.data_ptr(),
        x=x.data_ptr(),
        probs=pointer(wide),
        grad_x=grad_x.data_ptr(),
        grad_probs=grad_probs.data_ptr(),
        num_rows=pointer(num_rows),
        rows=grad.shape[0],
        width=grad.shape[1],
        dtype=_DTYPES[x.dtype],
    )
    return grad_x, grad_probs if probs is None else grad_probs.to(probs.dtype)


def _map_arguments(row_map: Tensor, rows: Tensor) -> dict[str, Any]:
    num_tokens, num_choices = row_map.shape
    return {
        "row_map": row_map.data_ptr(),
        "num_tokens": num_tokens,
        "num_choices": num_choices,
        "num_rows": rows.shape[0],
        "width": rows.shape[1],
        "dtype": _DTYPES[rows.dtype],
    }


def pointer(tensor: Tensor | None) -> int:
    """Return the address of a tensor; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def launch(name: str, on: Tensor, **arguments: Any) -> None:
    """Launch a kernel on the current stream of the device of ``on``."""
    with torch.cuda.device(on.device):
        stream = torch.cuda.current_stream().cuda_stream
        getattr(cuda_kernels(), name)(**arguments, stream=stream)
