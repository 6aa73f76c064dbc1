"""HTML report of a run: one self-contained page."""

from __future__ import annotations

from megacore.report.environment import collect_environment
from megacore.report.page import report_html, write_report
from megacore.report.run_files import (
    RunFiles,
    RunInfo,
    RunTimeline,
    TimelineEvent,
    read_metrics,
    read_run,
    write_info,
    write_timeline,
)

__all__ = [
    "RunFiles",
    "RunInfo",
    "RunTimeline",
    "TimelineEvent",
    "collect_environment",
    "read_metrics",
    "read_run",
    "report_html",
    "write_info",
    "write_report",
    "write_timeline",
]
