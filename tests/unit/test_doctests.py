"""Every example in a docstring or on a page of docs runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import megacore
import megatrain

DOCS = Path(__file__).parents[2] / "docs"


def module_names() -> list[str]:
    return [
        module.name
        for package in (megacore, megatrain)
        for module in pkgutil.walk_packages(package.__path__, prefix=f"{package.__name__}.")
        if not module.name.split(".")[-1].startswith("_")  # native modules and __main__
    ]


def run_examples(module: ModuleType) -> tuple[int, int]:
    """Examples that failed, and examples that ran."""
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    return result.failed, result.attempted


@pytest.mark.parametrize("name", module_names())
def test_examples_of_a_module_are_true(name: str) -> None:
    assert run_examples(importlib.import_module(name))[0] == 0


@pytest.mark.parametrize(
    "page",
    [page for page in sorted(DOCS.rglob("*.md")) if page.name not in ("buffers.md", "echo.md")],
    ids=lambda page: page.name,
)
def test_examples_of_a_page_are_true(page: Path) -> None:  # for the two see test_own_loop.py and
    result = doctest.testfile(str(page), module_relative=False)  # test_simulate.py
    assert result.failed == 0


def test_a_false_example_is_found() -> None:
    module = ModuleType("wrong", ">>> 1 + 1\n3\n")
    assert run_examples(module) == (1, 1)


def test_there_are_examples_to_run() -> None:
    count = sum(run_examples(importlib.import_module(name))[1] for name in module_names())
    assert count > 100
