"""Metadata of the package, as the package index shows them."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def readme(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts" / "packaging"), *sys.path])
    import pypi_readme

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(pypi_readme.dynamic_metadata("readme", {}, project | {"version": "1.2.3"})["text"])


def test_the_readme_of_the_index_has_absolute_links_to_files_of_the_tag(readme: str) -> None:
    source = (ROOT / "README.md").read_text()
    relative = re.findall(r"\]\((?!https?://|#)([^)]+)\)", source)
    assert len(relative) > 30
    assert not re.findall(r"\]\((?!https?://|#)", readme)
    for link in relative:
        assert (ROOT / link.partition("#")[0]).exists(), link
        assert re.search(rf"/(blob|raw)/v1\.2\.3/{re.escape(link)}\)", readme)
    assert "![An interleaved" in readme
    assert "/raw/v1.2.3/docs/images/" in readme


def test_metadata_are_complete() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"] == [{"name": "megacore developers"}]
    assert {"Source", "Documentation", "Changelog", "Issues"} <= set(project["urls"])
    assert project["keywords"]
    for file in project["license-files"]:
        assert "Copyright" in (ROOT / file).read_text()
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    for tag in built.split():
        number = re.sub(r"cp3(\d+)-\*", r"3.\1", tag)
        assert f"Programming Language :: Python :: {number}" in project["classifiers"]
