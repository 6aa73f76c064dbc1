"""``megacore echo simulate``: load balance of clone planners on expert-parallel ranks."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.errors import ConfigError
from megatrain.cli.values import number, require_at_least, seed_number, whole_number

if TYPE_CHECKING:
    from megacore.moe.echo.plan import Counts
    from megatrain.echo_study.simulate import PlannerSummary

EPILOG = """\
Columns: the highest load of a rank over the mean (1 is perfect), its mean and its worst over the
steps; clones, that is expert weights sent, per step; tokens computed away from their expert's home
per step; the part of all tokens that cross ranks; how often every rank fitted the static receive
buffer that the planner promises; microseconds to plan. "eplb-style" replaces every expert; with
"previous step" it knows only the step before, as in practice. See docs/echo.md.
"""
WORKLOADS = ("zipf", "lognormal", "drift", "bursts")
MODELS = ("deepseek-v3", "qwen3", "mixtral")


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "echo",
        description="Compare planners of clones on synthetic or recorded routings.",
        usage="megacore echo simulate [--option ...]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    count = functools.partial(add, type=whole_number)
    add("action", choices=["simulate"], help="what to do")
    count("--ep", default=32, metavar="R", help="expert-parallel ranks (32)")
    count("--experts", metavar="E", help="experts of the layer (256)")
    count("--top-k", metavar="K", help="experts per token (8)")
    add("--model", choices=MODELS, help="take --experts and --top-k from a public model")
    count("--tokens", default=4096, metavar="N", help="tokens per rank and step (4096)")
    count("--num-spare-slots", default=2, metavar="S", help="slots for clones per rank (2)")
    add("--tolerance", type=number, default=0.01, help="load above the mean to accept (0.01)")
    count("--domain-size", metavar="R", help="ranks of a fast (NVLink) domain (all)")
    add("--workload", choices=[*WORKLOADS, "all"], default="all", help="popularity of experts")
    add("--skew", type=number, default=0.6, help="0.25 mild, 0.6 medium, 1.2 severe; not for zipf")
    count("--steps", default=4, metavar="N", help="steps per workload (4)")
    add("--seed", type=seed_number, default=1234, help="of the synthetic routing (1234)")
    add(
        "--counts",
        type=Path,
        metavar="FILE.npy",
        help="recorded tokens, (R, E) or (steps, R, E) integers, instead of synthetic ones",
    )
    add(
        "--routing",
        type=Path,
        metavar="FOLDER",
        help="a recording (debug.record_routing), its tokens dealt to --ep ranks",
    )
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    from megatrain.echo_study.simulate import SimulationOptions, simulate, table

    require_at_least(args, ep=1, experts=1, top_k=1, tokens=1, domain_size=1, steps=1, seed=0)
    options = SimulationOptions(
        num_spare_slots=args.num_spare_slots, tolerance=args.tolerance, domain_size=args.domain_size
    )
    summaries: list[PlannerSummary] = []
    if args.counts and args.routing:
        raise ConfigError("--counts and --routing both name recorded tokens; leave one out")
    if args.routing:
        title, workloads = _routing(args.routing, args.ep)
    else:
        title, workloads = _recorded(args.counts) if args.counts else _synthetic(args)
    for workload, steps in workloads:
        summaries += simulate(workload, steps, options)
    if args.json:
        rows = [dataclasses.asdict(summary) for summary in summaries]
        described = {"routing": title, **dataclasses.asdict(options), "results": rows}
        print(json.dumps(described, indent=2))
        return 0
    print(f"{title}; {args.num_spare_slots} spare slots per rank, tolerance {args.tolerance:g}\n")
    print(table(summaries))
    return 0


Workloads = list[tuple[str, Iterator["Counts"]]]


def _synthetic(args: argparse.Namespace) -> tuple[str, Workloads]:
    from megatrain.echo_study.workloads import MODEL_SHAPES, RoutingShape, routing_steps

    experts, top_k = MODEL_SHAPES[args.model or "deepseek-v3"]
    shape = RoutingShape(
        num_ranks=args.ep,
        num_experts=experts if args.experts is None else args.experts,
        top_k=top_k if args.top_k is None else args.top_k,
        num_tokens=args.tokens,
    )
    if not 0.0 <= args.skew <= 10.0:
        raise ConfigError(f"--skew must be from 0 to 10, got {args.skew:g}")
    names = WORKLOADS if args.workload == "all" else (args.workload,)
    title = (
        f"{shape.num_ranks} ranks, {shape.num_experts} experts, top-{shape.top_k}, "
        f"{shape.num_tokens} tokens per rank, {args.steps} steps, seed {args.seed}"
    )
    return title, [
        (name, routing_steps(name, shape, num_steps=args.steps, seed=args.seed, skew=args.skew))
        for name in names
    ]


def _routing(folder: Path, num_ranks: int) -> tuple[str, Workloads]:
    from megatrain.echo_study.recorded_counts import recorded_counts

    num_experts, steps = recorded_counts(folder, num_ranks=num_ranks)
    title = f"{folder.name}: {num_ranks} ranks, {num_experts} experts, every step and layer"
    return title, [("recorded", steps)]


def _recorded(path: Path) -> tuple[str, Workloads]:
    import numpy as np

    try:
        counts = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, EOFError) as error:  # numpy reads every other file as a pickle
        raise ConfigError(
            f"cannot read {path} as a .npy file of counts: numpy.save wrote no such file"
        ) from error
    if (
        not isinstance(counts, np.ndarray)
        or counts.ndim not in {2, 3}
        or counts.dtype.kind not in "iu"
    ):
        found = f"{counts.dtype} {counts.shape}" if isinstance(counts, np.ndarray) else "an archive"
        raise ConfigError(
            f"{path} holds {found}; counts are integers (ranks, experts) or (steps, ranks, experts)"
        )
    steps = counts[None] if counts.ndim == 2 else counts
    title = f"{path.name}: {steps.shape[1]} ranks, {steps.shape[2]} experts, {len(steps)} steps"
    return title, [("recorded", iter(steps))]
