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
    "layers": {"base", "moe"},
    "graph": {"base", "parallel"},
}

# Folders of cpp/src/pipeline and of its public headers; "" is the ground that they share.
PIPELINE_MAY_INCLUDE = {
    "": {""},
    "schedules": {"", "schedules"},
    "program": {"", "program"},
    "bounds": {"", "bounds"},
    "search": {"", "schedules", "program", "bounds", "search"},
}

# Each layer may import every layer that stands in an earlier row, and itself.
PYTHON_LAYERS = [
    {"_core", "_cuda"},
    {"errors", "files", "lazy"},
    {"ops", "config", "launch"},
    {"parallel"},
    {"pipeline", "buffers", "graphs"},
    {"optim", "moe", "view"},
    {"models"},
    {"data", "report"},
    {"checkpoint", "plan"},
    {"train", "echo_study"},
    {"api"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(PYTHON_LAYERS) for name in names}


def cpp_violations(area: str, text: str) -> list[str]:
    included = re.findall(r'#include "megacore/(\w+)/', text)
    return [name for name in included if name != area and name not in CPP_MAY_INCLUDE[area]]


def native_sources() -> dict[str, str]:
    """Text by path, as an include directive writes it: megacore/AREA/x.h, or AREA/x.cc in src."""
    return {
        str(path.relative_to(ROOT / "cpp" / folder)): path.read_text()
        for folder in ("include", "src")
        for path in sorted((ROOT / "cpp" / folder).rglob("*"))
        if path.suffix in {".h", ".cc"}
    }


def area_of(path: str) -> tuple[str, str]:
    """The area of a native source and its folder inside, or ""."""
    parts = Path(path.removeprefix("megacore/")).parent.parts
    return parts[0], "/".join(parts[1:])


def quoted_includes(path: str, text: str, known: set[str]) -> list[str]:
    """Private headers are included relative to cpp/src/pipeline or to the file."""
    found = []
    for name in re.findall(r'#include "([^"]+)"', text):
        candidates = [name, f"pipeline/{name}", str(Path(path).parent / name)]
        found += [candidate for candidate in candidates if candidate in known][:1]
    return found


def pipeline_violations(sources: dict[str, str]) -> list[tuple[str, str]]:
    """Includes from one folder of the pipeline in another that it must not know."""
    return [
        (path, name)
        for path, text in sources.items()
        if area_of(path)[0] == "pipeline"
        for name in quoted_includes(path, text, set(sources))
        if area_of(name)[0] == "pipeline"
        and area_of(name)[1] not in PIPELINE_MAY_INCLUDE[area_of(path)[1]]
    ]


def include_circle(sources: dict[str, str]) -> list[str]:
    graph = {path: quoted_includes(path, text, set(sources)) for path, text in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


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
    for path, text in native_sources().items():
        assert not cpp_violations(area_of(path)[0], text), path


def test_pipeline_folders_include_only_what_lies_below() -> None:
    assert not pipeline_violations(native_sources())


def test_no_circle_of_native_includes() -> None:
    assert not include_circle(native_sources())


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


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("pipeline/action.cc", "schedules/generate.h"),
        ("pipeline/schedules/gpipe.cc", "megacore/pipeline/program/lowering.h"),
        ("pipeline/bounds/lower_bound.cc", "search/instance.h"),
        ("megacore/pipeline/schedule.h", "megacore/pipeline/search/auto_schedule.h"),
    ],
)
def test_a_planted_upward_include_in_the_pipeline_is_found(path: str, include: str) -> None:
    sources = native_sources()
    sources[path] += f'#include "{include}"\n'
    found = include if include.startswith("megacore/") else f"pipeline/{include}"
    assert pipeline_violations(sources) == [(path, found)]


def test_a_planted_circle_of_includes_is_found() -> None:
    sources = native_sources()
    sources["pipeline/search/instance.h"] += '#include "search/beam.h"\n'
    circle = include_circle(sources)
    assert {"pipeline/search/instance.h", "pipeline/search/beam.h"} <= set(circle)


def test_planted_upward_imports_are_found() -> None:
    assert python_violations("parallel", "from megatrain.models.gpt import GPTChunk") == ["models"]
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
