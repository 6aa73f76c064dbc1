"""SVG pictures and traces of schedules, measured steps and layouts.

The classes drawn here (``Schedule``, ``Timeline``, ``Topology``) do not depend on this package.
"""

from __future__ import annotations

from megacore.view.chrome_trace import measured_trace, simulated_trace
from megacore.view.timeline import schedule_svg, timeline_svg
from megacore.view.topology import topology_svg

__all__ = ["measured_trace", "schedule_svg", "simulated_trace", "timeline_svg", "topology_svg"]
