"""Commands, settings and imports in documents are those of the code; cheap commands are run."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatrain.cli import COMMANDS, main, parse
from megatrain.config import load_config, section_classes

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("examples/**/*.toml"),
        *ROOT.glob("examples/cluster/*.*"),
    ]
)
FENCE = re.compile(r"^```([\w+]*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What may be in front of the command on a line: a prompt, a launcher, a program that runs modules.
BEFORE = re.compile(r"^\s*(?:\$ )?(?:(?:srun|torchrun|exec|python) .*?)?megacore (?=[a-z-])")
# Spans of a setting's form that are names of files, of the API, or of a table with free names.
FILES = (".jsonl", ".toml", ".json", ".py", ".idx", ".bin", ".parquet", ".txt", ".safetensors")
NO_SETTINGS = ("model.options.", "moe.plan_offload", "moe...")
# Commands that need neither torch nor what an earlier line wrote, and take less than a second.
CHEAP = {"ranks", "schedule", "plan"}


@dataclass(frozen=True)
class Shown:
    """A command on a page."""

    page: Path
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def text_of(page: Path) -> str:
    """The text of a page; of a configuration, its comment at the start."""
    text = page.read_text()
    if page.suffix == ".toml":
        head = re.match(r"(?:#.*\n)*", text)
        return "" if head is None else re.sub(r"^# ?", "", head[0], flags=re.MULTILINE)
    return text


def blocks(page: Path) -> list[tuple[str, str]]:
    """Fenced blocks as (language, text); files that are no Markdown are one block."""
    text = text_of(page)
    return FENCE.findall(text) if page.suffix == ".md" else [("", text)]


def commands(page: Path) -> Iterator[Shown]:
    for _, block in blocks(page):
        lines = iter(block.replace("\\\n", " ").splitlines())
        for line in lines:
            if not BEFORE.match(line):
                continue
            text = BEFORE.sub("", line)
            while text.count('"') % 2:  # a quoted text over several lines
                text += "\n" + next(lines)
            text = re.split(r"\s{3,}(?=[a-z0-9])", text)[0]  # a remark beside it
            yield Shown(page, re.sub(r"\s[|>&;]+ .*", "", text))


SHOWN = [command for page in PAGES for command in commands(page)]


def check_settings(command: Shown, folder: Path) -> None:
    """Load the configuration of a command; a file that is not here counts as an empty one."""
    _, args = parse(command.words)
    path = getattr(args, "config", None)
    path = ROOT / path if path is not None and (ROOT / path).is_file() else folder / "empty.toml"
    (folder / "empty.toml").write_text("train.steps = 1000000")
    assert load_config(path, args.settings).notes == ()  # settings by their names of today


@pytest.mark.parametrize("command", SHOWN, ids=lambda shown: f"{shown.page.name}: {shown.text}")
def test_a_command_is_legal(
    command: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--help" in command.words:
        assert command.words[0] in COMMANDS
        return
    check_settings(command, tmp_path)
    name = command.words[0]
    files = [word for word in command.words if word.endswith(".toml") or word.startswith("./")]
    here = all((ROOT / file).exists() for file in files)
    has_files = {"--svg", "--trace", "--write", "--csv", "--from-csv"} & set(command.words)
    if name in CHEAP and here and not has_files and not re.search(r"\b[A-Z]{4}", command.text):
        monkeypatch.chdir(ROOT)
        assert main(command.words) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_in_running_text_exist(page: Path) -> None:
    for text in re.findall(r"`megacore ([a-z][^`]*)`", text_of(page)):
        name, *words = text.split()
        assert name in COMMANDS, text
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        with contextlib.suppress(SystemExit):
            main([name, "--help"])
        for option in options:
            if "." not in option:
                parser_knows(name, option)


def parser_knows(name: str, option: str) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    importlib.import_module(f"megatrain.cli.{name.replace('-', '_')}").add_parser(
        commands := parser.add_subparsers()
    )
    known = set(commands.choices[name]._option_string_actions)
    for inner in commands.choices[name]._actions:
        if isinstance(inner, argparse._SubParsersAction):
            for each in inner.choices.values():
                known |= set(each._option_string_actions)
    assert option in known, f"{name} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_and_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for _, block in blocks(page):
        for line in block.splitlines():
            if match := re.match(r"\s*make ([a-z][\w-]*)", line):
                assert re.search(rf"^{match[1]}:", makefile, re.MULTILINE), line
            if match := re.match(r"\s*python3? ((?:examples|benchmarks|scripts)/\S+\.py)", line):
                assert (ROOT / match[1]).is_file(), line


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.name
)
def test_python_and_toml_of_a_page_are_those_of_the_code(page: Path, tmp_path: Path) -> None:
    for language, block in blocks(page):
        if language == "python" and not block.startswith(">>>"):  # see test_doctests.py
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megacore"):
                    module = importlib.import_module(node.module or "")
                    for name in node.names:
                        assert hasattr(module, name.name), (node.module, name.name)
        elif language == "toml":
            tomllib.loads(block)
            (tmp_path / "block.toml").write_text(block)
            load_config(tmp_path / "block.toml", [])


def setting_names() -> set[str]:
    sections = section_classes()
    keys = {f"{name}.{key}" for name, cls in sections.items() for key in cls.by_key()}
    return keys | set(sections) | {f"megacore.{name}" for name in sections}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.name
)
def test_settings_in_running_text_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # it names former ones
        return
    known = setting_names()
    sections = "|".join(sorted({name.partition(".")[0] for name in known} - {"megacore"}))
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`\n]+)`", text):
        for key in re.findall(rf"^(?:--)?((?:{sections})\.[a-z_.0-9]+)(?= ?=|$)", span):
            if not key.endswith(FILES) and not key.startswith(NO_SETTINGS):
                assert key in known, key


def test_pictures_are_those_of_the_commands_above_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = [command for command in SHOWN if "--svg docs/images/" in command.text]
    assert len(drawn) >= 3
    for command in drawn:
        target = Path(command.words[-1])
        target.parent.mkdir(parents=True, exist_ok=True)
        assert main(command.words) == 0
        assert target.read_text() == (ROOT / target).read_text(), command.text


def test_pages_and_commands_are_found() -> None:
    assert len(SHOWN) > 80
    assert {command.words[0] for command in SHOWN} == set(COMMANDS)


@pytest.mark.parametrize(
    "line",
    [
        "megacore trian examples/demo.toml",
        "megacore train examples/demo.toml --parallel.tpp=2",
        "torchrun --nproc-per-node 4 -m megacore train examples/demo.toml --steps 3",
        "megacore plan examples/demo.toml --gpu 8",
    ],
)
def test_a_wrong_command_is_found(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```console\n$ {line}\n```\n")
    [command] = commands(page)
    with pytest.raises(ValueError, match="unknown"):
        check_settings(command, tmp_path)
