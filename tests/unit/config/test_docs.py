from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_of_all_settings_is_current() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "scripts" / "config_docs.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert printed == page, "run scripts/config_docs.py > docs/configuration.md"
