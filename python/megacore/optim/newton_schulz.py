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

from megacore.optim.matrix_plan import Cut
from megacore.parallel.collectives import all_gather, all_reduce_
from megacore.parallel.process_groups import Group

# a, b and c of X <- a X + (b A + c A A) X with A = X X^T, for one iteration.
Coefficients = tuple[float, float, float]

# A zero matrix stays zero.
_SMALLEST_NORM = 1e-15


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
    """A matrix in the computation: short dimension first, ``(S, L)``."""

    x_SL: Tensor
    is_transposed: bool
    is_cut: bool

    @classmethod
    def of(cls, matrix: CutMatrix) -> _Work:
        """Orient a matrix; of a square one, the cut dimension becomes the long one."""
        rows, columns = matrix.rows, matrix.columns
        turns = rows > columns or (rows == columns and matrix.cut == "rows")
        values = matrix.values.t() if turns else matrix.values
        return cls(x_SL=values, is_transposed=turns, is_cut=matrix.cut is not None)

    def result(self, matrix: CutMatrix, group: Group) -> Tensor:
        """Return this rank's part of the result in the orientation of the matrix, fp32."""
        x = self.x_SL.t() if self.is_transposed else self.x_SL
        if matrix.needs_gather:
            dim = 0 if matrix.cut == "rows" else 1
            size = matrix.values.shape[dim]
            x = x.narrow(dim, group.position * size, size)
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
    works = []
    for matrix, part, piece in zip(matrices, parts, pieces, strict=True):
        rows = piece.reshape(-1, part.shape[1])
        x_SL = rows  # the cut dimension is the short one
        works.append(_Work(x_SL=x_SL, is_transposed=matrix.cut == "columns", is_cut=False))
    return works


def _iterate(
    works: Sequence[_Work],
    iterations: Sequence[Coefficients],
    dtype: torch.dtype,
    group: Group | None,
) -> None:
    """Run all iterations on some matrices side by side; with a group, sum over its ranks."""
    if not works:
        return
    squares = torch.stack([work.x_SL.square().sum() for work in works])
    if group is not None:
        all_reduce_(squares, group)
    norms = squares.sqrt_().clamp_(min=_SMALLEST_NORM)
    for work, norm in zip(works, norms, strict=True):
        work.x_SL = (work.x_SL / norm).to(dtype).contiguous()
    # New memory for each product would cost page faults on the CPU.
    spares = [torch.empty_like(work.x_SL) for work in works]
    grams = [work.x_SL.new_empty(work.x_SL.shape[0], work.x_SL.shape[0]) for work in works]
    updates = [torch.empty_like(gram_SS) for gram_SS in grams]
    for a, b, c in iterations:
        for work, gram_SS in zip(works, grams, strict=True):
            torch.mm(work.x_SL, work.x_SL.t(), out=gram_SS)
        if group is not None:
            _sum_over(grams, group)
        for number, (work, gram_SS, update_SS) in enumerate(
            zip(works, grams, updates, strict=True)
        ):
            torch.addmm(gram_SS, gram_SS, gram_SS, beta=b, alpha=c, out=update_SS)
            torch.addmm(work.x_SL, update_SS, work.x_SL, beta=a, out=spares[number])
            work.x_SL, spares[number] = spares[number], work.x_SL


def _sum_over(grams: Sequence[Tensor], group: Group) -> None:
    """Sum matrices over a group in place, all in one collective, in fp32."""
    flat = torch.cat([gram.float().reshape(-1) for gram in grams])
    all_reduce_(flat, group)
    parts = torch.split(flat, [gram.numel() for gram in grams])
    for gram, part in zip(grams, parts, strict=True):
        gram.copy_(part.view_as(gram))
