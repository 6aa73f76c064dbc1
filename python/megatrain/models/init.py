"""Initial weights as a function of the seed, the parameter's name and the element's index.

Numbers are computed by counter (`megacore.ops.counter_random`), so a rank computes those of its own
shard alone, in little memory, and any tp, pp, ep or dp starts from the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megacore.ops.counter_random import fill_normal, fill_uniform
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.params import ShardPosition, shard
from megacore.parallel.process_groups import Group


def name_seed(seed: int, name: str) -> int:
    """Return a 63-bit seed for the random stream of one parameter.

    Source:
        The first 8 bytes of SHA-256 of ``"seed|name"``, the top bit dropped.

    Example:
        >>> name_seed(1, "head") == name_seed(2, "head")
        False
    """
    digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def draw(
    local: Tensor,
    info: ParamInfo,
    position: ShardPosition,
    *,
    seed: int,
    std: float,
    drawn_rows: int | None = None,
    uniform: bool = False,
) -> None:
    """Fill a rank's shard of a parameter from a distribution with mean 0.

    Args:
        local: The shard, contiguous, any float dtype and device; float32 numbers are rounded to it.
        info: Description of the parameter, split along one dimension at most.
        position: Which shard it is.
        seed: Seed of the run.
        std: Standard deviation.
        drawn_rows: Rows of dimension 0 of the whole parameter that are drawn; the others are 0. For
            a vocabulary, these are the rows without padding, so that padding changes no weight.
        uniform: Draw from a uniform distribution, else from a normal one.

    Sync:
        Numbers are computed on the CPU; for a shard on a GPU, waits for their copies.
    """
    dim = info.tp_dim or 0
    offset = position.offsets(info)[dim]
    inner = math.prod(info.full_shape[dim + 1 :])
    rows = local.view(-1, local.shape[dim] * inner)
    _fill_stretches(
        rows,
        key=name_seed(seed, info.name),
        first=offset * inner,
        stride=info.full_shape[dim] * inner,
        std=std,
        fill=fill_uniform if uniform else fill_normal,
    )
    if drawn_rows is not None:
        local[max(0, drawn_rows - position.offsets(info)[0]) :].zero_()


_NUMBERS_AT_A_TIME = 1 << 18  # 1 MiB of float32, which stays in the cache


def _fill_stretches(
    rows: Tensor, *, key: int, first: int, stride: int, std: float, fill: Callable[..., None]
) -> None:
    """Fill each row with the numbers from ``first + row * stride`` of a stream."""
    count, length = rows.shape
    height = min(count, max(1, _NUMBERS_AT_A_TIME // max(1, length)))
    width = min(length, _NUMBERS_AT_A_TIME)
    drawn = torch.empty(height * width, dtype=torch.float32)
    for row in range(0, count, height):
        for column in range(0, length, max(1, width)):
            part = rows[row : row + height, column : column + width]
            numbers = drawn[: part.numel()].view(part.shape)
            begin = first + row * stride + column
            fill(numbers, key=key, first=begin, stride=stride, std=std)
            part.copy_(numbers)


@dataclass(frozen=True, kw_only=True)
class ParamFactory:
    """Creates the parameters of one model chunk and records their descriptions.

    Attributes:
        seed: Seed of the run.
        tp: Tensor-parallel group, which determines the shard to keep.
        etp: Tensor-parallel group of experts.
        ep: Expert-parallel group, which determines the experts to keep.
        dtype: Number format of the parameters, apart from wide ones (``ParamInfo.wide``).
        device: Device of the parameters.
        initialize: Draw random weights; else they are left as they are, to be filled.
        made: Every parameter made so far, in order.
    """

    seed: int
    tp: Group
    dtype: torch.dtype
    device: torch.device
    etp: Group = field(default_factory=Group.solo)
    ep: Group = field(default_factory=Group.solo)
    initialize: bool = True
    made: list[tuple[ParamInfo, nn.Parameter]] = field(default_factory=list)

    def normal(
        self,
        info: ParamInfo,
        *,
        std: float,
        drawn_rows: int | None = None,
        uniform: bool = False,
    ) -> nn.Parameter:
        """Make a random matrix, normally distributed unless it is ``uniform``; see `draw`."""
        position = ShardPosition(tp_position=self.tp.position, tp_size=self.tp.size)
        local = self._empty(info.local_shape(self.tp.size))
        if self._draws:
            options: dict[str, Any] = {"drawn_rows": drawn_rows, "uniform": uniform}
            draw(local, info, position, seed=self.seed, std=std, **options)
        return self.remember(info, local)

    def experts(self, info: ParamInfo, *, std: float, uniform: bool = False) -> nn.Parameter:
        """Make the matrices of experts, with the experts along dimension 0.

        Each expert has a separate random stream, named by its number.
        """
        local = self._empty(info.local_shape(self.etp.size, ep_size=self.ep.size))
        position = ShardPosition(tp_position=self.etp.position, tp_size=self.etp.size)
        first = self.ep.position * local.shape[0]
        for index in range(local.shape[0] if self._draws else 0):
            one = ParamInfo(
                name=f"{info.name}.{first + index}",
                full_shape=info.full_shape[1:],
                tp_dim=None if info.tp_dim is None else info.tp_dim - 1,
            )
            draw(local[index], one, position, seed=self.seed, std=std, uniform=uniform)
        return self.remember(info, local)

    @property
    def _draws(self) -> bool:
        return self.initialize and self.device.type != "meta"

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def ones(self, info: ParamInfo) -> nn.Parameter:
        """Make a vector of ones."""
        return self._make(info, torch.ones(info.full_shape))

    def zeros(self, info: ParamInfo) -> nn.Parameter:
        """Make a bias of zeros."""
        return self._make(info, torch.zeros(info.full_shape))

    def _make(self, info: ParamInfo, full: Tensor) -> nn.Parameter:
        local = shard(full, info, tp_position=self.tp.position, tp_size=self.tp.size)
        return self.remember(info, local)

    def remember(self, info: ParamInfo, local: Tensor) -> nn.Parameter:
        """Make a parameter of this rank's shard."""
        dtype = torch.promote_types(self.dtype, torch.float32) if info.wide else self.dtype
        parameter = nn.Parameter(local.to(device=self.device, dtype=dtype))
        self.made.append((info, parameter))
        return parameter
