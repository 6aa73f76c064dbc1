"""Full parameters from the shards of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.parallel.param_info import ParamInfo


def unshard(shards: Sequence[Tensor], info: ParamInfo, *, ep_size: int = 1) -> Tensor:
    """Join the shards of all ranks: the inverse of ``shard``.

    Args:
        shards: One tensor per part, by :attr:`ShardPosition.index` (tp varies fastest): each
            ``info.local_shape(len(shards) // ep_size, ep_size=ep_size)``. For a parameter that is
            replicated over tp, one or more equal shards.
        info: Description of the parameter.
        ep_size: Number of parts along ``info.ep_dim``; divides the number of shards.

    Returns:
        The full parameter, a new tensor; for a replicated parameter a copy of the first shard.

    Raises:
        ValueError: If a shard has another shape.
    """
    if not shards:
        raise ValueError(f"{info.name}: no shards to join")
    if ep_size < 1 or len(shards) % ep_size:
        raise ValueError(f"{info.name}: {len(shards)} shards are not a multiple of ep={ep_size}")
    tp_size = len(shards) // ep_size
    local_shape = info.local_shape(tp_size, ep_size=ep_size)
    for position, part in enumerate(shards):
        if tuple(part.shape) != local_shape:
            raise ValueError(
                f"{info.name}: shard {position} of {len(shards)} has shape {tuple(part.shape)}, "
                f"expected {local_shape}"
            )
    rows = [list(shards[start : start + tp_size]) for start in range(0, len(shards), tp_size)]
    joined = [row[0] if info.tp_dim is None else torch.cat(row, dim=info.tp_dim) for row in rows]
    if info.ep_dim is None:
        return joined[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(joined, dim=info.ep_dim)
