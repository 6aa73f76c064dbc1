"""Hooks of MkDocs: pages made from the code, the README and files that pages link to.

Run as a program, it checks a finished site: ``scripts/docs_site.py build/site``. Links and anchors
must lead to something, and nothing may be loaded from another host.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")
# Packages with names for users, in the order of docs/architecture.md.
PACKAGES = (
    "megacore.parallel", "megacore.pipeline", "megacore.buffers", "megacore.optim", "megacore.moe",
    "megacore.ops", "megacore.graphs", "megatrain.api", "megatrain.data", "megatrain.checkpoint",
    "megatrain.config", "megatrain.view", "megatrain.report",
)  # fmt: skip
_LANGUAGES = {".py": "python", ".toml": "toml", ".h": "cpp", ".yaml": "yaml", ".sbatch": "bash"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of the Python API in the navigation."""
    pages = [{name: f"api/{name}.md"} for name in PACKAGES]
    for section in config.nav or []:
        for item in section.get("Reference", []) if isinstance(section, dict) else []:
            if isinstance(item, dict) and "Python API" in item:
                item["Python API"] = pages
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages made from the code, and files of the repository that pages link to."""
    from mkdocs.structure.files import File

    made = {"commands.md": commands_page()}
    made |= {f"api/{name}.md": api_page(name) for name in PACKAGES}
    made["index.md"] = relinked(ROOT / "README.md", "index.md")
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        made[name] = relinked(ROOT / name, name)
    queue = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for source in queue:
        for target in linked_files(source):
            place = site_path(target)
            if place in made or target.is_relative_to(ROOT / "docs"):
                continue
            made[place] = file_page(target, place)
            if target.suffix == ".md":
                queue.append(target)
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links out of docs/ to the pages of these files."""
    path = page.file.abs_src_path
    if path is None or not Path(path).is_relative_to(ROOT / "docs"):
        return markdown
    return relinked(Path(path), page.file.src_uri)


def linked_files(source: Path) -> list[Path]:
    """Return the files of the repository that a page links to; of a folder, its README."""
    found = []
    for link in LINK.findall(without_code(source.read_text(encoding="utf-8"))):
        target = (source.parent / link).resolve()
        if target.is_dir():
            target = target / "README.md"
        if target.is_file() and target.is_relative_to(ROOT):
            found.append(target)
    return found


def without_code(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def site_path(target: Path) -> str:
    """Return the page of a file of the repository.

    Example:
        >>> site_path(ROOT / "docs" / "plan.md"), site_path(ROOT / "examples" / "own_loop.py")
        ('plan.md', 'examples/own_loop.py.md')
    """
    path = target.relative_to(ROOT).as_posix()
    if path == "README.md":
        return "index.md"
    if target.suffix in (".svg", ".png") or path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if target.suffix == ".md" else f"{path}.md"


def relinked(source: Path, place: str) -> str:
    """Return the text of a page with links that hold at its place in the site."""
    text = source.read_text(encoding="utf-8")
    up = "../" * place.count("/")

    def replace(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        if (target / "README.md").is_file():
            target = target / "README.md"
        if target == ROOT / "benchmarks":  # a folder of scripts
            target = ROOT / "docs" / "metrics.md"
        inside = target.is_file() and target.is_relative_to(ROOT)
        return up + site_path(target) if inside else match[1]

    return LINK.sub(replace, text)


def file_page(target: Path, place: str) -> str:
    """Return the page that shows a file."""
    if target.suffix == ".md":
        return relinked(target, place)
    text = target.read_text(encoding="utf-8")
    fence = _LANGUAGES.get(target.suffix, "text")
    return f"# {target.relative_to(ROOT)}\n\n````{fence}\n{text}\n````\n"


def commands_page() -> str:
    """Return the reference of commands: the help of every parser."""
    import argparse
    import importlib

    from megatrain.cli import COMMANDS, Parser

    parts = [
        "# Commands\n\nThe output of `megacore COMMAND --help`. Commands that take settings accept "
        "every key of the [configuration](configuration.md) as `--section.key=value`. "
        "[Exit codes](launching.md#exit-codes) are the same for all commands.\n"
    ]
    for name in COMMANDS:
        commands = argparse.ArgumentParser(prog="megacore").add_subparsers(parser_class=Parser)
        importlib.import_module(f"megatrain.cli.{name.replace('-', '_')}").add_parser(commands)
        parts.append(f"## {name}\n\n```text\n{commands.choices[name].format_help()}```\n")
    return "\n".join(parts)


def api_page(name: str) -> str:
    """Return the reference of a package's public names."""
    import importlib

    module = importlib.import_module(name)
    names = [each for each in module.__all__ if getattr(getattr(module, each), "__doc__", None)]
    summary = (module.__doc__ or "").strip()
    entries = "\n".join(f"::: {name}.{each}\n" for each in names)
    return f"# {name}\n\n{summary}\n\n{entries}"


# ---- check of a finished site --------------------------------------------------------------------


class _Links(HTMLParser):
    """Links, loaded files and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what a tag refers to."""
        values = {key: value for key, value in attrs if value is not None}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") != "canonical" and "href" in values:
            self.loaded.append(values["href"])
        elif "src" in values:
            self.loaded.append(values["src"])


def problems_of(site: Path) -> list[str]:
    """Return dead links, dead anchors and files of other hosts, one text each."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    found = []
    for path, page in pages.items():
        place = path.relative_to(site)
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    found.append(f"{place}: loads {link}")
                continue
            if place.name == "404.html":  # its links are absolute
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{place}: {link} leads nowhere")
            elif parts.fragment and target in pages:
                anchors = pages[target].anchors | {"", "__toc"}
                if unquote(parts.fragment) not in anchors:
                    found.append(f"{place}: {link} has no such section")
    for path in sorted(site.rglob("*.css")):
        text = path.read_text(encoding="utf-8")
        if remote := re.search(r"url\(['\"]?https?:|@import ['\"]?https?:", text):
            found.append(f"{path.relative_to(site)}: loads {remote[0]}")
    return found


def main() -> int:
    """Check the site in the folder of the command line."""
    site = Path(sys.argv[1])
    found = problems_of(site)
    print("\n".join(found) or f"{len(list(site.rglob('*.html')))} pages, no dead links")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
