"""The table of docs/metrics.md is that of the code."""

from __future__ import annotations

from pathlib import Path

from megatrain.train.metrics import METRICS

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
HEAD = "| group | name | unit | meaning | Megatron-LM | torchtitan |\n"


def table() -> str:
    """Rows of all metrics."""
    rows = [
        f"| {metric.group} | `{metric.name}` | {metric.unit} | {metric.text} | "
        f"{_code(metric.megatron)} | {_code(metric.torchtitan)} |\n"
        for metric in METRICS.values()
    ]
    return HEAD + "| --- | --- | --- | --- | --- | --- |\n" + "".join(rows)


def _code(name: str) -> str:
    return f"`{name}`" if name else ""


def test_the_page_has_every_metric() -> None:
    page = PAGE.read_text()
    found = page[page.index(HEAD) :].partition("\n\n")[0] + "\n"
    assert found == table(), "replace the table by the right side"
