"""``megacore calibrate``: measure this machine for ``megacore plan``, or learn from a run."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.errors import ConfigError
from megatrain.cli.outputs import require_folder

if TYPE_CHECKING:
    from megatrain.launch.context import RankContext


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "calibrate",
        description="Measure matrix products, memory, attention, layers and links of this machine, "
        "and write the constants for megacore plan --device FILE.",
    )
    parser.add_argument("--out", metavar="FILE", default="calibration.toml", help="file to write")
    parser.add_argument("--cpu", action="store_true", help="measure the CPU, even with a GPU")
    parser.add_argument(
        "--quick", action="store_true", help="measure each part for a tenth of the time"
    )
    parser.add_argument(
        "--from",
        dest="run",
        metavar="RUN",
        help="adjust the calibration that a run was compared with to what the run measured",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, or read a run, and write the file."""
    if not args.out.endswith(".toml"):
        raise ConfigError(f'--out must end in .toml, got "{args.out}"')
    require_folder(args.out)
    if args.run is not None:
        return _learn(args)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    import torch

    from megacore.qualification import choose_kernels
    from megatrain.launch.start import LaunchOptions, run_ranks_local
    from megatrain.plan.calibrate import measure, write_calibration
    from megatrain.plan.device import load_device, match_device

    is_cuda = torch.cuda.is_available() and not args.cpu
    least = 0.1 if args.quick else 1.0
    with tempfile.TemporaryDirectory() as folder:
        links = Path(folder) / "links.json"
        ranks = min(2, torch.cuda.device_count()) if is_cuda else 2
        if ranks > 1:  # first, since a process that used CUDA or threads cannot fork
            print("measuring links between two ranks", flush=True)
            options = LaunchOptions(backend="nccl" if is_cuda else "gloo", threads=1)
            code = run_ranks_local(ranks, partial(_links, links, least), options=options)
            if code != 0:
                return code
        found: dict[str, Any] = json.loads(links.read_text()) if links.exists() else {}
    device = torch.device("cuda" if is_cuda else "cpu")
    torch.set_num_threads(torch.get_num_threads() if is_cuda else 1)
    choose_kernels(device)
    name = torch.cuda.get_device_name() if is_cuda else f"CPU, {os.cpu_count()} cores"
    if not is_cuda:
        cores = len(os.sched_getaffinity(0))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        found |= {"link_domain": 1 << 20, "peak_at_once": cores, "peak_memory_gib": memory}
    base = load_device(match_device(name) or "h100")
    found |= measure(
        device, base, least=least, report=lambda what: print(f"measuring {what}", flush=True)
    )
    write_calibration(
        Path(args.out), base, {**found, "name": name}, stack=f"torch {torch.__version__}"
    )
    print(f"wrote {args.out}; use it with megacore plan CONFIG --gpus N --device {args.out}")
    return 0


def _links(file: Path, least: float, context: RankContext) -> int:
    from megatrain.plan.calibrate import measure_contention, measure_links

    found = measure_links(context.device, context.world_size, least=least)
    if context.device.type == "cpu":
        found |= measure_contention(least=least)
    if context.rank == 0:
        file.write_text(json.dumps(found))
    return 0


def _learn(args: argparse.Namespace) -> int:
    """Scale the constants of a run's calibration by the errors of its prediction."""
    from megatrain.plan.calibrate import write_calibration
    from megatrain.plan.compare_run import learned_changes
    from megatrain.plan.device import load_device

    path = Path(args.run) / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8")).get("prediction")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--from must be the folder of a run: {path}: {error}") from error
    if not record or record["measured"]["passes_s"] is None:
        raise ConfigError(
            f"{path} has no prediction with a measured timeline; train with run.calibration set, "
            "and with debug.trace_step not -1"
        )
    base = load_device(record["calibration"])
    changes = learned_changes(base, record)
    write_calibration(Path(args.out), base, changes, stack=f"{base.stack}; run {args.run}")
    for key, value in changes.items():
        print(f"{key}: {getattr(base, key):.4g} -> {value:.4g}")
    print(f"wrote {args.out}")
    return 0
