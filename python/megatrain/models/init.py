"""Initial weights as a function of the seed and the parameter's name, independent of the layout.

Every parameter has a random stream, seeded by its name. A rank draws the *full* tensor and keeps
its shard, so any tp, pp or dp starts from the same weights, at the cost of one full tensor of
temporary memory per parameter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megacore.parallel.param_info import ParamInfo
from megacore.parallel.params import shard
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


def draw_full(info: ParamInfo, *, seed: int, std: float, drawn_rows: int | None = None) -> Tensor:
    """Draw the whole parameter from a normal distribution with mean 0.

    Args:
        info: Description of the parameter.
        seed: Seed of the run.
        std: Standard deviation.
        drawn_rows: Rows of dimension 0 that are drawn; the others are 0. For a vocabulary, these
            are the rows without padding, so that padding changes no weight.

    Returns:
        Shape ``info.full_shape``, float32, on the CPU.
    """
    rows = info.full_shape[0] if drawn_rows is None else drawn_rows
    generator = torch.Generator().manual_seed(name_seed(seed, info.name))
    full = torch.zeros(info.full_shape, dtype=torch.float32)
    full[:rows] = torch.empty(rows, *info.full_shape[1:]).normal_(0.0, std, generator=generator)
    return full


@dataclass(frozen=True, kw_only=True)
class ParamFactory:
    """Creates the parameters of one model chunk and records their descriptions.

    Attributes:
        seed: Seed of the run.
        tp: Tensor-parallel group, which determines the shard to keep.
        etp: Tensor-parallel group of experts.
        ep: Expert-parallel group, which determines the experts to keep.
        dtype: Number format of the parameters.
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

    def normal(self, info: ParamInfo, *, std: float, drawn_rows: int | None = None) -> nn.Parameter:
        """Make a normally distributed matrix, see `draw_full`."""
        if self.device.type == "meta" or not self.initialize:
            shape = info.local_shape(self.tp.size)
            return self.remember(info, torch.empty(shape, dtype=self.dtype, device=self.device))
        return self._make(info, draw_full(info, seed=self.seed, std=std, drawn_rows=drawn_rows))

    def experts(self, info: ParamInfo, *, std: float) -> nn.Parameter:
        """Make the matrices of experts, with the experts along dimension 0.

        Each expert has a separate random stream, named by its number, so a rank draws only its own
        experts.
        """
        local = torch.empty(
            info.local_shape(self.etp.size, ep_size=self.ep.size), device=self.device
        )
        first = self.ep.position * local.shape[0]
        for index in range(0 if local.is_meta or not self.initialize else local.shape[0]):
            one = ParamInfo(
                name=f"{info.name}.{first + index}",
                full_shape=info.full_shape[1:],
                tp_dim=None if info.tp_dim is None else info.tp_dim - 1,
            )
            full = draw_full(one, seed=self.seed, std=std)
            part = shard(full, one, tp_position=self.etp.position, tp_size=self.etp.size)
            local[index] = part.to(self.device)
        return self.remember(info, local)

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
        parameter = nn.Parameter(local.to(device=self.device, dtype=self.dtype))
        self.made.append((info, parameter))
        return parameter
