"""The report as one self-contained HTML file, without network access or further files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from megacore.errors import MegacoreError
from megatrain.report import sections
from megatrain.report.cost import memory_card, time_card
from megatrain.report.expert_load import echo_card, experts_card
from megatrain.report.run_files import (
    METRICS_NAME,
    REPORT_NAME,
    RunFiles,
    RunInfo,
    read_run,
    write_info,
)
from megatrain.report.timeline import timeline_card


def write_report(run_dir: str | Path, *, info: RunInfo | None = None) -> Path:
    """Write ``report.html`` from the files of a run.

    Args:
        run_dir: Folder with ``metrics.jsonl``, ``run.json`` and, if a step was
            traced, ``timeline.json``. Missing parts are omitted from the page.
        info: Written to ``run.json`` first; ``None`` uses the existing file.

    Returns:
        The path of the page.

    Raises:
        MegacoreError: If the folder is not a run, or one of its files is invalid.
    """
    directory = Path(run_dir)
    if info is not None:
        write_info(directory, info)
    path = directory / REPORT_NAME
    partial = path.with_name(path.name + ".partial")
    partial.write_text(report_html(read_run(directory)), encoding="utf-8")
    partial.replace(path)
    return path


def report_html(run: RunFiles) -> str:
    """Return the page as HTML text.

    Raises:
        MegacoreError: If the records of the run have values that cannot be drawn.
    """
    return drawn(run, lambda: _page(run))


def drawn(run: RunFiles, draw: Callable[[], str]) -> str:
    """Return a drawing of a run.

    Raises:
        MegacoreError: If the records of the run have values that cannot be drawn.
    """
    try:
        return draw()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise MegacoreError(
            f"cannot draw the run in {run.directory}: {METRICS_NAME} or another of its files is "
            f"damaged ({type(error).__name__}: {error})"
        ) from error


def _page(run: RunFiles) -> str:
    body = "\n".join(
        (
            sections.header(run),
            sections.tiles(run),
            sections.loss_card(run),
            sections.small_charts(run),
            sections.sample_card(run),
            time_card(run),
            memory_card(run),
            experts_card(run),
            echo_card(run),
            sections.layout_card(run),
            timeline_card(run),
            sections.settings_card(run),
            f'<div class="two">{sections.environment_card(run)}{sections.files_card(run)}</div>',
        )
    )
    return html_page(run.info.name, body, run.info.environment)


def html_page(title: str, body: str, environment: Mapping[str, str]) -> str:
    """Return a self-contained page with the style and the script of all reports."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} - megacore</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<main>
{body}
<footer>Written by megacore {escape(environment.get("megacore", ""))}</footer>
</main>
<div id="tip"></div>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
