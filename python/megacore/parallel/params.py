"""What a parameter is called, its full size, and which part of it a tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """Describes one model parameter without naming a rank or a layout.

    The buffers, the optimizer and the checkpoint know parameters only through this value.

    Attributes:
        name: Global name, the same for every layout, e.g. ``"layers.3.attention.qkv"``.
        full_shape: Shape of the whole parameter.
        tp_dim: Dimension that tensor parallelism splits; ``None`` if every tp rank holds it all.
        sequence_parallel: The parameter is replicated over tp, but each tp rank saw only its
            slice of the sequence, so its gradient is a part that must be summed over tp.
        weight_decay: Whether the optimizer decays it (matrices yes, norm weights no).
        shared: Name of a set of parameters that must stay equal across pipeline stages;
            ``"embedding"`` for tied word embeddings that live on the first and on the last stage.
            Their gradients are summed.
        is_shared_copy: This is the second holder of a shared parameter: left out of norms and
            checkpoints.
        expert: Belongs to an expert, hence to the expert view of the topology.

    Raises:
        ValueError: If ``tp_dim`` is no dimension of ``full_shape``, or flags contradict each other.

    Example:
        >>> ParamInfo(name="layers.0.mlp.gate_up", full_shape=(2, 8, 4), tp_dim=1).local_shape(2)
        (2, 4, 4)
    """

    name: str
    full_shape: tuple[int, ...]
    tp_dim: int | None
    sequence_parallel: bool = False
    weight_decay: bool = True
    shared: str | None = None
    is_shared_copy: bool = False
    expert: bool = False

    def __post_init__(self) -> None:
        if self.tp_dim is not None and not 0 <= self.tp_dim < len(self.full_shape):
            raise ValueError(
                f"{self.name}: tp_dim={self.tp_dim} is no dimension of {self.full_shape}; "
                f"use 0 to {len(self.full_shape) - 1}, or None for a replicated parameter"
            )
        if self.sequence_parallel and self.tp_dim is not None:
            raise ValueError(
                f"{self.name}: sequence_parallel is for parameters replicated over tp "
                f"(tp_dim=None), but tp_dim={self.tp_dim}"
            )
        if self.is_shared_copy and self.shared is None:
            raise ValueError(f"{self.name}: is_shared_copy needs the name of the shared set")

    def local_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape that one of ``tp_size`` tensor-parallel ranks holds.

        Raises:
            ValueError: If ``tp_size`` does not divide the split dimension.
        """
        if self.tp_dim is None:
            return self.full_shape
        size = self.full_shape[self.tp_dim]
        if tp_size < 1 or size % tp_size != 0:
            raise ValueError(
                f"{self.name}: tp={tp_size} does not divide dimension {self.tp_dim} of "
                f"{self.full_shape}; legal values are the divisors of {size}"
            )
        local = list(self.full_shape)
        local[self.tp_dim] = size // tp_size
        return tuple(local)


def shard(full: Tensor, info: ParamInfo, *, tp_position: int, tp_size: int) -> Tensor:
    """Copy out the part of a full parameter that one tensor-parallel rank holds.

    Args:
        full: The whole parameter, shape ``info.full_shape``, any dtype.
        info: Which parameter it is.
        tp_position: Position on the tp axis, in ``[0, tp_size)``.
        tp_size: Number of tensor-parallel ranks.

    Returns:
        A contiguous copy of shape ``info.local_shape(tp_size)``; all of a replicated parameter.

    Raises:
        ValueError: If shape, size or position do not fit.

    Example:
        >>> info = ParamInfo(name="w", full_shape=(4, 2), tp_dim=0)
        >>> shard(torch.arange(8).view(4, 2), info, tp_position=1, tp_size=2).tolist()
        [[4, 5], [6, 7]]
    """
    local_shape = info.local_shape(tp_size)
    if tuple(full.shape) != info.full_shape:
        raise ValueError(f"{info.name}: got shape {tuple(full.shape)}, expected {info.full_shape}")
    if not 0 <= tp_position < tp_size:
        raise ValueError(f"{info.name}: tp_position={tp_position} is not in [0, {tp_size})")
    part = full
    if info.tp_dim is not None:
        length = local_shape[info.tp_dim]
        part = full.narrow(info.tp_dim, tp_position * length, length)
    return part.clone(memory_format=torch.contiguous_format)


def unshard(shards: Sequence[Tensor], info: ParamInfo) -> Tensor:
    """Join the parts of all tensor-parallel ranks: the inverse of :func:`shard`.

    Args:
        shards: One tensor per tp rank, by tp position, each ``info.local_shape(len(shards))``.
        info: Which parameter it is.

    Returns:
        The full parameter, a new tensor; for a replicated parameter a copy of the first shard.

    Raises:
        ValueError: If a shard has another shape.

    Example:
        >>> info = ParamInfo(name="w", full_shape=(2, 4), tp_dim=1)
        >>> full = torch.arange(8).view(2, 4)
        >>> parts = [shard(full, info, tp_position=t, tp_size=2) for t in range(2)]
        >>> torch.equal(unshard(parts, info), full)
        True
    """
    if not shards:
        raise ValueError(f"{info.name}: no shards to join")
    local_shape = info.local_shape(len(shards))
    for position, part in enumerate(shards):
        if tuple(part.shape) != local_shape:
            raise ValueError(
                f"{info.name}: shard {position} of {len(shards)} has shape {tuple(part.shape)}, "
                f"expected {local_shape}"
            )
    if info.tp_dim is None:
        return shards[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(list(shards), dim=info.tp_dim)
