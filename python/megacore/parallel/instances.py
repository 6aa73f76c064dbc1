"""Groups for hybrid sharding: optimizer state sharded inside an instance, replicated across."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from megacore.errors import ConfigError
from megacore.parallel.process_groups import Group, ProcessGroups, _GroupMaker, host_connector
from megacore.parallel.replicas import holder_groups


@dataclass(frozen=True, kw_only=True)
class HybridShardGroups:
    """Ranks with the parameters of this rank, split into optimizer instances of neighbours.

    Gradients are reduce-scattered inside an instance (near ranks), then each slice is summed across
    instances (far ranks); updated parameters are gathered inside an instance.

    Attributes:
        dense: Ranks of this instance that share the state of dense parameters.
        dense_across: Ranks of all instances that hold the same slices as this rank.
        expert: As ``dense``, for expert parameters.
        expert_across: As ``dense_across``, for expert parameters.
    """

    dense: Group
    dense_across: Group
    expert: Group
    expert_across: Group

    @classmethod
    def split(
        cls,
        groups: ProcessGroups,
        num_instances: int,
        *,
        timeout_s: float = 120.0,
        host_memory: bool = True,
    ) -> HybridShardGroups:
        """Split ``groups.holders`` and ``groups.expert_holders`` into instances. Collective.

        Raises:
            ConfigError: If ``num_instances`` does not divide the size of both groups.

        Example:
            >>> HybridShardGroups.split(ProcessGroups.single(), 1).dense.size
            1
        """
        for group in (groups.holders, groups.expert_holders):
            if num_instances < 1 or group.size % num_instances:
                raise ConfigError(
                    f"num_instances is {num_instances}; it must divide the {group.size} "
                    f"data-parallel ranks of group {group.name}"
                )
        if num_instances == 1:
            solo = Group.solo(groups.rank)
            return cls(
                dense=groups.holders,
                dense_across=solo,
                expert=groups.expert_holders,
                expert_across=solo,
            )
        made: dict[str, Group] = {}
        connector = host_connector(timeout_s=timeout_s) if host_memory else None
        maker = _GroupMaker(timeout=timedelta(seconds=timeout_s), backend=None, connector=connector)
        for name in ("dense", "expert"):
            wholes = holder_groups(groups.topology, expert=name == "expert", copies=groups.copies)
            size = len(wholes[0]) // num_instances
            inside = [
                ranks[start : start + size]
                for ranks in wholes
                for start in range(0, len(ranks), size)
            ]
            across = [ranks[position::size] for ranks in wholes for position in range(size)]
            made[name] = maker.make(f"{name} instance", inside)
            made[f"{name}_across"] = maker.make(f"{name} across instances", across)
        return cls(**made)
