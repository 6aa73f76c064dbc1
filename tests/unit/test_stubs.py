"""The hand-written stubs agree with the built modules.

``mypy.stubtest`` finds missing and extra names, but not a renamed or dropped argument of a pybind11
function, since pybind11 keeps signatures only in ``__doc__``. So the argument names are read from
there and compared with the stub.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

STUBS = Path(__file__).parents[2] / "python" / "megacore"
ALLOWLIST = Path(__file__).parents[1] / "support" / "stubtest_allowlist.txt"


def modules() -> list[str]:
    found = ["_core"]
    try:
        importlib.import_module("megacore._cuda")
        found.append("_cuda")
    except ImportError:
        pass
    return found


def documented_arguments(doc: str | None) -> list[list[str]]:
    """Argument names per overload, from lines such as ``f(a: int, *, b: str = 'x') -> int``."""
    overloads = []
    for match in re.finditer(r"^(?:\d+\. )?\w+\((.*)\) -> ", doc or "", re.MULTILINE):
        text = re.sub(r"<[^>]*>", "0", match.group(1))
        tree = ast.parse(f"def f({text}): ...").body[0]
        assert isinstance(tree, ast.FunctionDef)
        overloads.append(argument_names(tree))
    return overloads


def argument_names(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    names = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
    if arguments.kwonlyargs:
        names += ["*", *(a.arg for a in arguments.kwonlyargs)]
    return [name for name in names if name != "self"]


def stub_functions(name: str) -> dict[str, list[list[str]]]:
    """Dotted function name -> argument names per overload, as the stub has them."""
    found: dict[str, list[list[str]]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                decorators = {ast.unparse(d) for d in node.decorator_list}
                if "property" not in decorators:
                    found.setdefault(prefix + node.name, []).append(argument_names(node))

    visit(ast.parse((STUBS / f"{name}.pyi").read_text()).body, "")
    return found


def resolve(module: ModuleType, dotted: str) -> object:
    target: object = module
    for part in dotted.split("."):
        target = inspect.getattr_static(target, part)
    # A staticmethod object has a docstring of its own, not that of its function.
    return target.__func__ if isinstance(target, staticmethod) else target


@pytest.mark.parametrize("name", modules())
def test_arguments_agree_with_the_module(name: str) -> None:
    module = importlib.import_module(f"megacore.{name}")
    compared = 0
    for dotted, overloads in stub_functions(name).items():
        target = resolve(module, dotted)
        documented = documented_arguments(getattr(target, "__doc__", None))
        if re.search(r"__(?!init)\w+__$", dotted) or not documented:
            continue
        assert sorted(documented) == sorted(overloads), dotted
        compared += 1
    assert compared > 0


@pytest.mark.parametrize("name", modules())
def test_names_agree_with_the_module(name: str, tmp_path: Path) -> None:
    # The stubs come from the sources, the module from where the package is installed. Modules with
    # operations of torch need it imported first.
    code = "import sys, torch; from mypy.stubtest import main; sys.exit(main())"
    result = subprocess.run(
        [
            *(sys.executable, "-c", code, f"megacore.{name}"),
            *("--allowlist", ALLOWLIST, "--ignore-unused-allowlist"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(STUBS.parent)},
        check=False,
    )
    assert result.returncode == 0, result.stdout


def test_a_renamed_argument_is_found() -> None:
    doc = "groups(axes: str, *, first: int = 0) -> list[int]\n\nGroups."
    assert documented_arguments(doc) == [["axes", "*", "first"]]
    stub = ast.parse("def groups(axis: str, *, first: int = 0) -> list[int]: ...").body[0]
    assert isinstance(stub, ast.FunctionDef)
    assert argument_names(stub) != documented_arguments(doc)[0]
