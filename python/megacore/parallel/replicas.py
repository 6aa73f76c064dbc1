"""Groups of ranks with the same parameters, for one or two copies of the model in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from megacore.errors import ConfigError
from megacore.parallel.topology import Topology


def holder_groups(topology: Topology, *, expert: bool, copies: int = 1) -> list[list[int]]:
    """Return the groups of ranks that hold the same dense, or the same expert, parameters.

    Args:
        topology: The layout.
        expert: Return the groups of expert parameters.
        copies: Copies of the model in each pipeline. With 2 copies, position r of a pipeline of p
            ranks holds stage r of the first copy and stage p-1-r of the second, so positions r and
            p-1-r hold the same parameters.

    Raises:
        ConfigError: If two copies do not match pairs of ranks, or there are more.

    Example:
        >>> holder_groups(Topology(world_size=4, pp=4), expert=False, copies=2)
        [[0, 3], [1, 2]]
    """
    view = topology.expert if expert else topology.dense
    groups = view.get_ranks("edp" if expert else "dp-cp")
    if copies == 1:
        return groups
    if copies != 2 or topology.pp % 2:
        raise ConfigError(
            f"{copies} copies of the model in a pipeline of {topology.pp} ranks; there may be one, "
            "or two on an even number of ranks"
        )
    joined: dict[tuple[int, ...], list[int]] = {}
    for ranks in groups:
        place = dict(view.coordinates(ranks[0]))
        position = place.pop("pp")
        pair = min(position, topology.pp - 1 - position)
        joined.setdefault((pair, *place.values()), []).extend(ranks)
    return [sorted(ranks) for ranks in joined.values()]


def embedding_groups(
    topology: Topology, ends: Sequence[int], *, copies: int = 1
) -> list[list[int]]:
    """Return the groups of ranks that share an embedding within each copy of the model.

    Args:
        topology: The layout.
        ends: Positions in the pipeline, of the first copy, that hold the embedding or a copy of it;
            -1 is the last position.
        copies: As in :func:`holder_groups`. The ends of the second copy are mirrored.

    Example:
        >>> embedding_groups(Topology(world_size=4, pp=4), (0, 1), copies=2)
        [[0, 1], [2, 3]]
    """
    positions = sorted({end % topology.pp for end in ends})
    if len(positions) == 1:
        return []
    pipelines = topology.dense.groups("pp")
    found: list[list[int]] = pipelines[:, positions].tolist()
    if copies > 1:
        mirrored = [topology.pp - 1 - position for position in reversed(positions)]
        found += pipelines[:, mirrored].tolist()
    return found
