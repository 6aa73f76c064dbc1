"""How a parameter is cut on this rank."""

from __future__ import annotations

from megacore.parallel.params import ParamInfo
from megacore.parallel.process_groups import ProcessGroups


def shards_of(info: ParamInfo, groups: ProcessGroups) -> tuple[int, int]:
    """Number of tensor-parallel shards of a parameter, and which one this rank holds.

    A parameter that is replicated over tensor-parallel ranks is a single shard.
    """
    if info.tp_dim is None:
        return 1, 0
    group = groups.etp if info.expert else groups.tp
    return group.size, group.position
