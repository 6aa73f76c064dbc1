"""Includes and imports point down only (docs/architecture: base <- ... <- cli), without circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CPP_MAY_INCLUDE = {
    "base": set(),
    "parallel": {"base"},
    "pipeline": {"base", "parallel"},
    "buffer": {"base", "parallel"},
    "moe": {"base", "parallel"},
    "graph": {"base", "parallel"},
}

# Each layer may import every layer that stands in an earlier row, and itself.
PYTHON_LAYERS = [
    {"_core", "_cuda"},
    {"errors", "files"},
    {"ops", "config", "launch"},
    {"parallel"},
    {"pipeline", "buffers", "graphs"},
    {"optim", "moe", "view"},
    {"models"},
    {"data", "report"},
    {"checkpoint", "plan"},
    {"train", "echo_study"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(PYTHON_LAYERS) for name in names}


def cpp_violations(area: str, text: str) -> list[str]:
    included = re.findall(r'#include "megacore/(\w+)/', text)
    return [name for name in included if name != area and name not in CPP_MAY_INCLUDE[area]]


def python_violations(package: str, text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megacore"):
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [
                alias.name.split(".")[1]
                for alias in node.names
                if alias.name.startswith("megacore.")
            ]
        for name in names:
            known = name in LEVEL
            below = known and LEVEL[name] < LEVEL[package]
            if known and name != package and not below:
                found.append(name)
    return found


def imports_of(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Which of the modules each one imports, also inside functions and for annotations only.

    Args:
        texts: Source by name of the module; a package is its ``__init__``.
    """
    graph: dict[str, set[str]] = {}
    for module, text in texts.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                full_names = [f"{node.module}.{alias.name}" for alias in node.names]
                names |= {name if name in texts else node.module for name in full_names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        graph[module] = {name for name in names if name in texts}
    return graph


def circle(texts: Mapping[str, str]) -> list[str]:
    """Modules that import one another in this order, the first again at the end; or none."""
    try:
        TopologicalSorter(imports_of(texts)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_cpp_includes_point_down() -> None:
    for path in sorted((ROOT / "cpp").rglob("*")):
        area = path.parent.name
        if path.suffix in {".h", ".cc"} and area in CPP_MAY_INCLUDE:
            assert not cpp_violations(area, path.read_text()), path


def test_python_imports_point_down() -> None:
    package_root = ROOT / "python" / "megacore"
    for path in sorted(package_root.rglob("*.py")):
        parts = path.relative_to(package_root).with_suffix("").parts
        if parts[0] in LEVEL:
            assert not python_violations(parts[0], path.read_text()), path
        else:
            assert parts[0] in {"__init__", "__main__"}, f"{path} belongs to no layer"


def test_no_modules_import_one_another() -> None:
    package_root = ROOT / "python" / "megacore"
    texts = {
        ".".join(("megacore", *path.relative_to(package_root).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path.read_text()
        for path in package_root.rglob("*.py")
    }
    assert len(texts) > 100
    assert not circle(texts)


def test_planted_circles_are_found() -> None:
    late = "def f():\n    from megacore.a.y import g\n"
    typed = "if TYPE_CHECKING:\n    from megacore.a import x\n"
    assert circle({"megacore.a.x": late, "megacore.a.y": typed})
    assert circle({"megacore.a": "import megacore.a.x", "megacore.a.x": "from megacore.a import f"})
    assert not circle({"megacore.a.x": late, "megacore.a.y": "from megacore.a import z"})


@pytest.mark.parametrize("area", ["pipeline", "buffer"])
def test_a_planted_sibling_include_is_found(area: str) -> None:
    sibling = {"pipeline": "buffer", "buffer": "pipeline"}[area]
    assert cpp_violations(area, f'#include "megacore/{sibling}/x.h"') == [sibling]


def test_planted_upward_imports_are_found() -> None:
    assert python_violations("parallel", "from megacore.models.gpt import GPTChunk") == ["models"]
    assert python_violations("pipeline", "import megacore.buffers.plan") == ["buffers"]
    assert python_violations("ops", "from megacore import config") == ["config"]


def test_cpp_core_knows_neither_torch_nor_cuda_nor_python() -> None:
    for folder in ("include", "src"):
        for path in (ROOT / "cpp" / folder).rglob("*"):
            if path.suffix in {".h", ".cc"}:
                text = path.read_text()
                assert not re.search(
                    r"#include [<\"](torch|ATen|c10|cuda|pybind11|Python)", text
                ), path
