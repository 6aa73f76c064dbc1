"""The shard of a parameter that a rank holds, and uses of parameters outside of their module.

Checkpoints store full tensors, so any layout can read the checkpoints of any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class ShardPosition:
    """Position of a rank's box among the equal boxes of a full parameter.

    Attributes:
        tp_position: Index along ``tp_dim``; 0 for a parameter without it.
        tp_size: Number of parts along ``tp_dim``; 1 for a parameter without it.
        ep_position: Index along ``ep_dim``; 0 for a parameter without it.
        ep_size: Number of parts along ``ep_dim``; 1 for a parameter without it.
    """

    tp_position: int = 0
    tp_size: int = 1
    ep_position: int = 0
    ep_size: int = 1

    @classmethod
    def of(cls, info: ParamInfo, groups: ProcessGroups) -> ShardPosition:
        """Return the box of a parameter on this rank; equal positions hold equal values.

        Example:
            >>> info = ParamInfo(name="w", full_shape=(4, 2), tp_dim=0)
            >>> ShardPosition.of(info, ProcessGroups.single()).num_shards
            1
        """
        tp = groups.etp if info.expert else groups.tp
        split_tp, split_ep = info.tp_dim is not None, info.ep_dim is not None
        return cls(
            tp_position=tp.position if split_tp else 0,
            tp_size=tp.size if split_tp else 1,
            ep_position=groups.ep.position if split_ep else 0,
            ep_size=groups.ep.size if split_ep else 1,
        )

    @property
    def num_shards(self) -> int:
        """Number of boxes of the parameter."""
        return self.tp_size * self.ep_size

    @property
    def index(self) -> int:
        """Index of this box among those of all ranks; ``tp_position`` varies fastest."""
        return self.ep_position * self.tp_size + self.tp_position

    def offsets(self, info: ParamInfo) -> tuple[int, ...]:
        """Return the offset of the box in the full parameter, one number per dimension.

        Its extent is ``info.local_shape(tp_size, ep_size=ep_size)``.

        Example:
            >>> info = ParamInfo(name="w", full_shape=(8, 6), tp_dim=1, ep_dim=0, expert=True)
            >>> ShardPosition(tp_position=1, tp_size=2, ep_position=3, ep_size=4).offsets(info)
            (6, 3)
        """
        local = info.local_shape(self.tp_size, ep_size=self.ep_size)
        offsets = [0] * len(local)
        if info.tp_dim is not None:
            offsets[info.tp_dim] = self.tp_position * local[info.tp_dim]
        if info.ep_dim is not None:
            offsets[info.ep_dim] = self.ep_position * local[info.ep_dim]
        return tuple(offsets)


def shard(
    full: Tensor,
    info: ParamInfo,
    *,
    tp_position: int,
    tp_size: int,
    ep_position: int = 0,
    ep_size: int = 1,
) -> Tensor:
    """Copy the shard of one rank out of a full parameter.

    Args:
        full: The whole parameter, shape ``info.full_shape``, any dtype.
        info: Description of the parameter.
        tp_position: Position on the tp axis (etp for experts), in ``[0, tp_size)``.
        tp_size: Number of tensor-parallel ranks.
        ep_position: Position on the ep axis, in ``[0, ep_size)``; used for experts only.
        ep_size: Number of expert-parallel ranks.

    Returns:
        A contiguous copy of shape ``info.local_shape(tp_size, ep_size=ep_size)``; the whole
        parameter if it is replicated.

    Raises:
        ValueError: If shape, size or position are not valid.

    Example:
        >>> info = ParamInfo(name="w", full_shape=(4, 2), tp_dim=0)
        >>> shard(torch.arange(8).view(4, 2), info, tp_position=1, tp_size=2).tolist()
        [[4, 5], [6, 7]]
    """
    local_shape = info.local_shape(tp_size, ep_size=ep_size)
    if tuple(full.shape) != info.full_shape:
        raise ValueError(f"{info.name}: got shape {tuple(full.shape)}, expected {info.full_shape}")
    for axis, position, size in (("tp", tp_position, tp_size), ("ep", ep_position, ep_size)):
        if not 0 <= position < size:
            raise ValueError(f"{info.name}: {axis}_position={position} is not in [0, {size})")
    box = ShardPosition(
        tp_position=tp_position, tp_size=tp_size, ep_position=ep_position, ep_size=ep_size
    )
    local = full
    for dim, (start, length) in enumerate(zip(box.offsets(info), local_shape, strict=True)):
        local = local.narrow(dim, start, length)
    return local.clone(memory_format=torch.contiguous_format)


def before_use(module: nn.Module, wait: Callable[[], None]) -> None:
    """Call ``wait`` before every use of the module's own parameters.

    A call of the module is a use; code that reads the parameters elsewhere calls
    :func:`use_params` first.
    """
    module.__dict__.setdefault(_WAITS, []).append(wait)
    module.register_forward_pre_hook(lambda _module, _args: wait())


def use_params(module: nn.Module) -> None:
    """Make the module's own parameters current, for a use outside of its forward pass."""
    for wait in module.__dict__.get(_WAITS, ()):
        wait()


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs hooks, apart from those of :func:`before_use`."""
    num_waits = len(module.__dict__.get(_WAITS, ()))
    others = module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(others) or len(module._forward_pre_hooks) > num_waits


_WAITS = "_waits_before_use"
