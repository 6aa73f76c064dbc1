from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


PAGES = {"config_docs": "configuration", "families_docs": "families"}


@pytest.mark.parametrize("script", PAGES)
def test_a_page_made_from_the_source_is_current(script: str) -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{script}.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    page = (ROOT / "docs" / f"{PAGES[script]}.md").read_text()
    assert printed == page, f"run scripts/{script}.py > docs/{PAGES[script]}.md"


def test_the_readme_counts_the_families() -> None:
    from megatrain.hf.families import FAMILIES

    assert f"[{len(FAMILIES)} families](docs/families.md)" in (ROOT / "README.md").read_text()
