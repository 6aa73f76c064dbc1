"""What gpu_check.py does on a machine with a GPU, as steps, and their order."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_run import ROOT, Step

REQUIREMENTS = (
    *("scikit-build-core", "pybind11", "ninja", "cmake", "numpy", "pydantic", "rich"),
    *("safetensors", "tomli-w", "pytest", "hypothesis"),
)
SMALL_CASES = "tests/gpu/test_small_cases.py"
NO_SANITIZER = (
    "compute-sanitizer is not installed here; it is part of the CUDA toolkit and of the wheel "
    "nvidia-cuda-sanitizer-api"
)
FOUND_ERRORS = 9  # exit code of compute-sanitizer, unlike any of pytest's
# Seconds for files of tests and for benchmarks, where it is not the usual limit. What a test starts
# has a shorter limit of its own.
LIMITS = {
    **{"bench_gpu_grouped_gemm": 110.0, "bench_gpu_tokens": 60.0, "bench_gpu_adamw": 25.0},
    **{"test_shared_gpu": 240.0, "test_graph_training": 150.0, "test_training": 120.0},
    "test_launch_nccl": 130.0,
}
# Tests, trials and benchmarks by value per second; those of a group run at a time. The first groups
# answer within 100 s whether kernels are right, and whether a model trains with them. Files of
# tests that are not named run in the group without names. Peers and clones run alone: they wait for
# one another.
ORDER = (
    ("tests", ("test_small_cases",)),
    ("trials", ("qualification", "kernels_in_training")),
    ("tests", ("test_training", "test_moe_layer")),
    (
        "tests",
        (
            *("test_grouped_gemm", "test_fp8", "test_token_kernels", "test_layer_kernels"),
            "test_plan_kernel",
        ),
    ),
    ("benchmarks", ("bench_gpu_tokens",)),
    ("benchmarks", ("bench_gpu_grouped_gemm",)),
    ("tests", ("test_peer_kernels",)),
    ("tests", ("test_clone_kernels",)),
    ("tests", ("test_shared_gpu",)),
    ("tests", ("test_graphs", "test_graph_training")),
    ("benchmarks", ("bench_graphs",)),
    ("tests", ()),
    ("benchmarks", ("bench_gpu_adamw",)),
)
# The shape that published figures are for: E=256, N=4096, K=6144.
ARGUMENTS = {
    "bench_gpu_grouped_gemm": ("--anchor", "--seconds", "100"),
    "bench_gpu_adamw": ("--numel", "100e6"),
}
_HAS_KERNELS = """
import sys
from megacore.ops import cuda_kernels, has_cuda_kernels
of, arch = sys.argv[1:]
archs = getattr(cuda_kernels(), of)() if has_cuda_kernels() else []
what = "grouped products" if of == "grouped_gemm_archs" else "kernels"
sys.exit(0 if arch in archs else
         f"no {what} for sm_{arch} in this build, which has {archs}: "
         "set CUTLASS_ROOT and build again")
"""
# Compute capabilities with grouped products.
_GROUPED = ((9, 0), (10, 0))
_PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index")


def requirement_steps() -> list[Step]:
    """Install what is missing from the folder of wheels, if there is one."""
    wheels = wheel_folder()
    if wheels is None:
        return []
    command = [*_PIP, "--find-links", str(wheels), *REQUIREMENTS]
    return [Step(name="requirements", command=command, limit_s=60.0)]


def wheel_folder() -> Path | None:
    """The folder WHEELS, or the one of the bundle (``make gpu-bundle``)."""
    folder = Path(os.environ.get("WHEELS") or ROOT / "wheels").resolve()
    return folder if folder.is_dir() else None


def wheel_steps() -> list[Step]:
    """Install the wheel that was carried along and import it; empty without one."""
    folder = wheel_folder()
    wheels = sorted(folder.glob("megacore-*.whl")) if folder else []
    if not wheels:
        return []
    command = [*_PIP, "--no-deps", "--force-reinstall", str(wheels[-1])]
    imports = "import torch, megacore._core, megacore._cuda"
    return [
        Step(name="wheel", command=command, limit_s=60.0),
        Step(name="import", command=[sys.executable, "-c", imports], limit_s=60.0),
    ]


def build_steps(capability: Sequence[int], limit_s: float) -> list[Step]:
    """Compile and install this."""
    settings = ["MEGACORE_CUDA=ON"]
    if capability:
        settings.append(f"MEGACORE_CUDA_ARCHS={_arch(capability)}")
    defines = [f"--config-settings=cmake.define.{setting}" for setting in settings]
    env = {}
    carried = ROOT / "cutlass"
    root = os.environ.get("CUTLASS_ROOT") or (str(carried) if carried.is_dir() else "")
    if root:  # the build runs elsewhere
        env["CUTLASS_ROOT"] = str(Path(root).resolve())
    command = [*_PIP, "--no-deps", "--no-build-isolation", *defines, "."]
    return [Step(name="build", command=command, limit_s=limit_s, env=env)]


def kernel_steps(capability: Sequence[int]) -> list[Step]:
    """Fail where the build has no kernels for the device, or lacks grouped ones that it could."""
    if not capability:
        return []
    of = "grouped_gemm_archs" if tuple(capability) in _GROUPED else "compiled_archs"
    command = [sys.executable, "-c", _HAS_KERNELS, of, _arch(capability)]
    return [Step(name="kernels", command=command, limit_s=60.0)]


def _arch(capability: Sequence[int]) -> str:
    """Return the architecture of a compute capability; from 9.0 on, code runs on its own only."""
    major, minor = capability
    return f"{major}{minor}a" if major >= 9 else f"{major}{minor}"


def test_steps() -> list[Step]:
    """One step per file of tests, without the file; see `Runner.run_tests`."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    return [
        Step(name=file.stem, command=_tests_command(), limit_s=LIMITS.get(file.stem, 90.0))
        for file in files
    ]


def _tests_command() -> list[str]:
    plugin = ["-p", "scripts.gpu_outcomes", "-o", "faulthandler_timeout=70"]
    return [*_pytest(), *plugin]


def again_steps(tests: Sequence[str]) -> list[tuple[Step, str]]:
    """One process per test; warnings of another version of torch are no reason to fail then."""
    command = [*_tests_command(), "-W", "default"]
    return [
        (Step(name=f"again {number}", command=command, limit_s=60.0), test)
        for number, test in enumerate(tests, 1)
    ]


def _pytest(*arguments: str) -> list[str]:
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--durations=3"]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def find_sanitizer() -> str | None:
    """compute-sanitizer, from the path, a CUDA toolkit or the wheel nvidia-cuda-sanitizer-api."""
    if found := shutil.which("compute-sanitizer"):
        return found
    folders = [Path(path) for path in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if path]
    candidates = [folder / "bin" / "compute-sanitizer" for folder in folders]
    for path in dict.fromkeys(sys.path):
        candidates += sorted(Path(path or ".").glob("nvidia/*/bin/compute-sanitizer"))
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), None)


def sanitizer_steps(program: str) -> list[Step]:
    """Small cases of all kernels.

    racecheck looks at shared memory. It is no judge of CUTLASS's kernels, whose loads into shared
    memory are ordered by barriers in it.
    """
    steps = []
    for tool, selected in (("memcheck", "small"), ("racecheck", "small and not grouped")):
        options = ["--tool", tool, "--error-exitcode", str(FOUND_ERRORS), "--print-limit", "20"]
        steps.append(
            Step(
                name=tool,
                command=[program, *options, *_pytest(SMALL_CASES, "-k", selected)],
                limit_s=150.0,
                # Each tensor is memory of its own, so that a step over its end is seen.
                env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            )
        )
    return steps


def benchmark_steps(results: Path) -> list[Step]:
    """The benchmarks; each leaves its numbers in a folder as they come."""
    steps = []
    files = (ROOT / "benchmarks").glob("bench_gpu_*.py")
    for file in [*sorted(files), ROOT / "benchmarks" / "bench_graphs.py"]:
        folder = results / file.stem
        words = [str(file.relative_to(ROOT)), *ARGUMENTS.get(file.stem, ()), "--out", str(folder)]
        limit = LIMITS.get(file.stem, 75.0)
        command = [sys.executable, *words]
        env = {"MEGACORE_ROWS": "1"}
        steps.append(Step(name=file.stem, command=command, limit_s=limit, results=folder, env=env))
    return steps


def trial_steps(results: Path) -> list[Step]:
    """Every kernel against torch, with the times of both; a training with kernels, and without."""
    found = []
    for name, limit_s, words in (
        ("qualification", 75.0, ["scripts/gpu_qualify.py"]),
        (
            "kernels_in_training",
            60.0,
            [
                *("scripts/gpu_curves.py", "--compare", "kernels", "--steps", "20"),
                *("--tolerance", "3e-2"),
            ],
        ),
    ):
        folder = results / name
        command = [sys.executable, *words, "--out", str(folder)]
        found.append(Step(name=name, command=command, limit_s=limit_s, results=folder))
    return found


def curve_steps(results: Path) -> list[Step]:
    """Losses of trainings in bf16 on the GPU: graphs against eager, and against the CPU."""
    folder = results / "curves"
    command = [sys.executable, "scripts/gpu_curves.py", "--out", str(folder)]
    return [Step(name="curves", command=command, limit_s=480.0, results=folder)]
