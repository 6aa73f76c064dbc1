"""Description of a parameter, without torch: global name, full shape, and how ranks split it.

A parameter may be split along two dimensions: ``tp_dim`` over tensor-parallel ranks (the etp axis
for experts) and ``ep_dim`` over expert-parallel ranks. The parts are boxes of the full tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """The matrices of a parameter, for optimizers of whole matrices.

    The first ``batch_dims`` dimensions number separate matrices. Of the others, the last one is
    the columns, and those before are the rows, flattened.

    Attributes:
        batch_dims: Number of dimensions that number separate matrices.
        sections: Sizes of several matrices that the dimension before the last one holds one after
            the other, for each index of the dimensions between; empty for one matrix.

    Example:
        >>> gate_up = Matrices(batch_dims=1)
        >>> list(gate_up.shapes((2, 16, 8)))
        [(16, 8), (16, 8)]
        >>> queries_keys_values = Matrices(sections=(8, 4, 4))  # of each of two groups of heads
        >>> list(queries_keys_values.shapes((2, 16, 6)))
        [(16, 6), (8, 6), (8, 6)]
    """

    batch_dims: int = 0
    sections: tuple[int, ...] = ()

    def shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Yield rows and columns of every matrix of a parameter of this shape, in order."""
        outer = math.prod(shape[self.batch_dims : -2])
        for _ in range(math.prod(shape[: self.batch_dims])):
            for rows in self.sections or (shape[-2],):
                yield outer * rows, shape[-1]


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """Description of a model parameter, independent of rank and layout.

    Buffers, the optimizer and checkpoints identify parameters by this value only.

    Attributes:
        name: Global name, the same for every layout, e.g. ``"layers.3.attention.qkv"``.
        full_shape: Shape of the whole parameter.
        tp_dim: Dimension that tensor parallelism splits (etp for experts); ``None`` for a parameter
            that is replicated over tp.
        sequence_parallel: The parameter is replicated over tp, but each tp rank had only part of
            the activations (mostly a slice of the sequence), so its gradient is partial and must
            be summed over tp. Routers and norms of heads are so without sequence parallelism too.
        weight_decay: Whether weight decay applies (to matrices, not to norm weights).
        shared: Name of a set of parameters that must stay equal across pipeline stages;
            ``"embedding"`` for tied word embeddings and those of multi-token prediction. Their
            gradients are summed.
        is_shared_copy: Whether this is a further copy of a shared parameter, which is excluded
            from norms and checkpoints.
        expert: Whether it belongs to an expert, and thus to the expert view of the topology.
        ep_dim: Dimension of experts, split by expert parallelism; for expert parameters only.
        matrices: The matrices that it consists of, for optimizers such as Muon; ``None`` for a
            parameter that is no matrix of a linear map, such as an embedding or a bias.
        wide: Whether it is float32 at least, also in a model of 16-bit parameters.

    Raises:
        ValueError: If ``tp_dim`` or ``ep_dim`` is not a dimension of ``full_shape``, flags
            contradict each other, or ``matrices`` do not fit the shape.

    Example:
        >>> ParamInfo(name="layers.0.mlp.gate_up", full_shape=(2, 8, 4), tp_dim=1).local_shape(2)
        (2, 4, 4)
        >>> experts = ParamInfo(name="layers.0.moe.experts.fc2", full_shape=(8, 16, 32), tp_dim=2,
        ...                     ep_dim=0, expert=True)
        >>> experts.local_shape(2, ep_size=4)
        (2, 16, 16)
    """

    name: str
    full_shape: tuple[int, ...]
    tp_dim: int | None
    sequence_parallel: bool = False
    weight_decay: bool = True
    shared: str | None = None
    is_shared_copy: bool = False
    expert: bool = False
    ep_dim: int | None = None
    matrices: Matrices | None = None
    wide: bool = False

    def __post_init__(self) -> None:
        for axis, dim in (("tp", self.tp_dim), ("ep", self.ep_dim)):
            if dim is not None and not 0 <= dim < len(self.full_shape):
                raise ValueError(
                    f"{self.name}: {axis}_dim={dim} is not a dimension of {self.full_shape}; "
                    f"use 0 to {len(self.full_shape) - 1}, or None for a replicated parameter"
                )
        if self.ep_dim is not None and (not self.expert or self.ep_dim == self.tp_dim):
            raise ValueError(
                f"{self.name}: ep_dim={self.ep_dim} is for experts (expert=True) and differs from "
                f"tp_dim={self.tp_dim}"
            )
        if self.sequence_parallel and self.tp_dim is not None:
            raise ValueError(
                f"{self.name}: sequence_parallel is for parameters replicated over tp "
                f"(tp_dim=None), but tp_dim={self.tp_dim}"
            )
        if self.is_shared_copy and self.shared is None:
            raise ValueError(f"{self.name}: is_shared_copy needs the name of the shared set")
        if self.matrices is not None:
            self._check_matrices(self.matrices)

    def _check_matrices(self, matrices: Matrices) -> None:
        num_dims, sections = len(self.full_shape), matrices.sections
        if not 0 <= matrices.batch_dims <= num_dims - 2:
            raise ValueError(
                f"{self.name}: batch_dims={matrices.batch_dims} leaves no matrix of "
                f"{self.full_shape}; use 0 to {num_dims - 2}"
            )
        if sections and (min(sections) < 1 or sum(sections) != self.full_shape[-2]):
            raise ValueError(
                f"{self.name}: sections {sections} must be positive and have the sum "
                f"{self.full_shape[-2]}, the dimension before the last one of {self.full_shape}"
            )
        if len(sections) > 1 and self.tp_dim == num_dims - 2:
            raise ValueError(
                f"{self.name}: tp_dim={self.tp_dim} splits the sections {sections}; put a "
                "dimension that tp splits before them, as the groups of heads of (groups, rows, "
                "columns)"
            )

    def local_shape(self, tp_size: int, *, ep_size: int = 1) -> tuple[int, ...]:
        """Return the shape of the shard on one of ``tp_size`` x ``ep_size`` ranks.

        Raises:
            ValueError: If a size does not divide the dimension it splits.
        """
        local = list(self.full_shape)
        for axis, dim, size in (("tp", self.tp_dim, tp_size), ("ep", self.ep_dim, ep_size)):
            if dim is None:
                continue
            if size < 1 or local[dim] % size != 0:
                raise ValueError(
                    f"{self.name}: {axis}={size} does not divide dimension {dim} of "
                    f"{self.full_shape}; legal values are the divisors of {local[dim]}"
                )
            local[dim] //= size
        return tuple(local)
