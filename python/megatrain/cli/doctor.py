"""``megacore doctor``: capabilities of this machine and this installation."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import resource
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacore.qualification import Verdict
    from megatrain.launch.start import RankContext

GIB = 1 << 30


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "doctor",
        description="Check this machine and this installation.",
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="compare each of our kernels with torch, and time both, on all devices",
    )


def run(args: argparse.Namespace) -> int:
    """Print the facts; exit code 1 if the core, a kernel or the two gloo processes fail."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # Ranks are forked first: a process that has initialized CUDA cannot fork.
    talk = _try_two_processes()
    facts = {
        "megacore": _installation(),
        "torch": _torch(),
        "machine": _machine(),
        "two gloo processes": talk,
    }
    num_faults = 0
    for device, verdict in _verdicts(again=args.kernels).items():
        facts[f"kernels of {device}"] = _judged(device, verdict, whole=args.kernels)
        num_faults += len(verdict.faults)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    healthy = facts["megacore"]["native core"] == "built" and talk["works"] == "yes"
    return 0 if healthy and not num_faults else 1


def _verdicts(*, again: bool) -> dict[str, Verdict]:
    """Return the verdicts on our kernels by device: those that are known, or of a trial now."""
    import torch

    from megacore.ops.cuda_module import runs_kernels
    from megacore.qualification import Sizes, find_verdict, known_verdict

    sizes = Sizes(
        **{"tokens": 4096, "width": 4096, "mlp": 2048, "head_dim": 128, "groups": 8},
        **{"q_per_kv": 4, "experts": 64, "choices": 8, "local_experts": 8},
    )
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        devices += [gpu for gpu in gpus if runs_kernels(gpu)]
    found: dict[str, Verdict] = {}
    for device in devices:
        dtypes = [torch.float32]
        if device.type == "cpu":
            dtypes += [torch.bfloat16, torch.float16]
        elif again:
            dtypes = [torch.bfloat16]
        given = sizes if again and device.type == "cuda" else None
        for dtype in dtypes:
            before = found.get(str(device))
            verdict = known_verdict(device, sizes=given, dtype=dtype)
            if again:
                verdict = find_verdict(device, sizes=given, dtype=dtype, again=before is None)
            if verdict is not None:
                times = {**verdict.times, **(before.times if before else {})}
                found[str(device)] = replace(verdict, times=times)
    return found


def _judged(device: str, verdict: Verdict, *, whole: bool) -> dict[str, str]:
    """Describe what is computed by torch and why; with ``whole``, all operations with times."""
    import torch

    from megacore.ops.kernel_choice import MEASURED
    from megacore.qualification import operation_names

    kind = device.partition(":")[0]
    by_torch = {**verdict.slower(), **verdict.faults}
    shown = {}
    for name in operation_names(kind):
        if name in MEASURED and name not in verdict.times:
            continue  # a run in its dtype measures it
        row = f"torch: {by_torch[name]}" if name in by_torch else "ours"
        ours, other = verdict.times.get(name, (0.0, 0.0))
        if other > 0:
            row += f" ({ours * 1e6:.0f} us, torch {other * 1e6:.0f} us)"
        if whole or name in verdict.faults or name in MEASURED:
            shown[name] = row
    threads = torch.get_num_threads()
    if kind == "cpu":
        shown["threads"] = str(threads)
    return shown


def _installation() -> dict[str, str]:
    facts = {"Python": platform.python_version()}
    try:
        from megacore import _core
        from megacore.ops import cuda_kernels, has_cuda_kernels
    except ImportError as error:
        return {**facts, "native core": f"does not load: {error}"}
    facts |= {"version": _core.__version__, "native core": "built"}
    facts["kernels for CPUs"] = f"for vectors of {_core.vector_bits()} bits"
    if has_cuda_kernels():
        facts["CUDA kernels"] = "built for " + ", ".join(cuda_kernels().compiled_archs())
        facts["grouped products"] = _grouped_products(
            cuda_kernels().grouped_gemm_archs(), cuda_kernels().compiled_archs()
        )
    else:
        facts["CUDA kernels"] = (
            "left out when megacore was installed; with nvcc on PATH, "
            "MEGACORE_CUDA=ON pip install . builds them"
        )
    return facts


def _grouped_products(archs: list[str], compiled: list[str]) -> str:
    from megacore.ops.gemm_cuda import GROUPED_CAPABILITIES

    if archs:
        return "built for " + ", ".join(archs)
    possible = [f"{major}{minor}a" for major, minor in GROUPED_CAPABILITIES]
    if not set(possible) & set(compiled):
        return (
            f"none: they exist for {', '.join(possible)} only, others take one product per expert"
        )
    return "not built (set CUTLASS_ROOT to CUTLASS's headers when megacore is installed)"


def _torch() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    facts = {
        "version": torch.__version__,
        "gloo": _yes(dist.is_gloo_available()),
        "NCCL": _yes(dist.is_nccl_available()),
        "CUDA of torch": torch.version.cuda or "none: a CPU build",
        "GPUs": str(torch.cuda.device_count()) if torch.cuda.is_available() else "none",
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            facts[f"GPU {index}"] = (
                f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, sm_{gpu.major}{gpu.minor}"
            )
            facts[f"kernels of GPU {index}"] = _kernels(index)
    return facts


def _kernels(index: int) -> str:
    import torch

    from megacore.ops.cuda_module import KernelBuild, device_facts
    from megacore.ops.gemm_torch import has_grouped_mm_on
    from megacore.ops.kernel_facts import kernel_text

    device = torch.device("cuda", index)
    has_torch = has_grouped_mm_on(device, torch.bfloat16, 1, 8, 8)
    return kernel_text(KernelBuild.here(), device_facts(device), has_torch_grouped=has_torch)


def _machine() -> dict[str, str]:
    from megacore.parallel.host.shared_memory import meminfo

    disk = shutil.disk_usage(Path.cwd())
    facts = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU cores": str(_cores()),
        "free disk here": f"{disk.free / GIB:.1f} GiB of {disk.total / GIB:.1f}",
        "open files": f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} per process",
    }
    memory = meminfo()
    if memory:
        facts["free memory"] = (
            f"{memory['MemAvailable'] / GIB:.1f} GiB of {memory['MemTotal'] / GIB:.1f}"
        )
    with contextlib.suppress(OSError):
        shm = shutil.disk_usage("/dev/shm")
        facts["free shared memory"] = f"{shm.free / GIB:.1f} GiB of {shm.total / GIB:.1f}"
    return facts


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _try_two_processes() -> dict[str, str]:
    """Start two ranks and run an all-reduce."""
    from megatrain.launch.start import LaunchOptions, run_ranks_local

    start = time.monotonic()
    complaint = io.StringIO()
    with contextlib.redirect_stderr(complaint):
        code = run_ranks_local(2, _add_up, options=LaunchOptions(timeout_s=20.0))
    if code == 0:
        return {"works": "yes", "start to end": f"{time.monotonic() - start:.2f} s"}
    return {"works": "no", "reason": complaint.getvalue().strip()}


def _add_up(context: RankContext) -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(total)
    return 0 if total.item() == 3.0 else 1


def _yes(available: bool) -> str:
    return "available" if available else "not available"


def _print(facts: dict[str, dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for wraps in (True, False, True):  # names stay whole
        table.add_column(no_wrap=not wraps)
    for section, rows in facts.items():
        for number, (name, value) in enumerate(rows.items()):
            table.add_row(f"[bold]{section}[/]" if number == 0 else "", name, value)
        table.add_row()
    Console(highlight=False).print(table)
