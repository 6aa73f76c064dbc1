"""SVG pictures and traces of schedules, measured steps and layouts.

The classes drawn here (``Schedule``, ``Timeline``, ``Topology``) do not depend on this package.
Where it is imported in a notebook, cells that end with a schedule or a topology show its picture.
"""

from __future__ import annotations

from megatrain.view.chrome_trace import measured_trace, simulated_trace
from megatrain.view.notebook import show_in_notebook
from megatrain.view.timeline import schedule_svg, timeline_svg
from megatrain.view.topology import topology_svg

__all__ = ["measured_trace", "schedule_svg", "simulated_trace", "timeline_svg", "topology_svg"]

show_in_notebook()
