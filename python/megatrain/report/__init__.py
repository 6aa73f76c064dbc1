"""HTML report of a run, or of two to compare: one self-contained page."""

from __future__ import annotations

from megatrain.report.compare import write_comparison
from megatrain.report.environment import collect_environment
from megatrain.report.page import report_html, write_report
from megatrain.report.run_files import (
    GeneratedText,
    RankMemory,
    RunFiles,
    RunInfo,
    RunStart,
    RunTimeline,
    TimelineEvent,
    earlier_starts,
    read_metrics,
    read_run,
    write_info,
    write_timeline,
)

__all__ = [
    "GeneratedText",
    "RankMemory",
    "RunFiles",
    "RunInfo",
    "RunStart",
    "RunTimeline",
    "TimelineEvent",
    "collect_environment",
    "earlier_starts",
    "read_metrics",
    "read_run",
    "report_html",
    "write_comparison",
    "write_info",
    "write_report",
    "write_timeline",
]
