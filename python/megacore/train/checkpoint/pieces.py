"""What a checkpoint is made from: the ranges of parameters that a rank optimizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from megacore.parallel.params import ParamInfo
from megacore.parallel.process_groups import ProcessGroups


class Piece(Protocol):
    """A range of one parameter on one rank, as ``DistributedOptimizer.pieces`` gives it."""

    @property
    def info(self) -> ParamInfo:
        """Which parameter."""

    @property
    def start(self) -> int:
        """First element in the flattened tensor-parallel shard."""

    @property
    def end(self) -> int:
        """One past the last element."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """1-D float32 tensors of ``end - start`` elements by kind, e.g. ``"main_param"``."""


def shards_of(info: ParamInfo, groups: ProcessGroups) -> tuple[int, int]:
    """Number of shards of a parameter, and which one this rank holds.

    A parameter that is replicated over tensor-parallel ranks is a single shard.
    """
    if info.tp_dim is None:
        return 1, 0
    group = groups.etp if info.expert else groups.tp
    return group.size, group.position
