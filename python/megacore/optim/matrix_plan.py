"""Whole matrices of a buffer's parameters, and the data-parallel rank that computes with each.

A parameter consists of *units*: consecutive elements that hold one matrix or, of a fused parameter
such as queries, keys and values, several. Every rank computes the same owners. Without torch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megacore.parallel.param_info import Matrices, ParamInfo

# Dimension of a matrix that tensor parallelism cuts.
Cut = Literal["rows", "columns"]
# Elements of a round on an owner, unless one unit has more.
_ROUND_NUMEL = 1 << 24


@dataclass(frozen=True, kw_only=True)
class MatrixUnit:
    """Consecutive elements of a parameter on a tensor-parallel rank that hold whole matrices.

    Attributes:
        param: Index of the parameter.
        start: First element in the flattened parameter.
        shape: Shape of the elements, without the dimensions that number separate matrices.
        matrices: Rows and columns of each whole matrix, not cut by tensor parallelism.
        sections: Sizes of the matrices in the dimension before the last one of ``shape``.
        cut: Dimension of the matrices that tensor parallelism cuts; ``None`` if they are whole.
    """

    param: int
    start: int
    shape: tuple[int, ...]
    matrices: tuple[tuple[int, int], ...]
    sections: tuple[int, ...]
    cut: Cut | None

    @property
    def numel(self) -> int:
        """Number of elements on this rank."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.numel


def units_of(param: int, info: ParamInfo, *, tp_size: int, ep_size: int = 1) -> list[MatrixUnit]:
    """List the units of a parameter.

    Args:
        param: Index of the parameter.
        info: A parameter with ``matrices``.
        tp_size: Ranks that split ``info.tp_dim``: etp for experts.
        ep_size: Ranks that split ``info.ep_dim``.

    Example:
        >>> gate_up = ParamInfo(name="up", full_shape=(2, 8, 4), tp_dim=1,
        ...                     matrices=Matrices(batch_dims=1))
        >>> units = units_of(0, gate_up, tp_size=2)
        >>> [(unit.start, unit.shape, unit.matrices, unit.cut) for unit in units]
        [(0, (4, 4), ((8, 4),), 'rows'), (16, (4, 4), ((8, 4),), 'rows')]
    """
    matrices = info.matrices
    assert matrices is not None
    local = info.local_shape(tp_size, ep_size=ep_size)
    first = matrices.batch_dims
    shape, whole = local[first:], info.full_shape[first:]
    cut: Cut | None = None
    if info.tp_dim is not None and info.tp_dim >= first and tp_size > 1:
        cut = "columns" if info.tp_dim == len(local) - 1 else "rows"
    inner = Matrices(sections=matrices.sections)
    return [
        MatrixUnit(
            param=param,
            start=number * math.prod(shape),
            shape=shape,
            matrices=tuple(inner.shapes(whole)),
            sections=matrices.sections or (shape[-2],),
            cut=cut,
        )
        for number in range(math.prod(local[:first]))
    ]


def unit_cost(unit: MatrixUnit, cost: Callable[[int, int], float], tp_size: int) -> float:
    """Return the work of a unit on one tensor-parallel rank.

    Ranks share a matrix of which they cut the longer dimension; of others each computes the whole.
    """
    total = 0.0
    for rows, columns in unit.matrices:
        is_shared = unit.cut is not None and (
            rows == columns or (unit.cut == "rows") == (rows > columns)
        )
        total += cost(rows, columns) / (tp_size if is_shared else 1)
    return total


def pack(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Assign work to ranks so that the largest sum is small: each next largest to the least loaded.

    Returns:
        The rank of each cost. Equal on every rank for equal arguments.

    Example:
        >>> pack([3.0, 2.0, 2.0, 1.0], 2)
        [0, 1, 1, 0]
    """
    owners = [0] * len(costs)
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + costs[index], rank))
    return owners


def rounds_by_owner(
    units: Sequence[MatrixUnit], costs: Sequence[float], num_ranks: int
) -> list[list[list[MatrixUnit]]]:
    """Give units to ranks with equal work, and cut those of each into rounds of limited size.

    Args:
        units: The units of a buffer.
        costs: Their work, see :func:`unit_cost`.
        num_ranks: Data-parallel ranks that share the buffer.

    Returns:
        Units of each round of each rank; ranks may have fewer rounds than others. Equal on every
        rank for equal arguments.
    """
    by_owner: list[list[MatrixUnit]] = [[] for _ in range(num_ranks)]
    owners = pack(costs, num_ranks)
    for index in sorted(range(len(units)), key=lambda index: (-costs[index], index)):
        by_owner[owners[index]].append(units[index])
    return [_cut_into_rounds(mine) for mine in by_owner]


def _cut_into_rounds(units: Sequence[MatrixUnit]) -> list[list[MatrixUnit]]:
    rounds: list[list[MatrixUnit]] = []
    numel = 0
    for unit in units:
        if not rounds or numel + unit.numel > _ROUND_NUMEL:
            rounds.append([])
            numel = 0
        rounds[-1].append(unit)
        numel += unit.numel
    return rounds
