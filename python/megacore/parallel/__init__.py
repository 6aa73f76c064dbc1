"""Who works with whom: rank layouts, process groups and the collectives over them."""

from __future__ import annotations

from megacore.parallel.process_groups import Group, ProcessGroups
from megacore.parallel.topology import DEFAULT_ORDER, RankGenerator, Topology

__all__ = ["DEFAULT_ORDER", "Group", "ProcessGroups", "RankGenerator", "Topology"]
