"""The commands of the Makefile, as ``make -n`` prints them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def shown_commands(*arguments: str) -> list[list[str]]:
    """The commands that make would run, were everything out of date, as words."""
    # What a make that runs this test was given is not meant for this one.
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "WERROR"}
    done = subprocess.run(
        ["make", "-n", "-B", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def install_commands(*arguments: str) -> list[list[str]]:
    """What ``make install build`` runs to install the package."""
    commands = shown_commands("install", "build", *arguments)
    return [words for words in commands if "install" in words and words[-1] == "."]


@pytest.mark.parametrize("arguments", [(), ("WERROR=ON",)])
def test_all_installs_compile_with_the_same_settings(arguments: tuple[str, ...]) -> None:
    commands = install_commands(*arguments)
    assert len(commands) == 2
    plain, editable = commands
    without = [[word for word in command if word != "-e"] for command in (plain, editable)]
    assert without[0] == without[1]
    assert "-e" in editable


def test_warnings_are_errors_where_that_is_asked_for() -> None:
    setting = "--config-settings=cmake.define.MEGACORE_WERROR=ON"
    assert all(setting in command for command in install_commands("WERROR=ON"))
    assert not any(setting in command for command in install_commands())


def test_continuous_integration_asks_for_it() -> None:
    assert "export WERROR=ON" in (ROOT / ".ci" / "run").read_text()


def programs(target: str) -> set[str]:
    """Programs of the virtual environment that check sources for a target."""
    known = {"ruff", "mypy", "clang-format", "codespell"}
    return {Path(words[0]).name for words in shown_commands(target) if words} & known


def test_quick_lint_is_lint_without_a_build() -> None:
    assert programs("lint") == programs("lint-quick") | {"mypy"}
    quick = shown_commands("lint-quick")
    assert not any("torch" in words or "cmake" in words for words in quick)
    assert not any("install" in words and words[-1] == "." for words in quick)


def test_commits_wait_for_the_quick_lint_only() -> None:
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    assert "entry: make lint-quick\n" in config
