"""The extension modules tie to no torch version and load on a machine without a GPU or driver.

`_core` does not link torch. `_ops` and `_cuda` link libtorch_cpu.so for functions of torch's stable
C interface, of which they may use those that torch 2.11 has.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import megacore._core
import megacore._ops

FUNCTIONS = Path(__file__).parents[1] / "golden" / "torch_2_11_functions.txt"
CORE, OPS = Path(megacore._core.__file__), Path(megacore._ops.__file__)


def module_files() -> list[Path]:
    """Files of all modules; that of GPUs is where there is nvcc."""
    return sorted(CORE.parent.glob("_*.so"))


def torch_module_files() -> list[Path]:
    return [path for path in module_files() if path != CORE]


def needed_libraries(path: Path) -> str:
    return subprocess.run(
        ["readelf", "-d", path], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("path", module_files(), ids=lambda path: path.name.split(".")[0])
def test_no_libtorch_symbol_is_imported(path: Path) -> None:
    output = subprocess.run(
        ["nm", "-D", "--demangle", path], check=True, capture_output=True, text=True
    ).stdout
    assert "PyInit" in output
    assert not [line for line in output.splitlines() if "c10::" in line or " at::" in line]


@pytest.mark.parametrize("path", module_files(), ids=lambda path: path.name.split(".")[0])
def test_no_driver_or_cuda_runtime_is_needed_to_load(path: Path) -> None:
    assert "libcuda" not in needed_libraries(path)


def test_the_core_knows_no_torch() -> None:
    assert "libtorch" not in needed_libraries(CORE)
    code = "import sys; sys.modules['torch'] = None; import megacore._core"
    subprocess.run([sys.executable, "-c", code], check=True)


def undefined_symbols(path: Path) -> set[str]:
    output = subprocess.run(
        ["nm", "-D", "--undefined-only", path], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[-1].partition("@")[0] for line in output.splitlines()}


@pytest.mark.parametrize("path", torch_module_files(), ids=lambda path: path.name.split(".")[0])
def test_operations_use_functions_of_the_oldest_supported_torch_only(path: Path) -> None:
    # The names were read from libtorch_cpu.so of torch 2.11.0 for Linux x86-64.
    known = set(FUNCTIONS.read_text().split())
    used = undefined_symbols(path)
    assert "torch_library_impl" in used
    assert {name for name in used if re.search("torch|c10|2at", name)} <= known


@pytest.mark.parametrize("path", torch_module_files(), ids=lambda path: path.name.split(".")[0])
def test_operations_name_the_library_of_torch_and_no_folder_of_it(path: Path) -> None:
    output = needed_libraries(path)
    needed = re.findall(r"NEEDED.*\[(.*)\]", output)
    assert [name for name in needed if "torch" in name or "c10" in name] == ["libtorch_cpu.so"]
    assert "RPATH" not in output
    assert "RUNPATH" not in output


def test_operations_are_registered_before_or_after_their_schemas() -> None:
    for order in ("megacore._ops, megacore.ops.dense", "megacore.ops.dense, megacore._ops"):
        code = (
            f"import torch, {order}; from megacore.ops.dense import rms_norm; "
            "assert rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist() == [[1.0] * 4]"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


def test_operations_without_torch_are_refused() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import megacore._ops"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "ImportError: libtorch_cpu.so" in result.stderr
