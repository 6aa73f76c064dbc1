"""Top-k experts of each token, with the same tie-break on every rank and device.

Shapes: T tokens, E experts, k choices per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacore.ops.cuda_module import cuda_kernels
from megacore.ops.register import define_compiled, describe


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the columns of the ``k`` largest scores of each row; ties go to the lower column.

    Columns are in descending order of score. ``torch.topk`` leaves ties unspecified. A fixed rule
    makes every rank, device and layout choose the same experts. A NaN counts as larger than any
    number, as in torch.

    Args:
        scores: ``(T, E)``, any float dtype.
        k: Choices per row, in ``[1, E]``.

    Returns:
        ``(T, k)``, int64.

    Raises:
        ValueError: If ``scores`` is not a matrix or ``k`` is out of range.

    Sync:
        None.

    Example:
        >>> top_k(torch.tensor([[1.0, 3.0, 3.0]]), 2).tolist()
        [[1, 2]]
    """
    if scores.dim() != 2:
        raise ValueError(f"scores {describe(scores)} must be (T, E)")
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(
            f"k is {k}; with {scores.shape[1]} columns it must lie in [1, {scores.shape[1]}]"
        )
    result: Tensor = _top_k(scores, k)
    return result


def top_k_reference(scores: Tensor, k: int) -> Tensor:
    """Compute :func:`top_k` with a stable sort, on any device."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[:, :k].contiguous()


def _fits_kernel(scores: Tensor, k: int) -> bool:
    limit: int = cuda_kernels().MAX_TOP_K_COLUMNS
    return k <= scores.shape[1] <= limit


def _top_k_fake(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty(scores.shape[0], k, dtype=torch.int64)


_top_k = define_compiled(
    "top_k(Tensor scores, SymInt k) -> Tensor",
    reference=top_k_reference,
    cuda_fits=_fits_kernel,
    fake=_top_k_fake,
)
