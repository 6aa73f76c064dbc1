"""Newton-Schulz iterations: they keep singular vectors and move singular values near to 1.

Tensor-parallel ranks that have rows or columns of matrices compute the result of the whole ones:
where they cut the longer dimension, they sum the small Gram matrix in each iteration; where they
cut the shorter one, they gather it. Shapes: S short and L long dimension of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.ops.optim import sum_of_squares
from megacore.optim.matrix_plan import Cut
from megacore.parallel.collectives import all_gather, all_reduce_
from megacore.parallel.process_groups import Group

# a, b and c of X <- a X + (b A + c A A) X with A = X X^T, for one iteration.
Coefficients = tuple[float, float, float]

# A zero matrix stays zero.
_SMALLEST_NORM = 1e-15
# Rows of the smallest product of which equal blocks are computed once: smaller ones gain nothing.
_LEAST_HALVED = 256


@dataclass(frozen=True, kw_only=True)
class CutMatrix:
    """A matrix of which a rank has some rows or columns, or all.

    Attributes:
        values: The part of this rank, 2-D, fp32.
        rows: Rows of the whole matrix.
        columns: Columns of the whole matrix.
        cut: What of it tensor-parallel ranks share; ``None``: each has the whole matrix.
    """

    values: Tensor
    rows: int
    columns: int
    cut: Cut | None

    @property
    def needs_gather(self) -> bool:
        """True if the cut dimension is the shorter one."""
        short = "rows" if self.rows < self.columns else "columns"
        return self.cut == short and self.rows != self.columns


def orthogonalize(
    matrices: Sequence[CutMatrix],
    iterations: Sequence[Coefficients],
    *,
    group: Group,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Move the singular values of matrices near to 1, after a division by their Frobenius norm.

    Args:
        matrices: The matrices, the same list on every rank of ``group``.
        iterations: Coefficients of each iteration.
        group: Ranks that share the matrices that are cut.
        dtype: Number format of the products: float32 or bfloat16.

    Returns:
        The part of this rank of each result, in the shape of its values, fp32.

    Sync:
        Collective over ``group`` if a matrix is cut. None on CUDA.

    Source:
        Jordan et al., Muon, 2024; the sums of Gram matrices as in NVIDIA's Emerging-Optimizers.

    Example:
        >>> values = torch.diag(torch.tensor([3.0, 0.5]))
        >>> whole = CutMatrix(values=values, rows=2, columns=2, cut=None)
        >>> [out] = orthogonalize([whole], [(1.875, -1.25, 0.375)] * 9, group=Group.solo())
        >>> [round(x, 4) for x in out.diag().tolist()]
        [1.0, 1.0]
    """
    gathered = _gather([m for m in matrices if m.needs_gather], group)
    works = [gathered.pop(0) if m.needs_gather else _Work.of(m) for m in matrices]
    shared = [work for work in works if work.is_cut]
    alone = [work for work in works if not work.is_cut]
    _iterate(shared, iterations, dtype, group)
    for work in alone:  # one after the other, so that little memory is in use
        _iterate([work], iterations, dtype, None)
    return [work.result(matrix, group) for work, matrix in zip(works, matrices, strict=True)]


@dataclass(kw_only=True)
class _Work:
    """A matrix in the computation: ``(S, L)``, or ``(L, S)`` if it is tall.

    Attributes:
        x: Values, fp32 at first, then in the number format of the products.
        is_tall: Whether the long dimension is the first one.
        is_cut: Whether the ranks of a group have parts of the long dimension.
    """

    x: Tensor
    is_tall: bool
    is_cut: bool

    @classmethod
    def of(cls, matrix: CutMatrix) -> _Work:
        """Take a matrix as it is; of a square one, the cut dimension becomes the long one."""
        rows, columns = matrix.rows, matrix.columns
        is_tall = rows > columns or (rows == columns and matrix.cut == "rows")
        return cls(x=matrix.values, is_tall=is_tall, is_cut=matrix.cut is not None)

    @property
    def x_SL(self) -> Tensor:
        """The matrix, or its transposed view."""
        return self.x.t() if self.is_tall else self.x

    def result(self, matrix: CutMatrix, group: Group) -> Tensor:
        """Return this rank's part of the result in the orientation of the matrix, fp32."""
        x = self.x
        if matrix.needs_gather:
            size = matrix.values.shape[0 if matrix.cut == "rows" else 1]
            x = x.narrow(0, group.position * size, size)
            x = x if matrix.cut == "rows" else x.t()
        return x.float()


def _gather(matrices: Sequence[CutMatrix], group: Group) -> list[_Work]:
    """Gather the whole matrices of which ranks have parts of the shorter dimension."""
    if not matrices:
        return []
    # The cut dimension first: parts of it are consecutive in the whole.
    parts = [m.values if m.cut == "rows" else m.values.t() for m in matrices]
    flat = torch.cat([part.reshape(-1) for part in parts])
    whole = flat.new_empty(group.size * flat.numel())
    all_gather(whole, flat, group)
    pieces = torch.split(whole.view(group.size, -1), [part.numel() for part in parts], dim=1)
    return [
        _Work(x=piece.reshape(-1, part.shape[1]), is_tall=False, is_cut=False)
        for part, piece in zip(parts, pieces, strict=True)
    ]


def _iterate(
    works: Sequence[_Work],
    iterations: Sequence[Coefficients],
    dtype: torch.dtype,
    group: Group | None,
) -> None:
    """Run all iterations on some matrices side by side; with a group, sum over its ranks."""
    if not works:
        return
    # In fp64, in an order that depends on the size only.
    squares = torch.stack([sum_of_squares(work.x.contiguous()) for work in works])
    if group is not None:
        all_reduce_(squares, group)
    norms = squares.sqrt_().clamp_(min=_SMALLEST_NORM).float()
    for work, norm in zip(works, norms, strict=True):
        work.x = (work.x / norm).to(dtype).contiguous()
    # New memory for each product would cost page faults on the CPU.
    spares = [torch.empty_like(work.x) for work in works]
    grams = [work.x.new_empty(2 * work.x_SL.shape[:1]) for work in works]
    updates = [torch.empty_like(gram_SS) for gram_SS in grams]
    for a, b, c in iterations:
        for work, gram_SS in zip(works, grams, strict=True):
            _times_transposed(work.x_SL, out=gram_SS)
        if group is not None:
            _sum_over(grams, group)
        for number, (work, gram_SS, update_SS) in enumerate(
            zip(works, grams, updates, strict=True)
        ):
            _times_transposed(gram_SS, out=update_SS, plus=gram_SS, beta=b, alpha=c)
            factors = (work.x, update_SS) if work.is_tall else (update_SS, work.x)
            if dtype == torch.float32:  # a product without a sum, which would copy X first
                update_SS.diagonal().add_(a)
                torch.mm(*factors, out=spares[number])
            else:
                torch.addmm(work.x, *factors, beta=a, out=spares[number])
            work.x, spares[number] = spares[number], work.x


def _times_transposed(
    a_SL: Tensor,
    *,
    out: Tensor,
    plus: Tensor | None = None,
    beta: float = 0.0,
    alpha: float = 1.0,
) -> None:
    """Compute ``beta * plus + alpha * A A^T`` for a symmetric ``plus``, ``(S, S)``.

    On CPUs, of large matrices only one of the two equal blocks beside the diagonal is computed.
    """
    size = a_SL.shape[0]
    if a_SL.is_cuda or size < _LEAST_HALVED:
        if plus is None:
            torch.mm(a_SL, a_SL.t(), out=out)
        else:
            torch.addmm(plus, a_SL, a_SL.t(), beta=beta, alpha=alpha, out=out)
        return
    upper, lower = slice(0, size // 2), slice(size // 2, size)
    for rows in (upper, lower):
        block = None if plus is None else plus[rows, rows]
        _times_transposed(a_SL[rows], out=out[rows, rows], plus=block, beta=beta, alpha=alpha)
    beside = out[upper, lower]
    if plus is None:
        torch.mm(a_SL[upper], a_SL[lower].t(), out=beside)
    else:
        torch.addmm(
            plus[upper, lower], a_SL[upper], a_SL[lower].t(), beta=beta, alpha=alpha, out=beside
        )
    out[lower, upper].copy_(beside.t())


def _sum_over(grams: Sequence[Tensor], group: Group) -> None:
    """Sum matrices over a group in place, all in one collective, in fp32."""
    flat = torch.cat([gram.float().reshape(-1) for gram in grams])
    all_reduce_(flat, group)
    parts = torch.split(flat, [gram.numel() for gram in grams])
    for gram, part in zip(grams, parts, strict=True):
        gram.copy_(part.view_as(gram))
