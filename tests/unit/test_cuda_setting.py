"""When device code is built: the CMake configuration with compilers and GPUs that are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# As `make`: that of the virtual environment first; one of a distribution may be too old for CUDA.
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")

pytestmark = pytest.mark.skipif(CMAKE is None, reason="needs cmake")


class Machine:
    """A machine with an nvcc that only notes that it was started, and perhaps GPUs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = folder / "nvcc_was_started"
        self._add("nvcc", f"touch {self.started}; exit 1")
        self._add("nvidia-smi", "exit 9")

    def _add(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def add_gpus(self, *capabilities: str) -> None:
        self._add("nvidia-smi", "printf '" + "".join(c + "\\n" for c in capabilities) + "'")

    def add_toolkit(self, *known: str) -> None:
        """Let nvcc work, of a toolkit that knows some architectures."""
        lines = "".join(f"compute_{arch}\\n" for arch in known)
        self._add(
            "nvcc", f'case "$*" in *--list-gpu-arch*) printf "{lines}";; *) {NVCC} "$@";; esac'
        )

    def configure(self, *settings: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k not in ("CUDACXX", "CUDA_HOME")}
        return subprocess.run(
            [
                str(CMAKE),
                *("-S", str(ROOT), "-B", str(self.folder / "build")),
                *("-DMEGACORE_PYTHON=OFF", *(f"-D{setting}" for setting in settings)),
            ],
            env={**env, "PATH": f"{self.folder}:{env['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_without_a_gpu_no_device_code_is_built_though_nvcc_is_there(machine: Machine) -> None:
    done = machine.configure("MEGACORE_CUDA=AUTO")
    assert done.returncode == 0, done.stderr
    assert not machine.started.exists()
    (line,) = [line for line in done.stdout.splitlines() if "CUDA kernels left out" in line]
    assert "no GPU of compute capability 8.0 or newer" in line
    assert "MEGACORE_CUDA=ON pip install ." in line


def test_gpus_that_are_too_old_are_left_out(machine: Machine) -> None:
    machine.add_gpus("7.5")
    done = machine.configure("MEGACORE_CUDA=AUTO", "MEGACORE_CUDA_ARCHS= ")
    assert done.returncode == 0, done.stderr
    assert not machine.started.exists()
    assert "compute capability 8.0 or newer" in done.stdout


def test_off_is_silent(machine: Machine) -> None:
    machine.add_gpus("9.0")
    done = machine.configure("MEGACORE_CUDA=OFF")
    assert done.returncode == 0
    assert not machine.started.exists()
    assert "left out" not in done.stdout + done.stderr


@pytest.mark.parametrize("setting", ["MEGACORE_CUDA=ON", "MEGACORE_CUDA_ARCHS=90a"])
def test_device_code_is_built_where_that_is_asked_for(machine: Machine, setting: str) -> None:
    machine.configure(setting)
    assert machine.started.exists()


def test_an_nvcc_that_does_not_work_is_an_error_if_asked_for(machine: Machine) -> None:
    done = machine.configure("MEGACORE_CUDA=ON")
    assert done.returncode != 0
    assert "no CUDA compiler works here" in done.stderr


def test_gpus_at_hand_choose_the_architectures(machine: Machine) -> None:
    machine.add_gpus("9.0", "8.0", "7.5", "9.0")
    done = machine.configure("MEGACORE_CUDA=AUTO")
    assert machine.started.exists()
    assert "CUDA kernels wanted for 90a;80" in done.stdout
    assert "CUDA kernels left out" in done.stderr  # this nvcc does not work


@needs_nvcc
@pytest.mark.parametrize(
    ("known", "gpu", "built"),
    [
        (("80", "90", "100"), "8.9", "90a;100a"),  # the GPU is newer than the toolkit
        (("80", "89", "90"), "8.9", "89;90a"),  # it is not, and 100a is
        (("80", "90", "100", "120"), "12.0", "120a;90a;100a"),
    ],
)
def test_on_builds_for_the_gpus_at_hand_too_as_far_as_the_toolkit_knows_them(
    machine: Machine, known: tuple[str, ...], gpu: str, built: str
) -> None:
    machine.add_gpus(gpu)
    machine.add_toolkit(*known)
    done = machine.configure("MEGACORE_CUDA=ON", "MEGACORE_GROUPED_GEMM=OFF")
    assert done.returncode == 0, done.stderr
    assert f"CUDA kernels are built for {built}\n" in done.stdout
    missing = {"89": "8.9", "100": "10.0", "120": "12.0"}.items()
    for arch, capability in missing:
        asked = arch == "100" or capability == gpu
        assert (f"No CUDA kernels for sm_{arch}" in done.stderr) == (asked and arch not in known)


@needs_nvcc
def test_a_gpu_newer_than_the_toolkit_leaves_the_rest_of_the_build(machine: Machine) -> None:
    machine.add_gpus("10.3")
    machine.add_toolkit("80", "90", "100")
    done = machine.configure("MEGACORE_CUDA=AUTO")
    assert done.returncode == 0, done.stderr
    assert "No CUDA kernels for sm_103a" in done.stderr
    assert "_cuda no" in done.stdout


def test_a_setting_that_is_none_is_refused(machine: Machine) -> None:
    done = machine.configure("MEGACORE_CUDA=yes")
    assert done.returncode != 0
    assert "must be AUTO, ON or OFF, got 'yes'" in " ".join(done.stderr.split())
