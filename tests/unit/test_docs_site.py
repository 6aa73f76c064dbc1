"""The check of the documentation site finds what it must find; pages are complete."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from megatrain.cli import COMMANDS

ROOT = Path(__file__).parents[2]
SITE = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))


def write(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"<html><body>{body}</body></html>")


def test_a_sound_site_has_no_problems(tmp_path: Path) -> None:
    write(tmp_path, "a.html", '<h1 id="top">A</h1><a href="b.html#end">b</a><a href="#top">up</a>')
    write(tmp_path, "b.html", '<p id="end"></p><a href="https://example.org">elsewhere</a>')
    assert SITE["problems_of"](tmp_path) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="none.html">x</a>', "a.html: none.html leads nowhere"),
        ('<a href="b.html#none">x</a>', "a.html: b.html#none has no such section"),
        (
            '<script src="https://cdn.example/x.js"></script>',
            "a.html: loads https://cdn.example/x.js",
        ),
        (
            '<link rel="stylesheet" href="//fonts.example/f.css">',
            "a.html: loads //fonts.example/f.css",
        ),
    ],
)
def test_a_problem_is_found(tmp_path: Path, body: str, problem: str) -> None:
    write(tmp_path, "a.html", body)
    write(tmp_path, "b.html", "")
    assert SITE["problems_of"](tmp_path) == [problem]


def test_styles_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("body { background: url(https://cdn.example/x.png) }")
    assert len(SITE["problems_of"](tmp_path)) == 1


def test_every_command_and_public_name_has_an_entry() -> None:
    page = SITE["commands_page"]()
    assert all(f"\n## {name}\n" in page for name in COMMANDS)
    assert "::: megacore.pipeline.build_schedule\n" in SITE["api_page"]("megacore.pipeline")


def test_links_out_of_the_documents_lead_to_pages_of_the_files() -> None:
    text = SITE["relinked"](ROOT / "docs" / "concepts.md", "concepts.md")
    assert "](images/ranks.svg)" in text
    text = SITE["relinked"](ROOT / "README.md", "index.md")
    assert "](docs/" not in text
    assert "](LICENSE)" not in text


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for page in (ROOT / "docs").glob("*.md"):
        assert f" {page.name}\n" in nav, page.name


def test_files_of_the_page_on_extending_exist() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    roots = ("cpp", "cuda", "docs", "python", "scripts", "tests")
    named = {name for name in re.findall(r"`([\w./-]+)`", page) if name.split("/")[0] in roots}
    assert len(named) > 40
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
