"""Rank layouts, process groups and the collectives over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megacore.parallel.topology import DEFAULT_ORDER, RankGenerator, Topology

if TYPE_CHECKING:
    from megacore.parallel.params import ParamInfo
    from megacore.parallel.process_groups import Group, ProcessGroups

__all__ = ["DEFAULT_ORDER", "Group", "ParamInfo", "ProcessGroups", "RankGenerator", "Topology"]


def __getattr__(name: str) -> Any:
    # Layouts are pure values, so torch is imported only for the other names.
    if name in ("Group", "ProcessGroups"):
        from megacore.parallel import process_groups

        return getattr(process_groups, name)
    if name == "ParamInfo":
        from megacore.parallel import params

        return params.ParamInfo
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
