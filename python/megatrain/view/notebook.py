"""Pictures of schedules and layouts in notebooks."""

from __future__ import annotations

import sys
from typing import Any

from megacore.parallel.topology import Topology
from megacore.pipeline.schedule import Schedule
from megatrain.view.timeline import schedule_svg
from megatrain.view.topology import topology_svg


def show_in_notebook() -> None:
    """Register the pictures with IPython, if this process runs in it."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return
    svg = shell.display_formatter.formatters["image/svg+xml"]
    svg.for_type(Schedule, schedule_svg)
    svg.for_type(Topology, topology_svg)
