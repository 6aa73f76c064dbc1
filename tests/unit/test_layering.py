"""Includes and imports point down only (docs/architecture: base <- ... <- cli), without circles."""

from __future__ import annotations

import ast
import re
import sys
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
    "data": {"base"},
}

# Folders of cpp/src/pipeline and of its public headers; "" is the ground that they share.
PIPELINE_MAY_INCLUDE = {
    "": {""},
    "schedules": {"", "schedules"},
    "program": {"", "program"},
    "bounds": {"", "bounds"},
    "search": {"", "schedules", "program", "bounds", "search"},
}

# Each layer may import every layer that is in an earlier row, and itself. The trainer imports the
# engine; the engine imports nothing of the trainer.
ENGINE_LAYERS = [
    {"_core", "_cuda", "_ops"},
    {"errors", "host_values", "lazy", "options", "suggest"},
    {"ops", "calls"},
    {"parallel"},
    {"pipeline", "buffers", "graphs"},
    {"optim", "moe"},
    {"qualification"},
]
TRAINER_LAYERS = [
    {"daemon", "files", "routing_trace"},
    {"config", "hang", "hf_folder", "view"},
    {"hf_quantized", "launch", "models"},
    {"data", "report"},
    {"checkpoint", "plan"},
    {"hf"},
    {"generation"},
    {"train", "echo_study"},
    {"api", "dry_run"},
    {"cli"},
]
# `python -m megacore` and the console script are the trainer's command.
DOOR = "megacore/__main__.py"
PACKAGES = {"megacore": ENGINE_LAYERS, "megatrain": TRAINER_LAYERS}
LEVEL = {
    f"{package}.{name}": level
    for level, (package, names) in enumerate(
        (package, names) for package, rows in PACKAGES.items() for names in rows
    )
    for name in names
}


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


def imported_names(text: str) -> set[str]:
    """Full names that a module imports, inside functions, for annotations and by string too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0]
            if isinstance(first, ast.JoinedStr):  # f"megacore.{name}" is any of its modules
                first = first.values[0]
            if isinstance(first, ast.Constant):
                names.add(str(first.value))
    return names


def room_of(name: str) -> str:
    """The package and its folder or module, such as megacore.ops, of a full name."""
    return ".".join(name.split(".")[:2])


def python_violations(room: str, text: str) -> list[str]:
    """Rooms that a module of a room must not import."""
    found = {room_of(name) for name in imported_names(text)}
    above = {name for name in found if LEVEL.get(name, -1) >= LEVEL[room] and name != room}
    if room.startswith("megacore."):
        above |= {name for name in found if name.split(".")[0] == "megatrain"}
    return sorted(above)


def imports_of(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Which of the modules each one imports, also inside functions, by string and for annotations.

    Args:
        texts: Source by name of the module; a package is its ``__init__``.
    """
    return {
        module: {
            name if name in texts else name.rpartition(".")[0] for name in imported_names(text)
        }
        & texts.keys() - {module}
        for module, text in texts.items()
    }


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


def python_sources() -> dict[str, str]:
    """Text by path below python/."""
    root = ROOT / "python"
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def test_python_imports_point_down() -> None:
    for path, text in python_sources().items():
        room = ".".join(path.removesuffix(".py").split("/")[:2])
        if room in LEVEL:
            assert not python_violations(room, text), path
        else:
            faces = {f"{package}/__init__.py" for package in PACKAGES}
            assert path in {DOOR, *faces}, f"{path} belongs to no layer"


def test_the_engine_needs_torch_and_numpy_alone() -> None:
    known = {"megacore", "numpy", "torch", "transformer_engine", *sys.stdlib_module_names}
    for path, text in python_sources().items():
        if path.startswith("megacore/") and path != DOOR:
            assert {name.split(".")[0] for name in imported_names(text)} <= known, path


def test_no_modules_import_one_another() -> None:
    texts = {
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): text
        for path, text in python_sources().items()
    }
    assert len(texts) > 100
    # The faces of packages import their modules by name, on first use.
    assert not circle({name: text for name, text in texts.items() if name not in PACKAGES})


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
    sources["pipeline/search/instance.h"] += '#include "search/list_scheduler.h"\n'
    circle = include_circle(sources)
    assert {"pipeline/search/instance.h", "pipeline/search/list_scheduler.h"} <= set(circle)


def test_planted_upward_imports_are_found() -> None:
    violations = python_violations
    assert violations("megacore.parallel", "from megacore.moe.layer import MoELayer") == [
        "megacore.moe"
    ]
    assert violations("megacore.pipeline", "import megacore.buffers.plan") == ["megacore.buffers"]
    assert violations("megacore.ops", "from megatrain import config") == ["megatrain.config"]
    assert violations("megatrain.data", "from megatrain import cli") == ["megatrain.cli"]
    assert not violations("megatrain.data", "from megacore import moe")
    assert violations("megacore.moe", 'import_module("megatrain.view")') == ["megatrain.view"]


def test_cpp_core_knows_neither_torch_nor_cuda_nor_python() -> None:
    for folder in ("include", "src"):
        for path in (ROOT / "cpp" / folder).rglob("*"):
            if path.suffix in {".h", ".cc"}:
                text = path.read_text()
                assert not re.search(
                    r"#include [<\"](torch|ATen|c10|cuda|pybind11|Python)", text
                ), path
