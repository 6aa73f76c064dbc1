"""Rank layouts, process groups and the collectives over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import lazy_names
from megacore.parallel.topology import DEFAULT_ORDER, RankGenerator, Topology

if TYPE_CHECKING:
    from megacore.parallel.param_info import Matrices, ParamInfo
    from megacore.parallel.process_groups import Group, ProcessGroups

__all__ = [
    "DEFAULT_ORDER",
    "Group",
    "Matrices",
    "ParamInfo",
    "ProcessGroups",
    "RankGenerator",
    "Topology",
]

# Layouts are pure values, so torch is imported only for the other names.
__getattr__ = lazy_names(
    __name__,
    {
        "Group": "process_groups",
        "Matrices": "param_info",
        "ParamInfo": "param_info",
        "ProcessGroups": "process_groups",
    },
)
