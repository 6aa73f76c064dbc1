"""SVG pictures and traces of schedules, measured steps and layouts.

The classes drawn here (``Schedule``, ``Timeline``, ``Topology``) do not depend on this package.
Where it is imported in a notebook, cells that end with a schedule or a topology show its picture.
"""

from __future__ import annotations

from megacore.view.chrome_trace import measured_trace, simulated_trace
from megacore.view.notebook import show_in_notebook
from megacore.view.timeline import schedule_svg, timeline_svg
from megacore.view.topology import topology_svg

__all__ = ["measured_trace", "schedule_svg", "simulated_trace", "timeline_svg", "topology_svg"]

show_in_notebook()
