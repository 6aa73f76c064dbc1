"""The extension modules tie to no torch version and load on a machine without a GPU or driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import megacore._core


def module_files() -> list[Path]:
    return sorted(Path(megacore._core.__file__).parent.glob("_c*.so"))


@pytest.mark.parametrize("path", module_files(), ids=lambda path: path.name.split(".")[0])
def test_no_libtorch_symbol_is_imported(path: Path) -> None:
    output = subprocess.run(
        ["nm", "-D", "--demangle", path], check=True, capture_output=True, text=True
    ).stdout
    assert "PyInit" in output
    assert not [line for line in output.splitlines() if "c10::" in line or " at::" in line]


@pytest.mark.parametrize("path", module_files(), ids=lambda path: path.name.split(".")[0])
def test_no_driver_or_cuda_runtime_is_needed_to_load(path: Path) -> None:
    needed = subprocess.run(
        ["readelf", "-d", path], check=True, capture_output=True, text=True
    ).stdout
    assert "libcuda.so" not in needed
    assert "libcudart.so" not in needed
    assert "libtorch" not in needed


@pytest.mark.parametrize("path", module_files(), ids=lambda path: path.name.split(".")[0])
def test_module_imports_without_torch(path: Path) -> None:
    name = path.name.split(".")[0]
    code = (
        "import importlib, sys; sys.modules['torch'] = None; "
        f"importlib.import_module('megacore.{name}')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
