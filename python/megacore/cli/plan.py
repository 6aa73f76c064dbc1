"""``megacore plan CONFIG.toml``: layout, memory and schedule of a run, without starting it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.config import Config, load_config

if TYPE_CHECKING:
    from megacore.parallel import Topology
    from megacore.train.plan import RankPlan, RunPlan


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "plan",
        help="show layout, memory and schedule of a run without starting it",
        description="Show layout, memory and schedule of a run without starting it.",
        usage="megacore plan CONFIG [--world-size N] [--json] [--section.key=value ...]",
        epilog="Settings of the file can be changed as for train: --parallel.pp=4",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="TOML file")
    parser.add_argument(
        "--world-size", metavar="N", help="number of processes (default: as train would start)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it."""
    settings = list(args.settings)
    if args.world_size is not None:
        settings.append(("run.nproc", args.world_size))
    config = load_config(args.config, settings)

    from megacore.cli.train import default_nproc, resolve_for_training

    world_size = config.run.nproc or default_nproc(config)
    config = resolve_for_training(config, world_size, launcher="--world-size")

    from megacore.train.plan import plan_run

    plan = plan_run(config, world_size)
    if args.json:
        print(json.dumps(_as_json(plan, world_size), indent=2))
    else:
        _print(plan, config, world_size)
    return 0


def _as_json(plan: RunPlan, world_size: int) -> dict[str, Any]:
    ranks = []
    for rank in plan.ranks:
        entry = dataclasses.asdict(rank)
        entry["layers"] = [[layers.start, layers.stop] for layers in rank.layers]
        entry["total_bytes"] = rank.total_bytes
        ranks.append(entry)
    return {
        "world_size": world_size,
        "dp": plan.topology.dp,
        "num_params": plan.num_params,
        "num_microbatches": plan.num_microbatches,
        "bubble_fraction": plan.bubble_fraction,
        "ranks": ranks,
    }


def _print(plan: RunPlan, config: Config, world_size: int) -> None:
    from rich.console import Console
    from rich.table import Table

    parallel, train, pipeline = config.parallel, config.train, config.pipeline
    chunks = f", {pipeline.num_chunks} chunks per rank" if pipeline.num_chunks > 1 else ""
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row(
        "[bold]layout[/]",
        f"{world_size} ranks = tp {parallel.tp} x pp {parallel.pp} x dp {plan.topology.dp}, "
        f"adjacent ranks first: {parallel.order}",
    )
    facts.add_row("[bold]model[/]", f"{plan.num_params:,} parameters, {train.dtype}")
    facts.add_row(
        "[bold]step[/]",
        f"{train.global_batch_size} sequences of {config.model.seq_length} tokens = dp "
        f"{plan.topology.dp} x {plan.num_microbatches} microbatches of {train.microbatch_size}",
    )
    facts.add_row(
        "[bold]schedule[/]",
        f"{pipeline.schedule}{chunks}, bubble {plan.bubble_fraction:.1%} "
        "(backward = 2 forwards, messages take no time)",
    )
    console = Console(highlight=False)
    console.print(facts)
    console.print()
    console.print(_rank_table(plan, config, world_size))
    sharding = "sharded over dp (ZeRO-1)" if config.optimizer.distributed else "not sharded"
    console.print(
        f"Memory per rank, without activations; the optimizer state is {sharding}. In flight: most "
        "microbatches, per chunk, whose activations are held at once."
    )


def _rank_table(plan: RunPlan, config: Config, world_size: int) -> Any:
    from rich.table import Table

    table = Table()
    for name in ("pp rank", "ranks", "layers", "parameters"):
        table.add_column(name, justify="right")
    for name in ("params", "grads", "optimizer", "total", "in flight", "busy"):
        table.add_column(name, justify="right")
    for rank in plan.ranks:
        table.add_row(
            str(rank.pp_rank),
            _ranks_at(plan.topology, rank.pp_rank, world_size),
            _layers_text(rank, config),
            f"{rank.num_params:,}",
            bytes_text(rank.param_bytes),
            bytes_text(rank.grad_bytes),
            bytes_text(rank.optimizer_bytes),
            f"[bold]{bytes_text(rank.total_bytes)}[/]",
            str(rank.peak_in_flight),
            f"{rank.busy_fraction:.0%}",
        )
    return table


def _layers_text(rank: RankPlan, config: Config) -> str:
    """``embedding, 0-3``; chunks are separated by ``|``."""
    parts = []
    for chunk, layers in enumerate(rank.layers):
        words = []
        if rank.pp_rank == 0 and chunk == 0:
            words.append("embedding")
        if len(layers) > 0:
            last = f"-{layers.stop - 1}" if len(layers) > 1 else ""
            words.append(f"{layers.start}{last}")
        is_last_rank = rank.pp_rank == config.parallel.pp - 1
        if is_last_rank and chunk == len(rank.layers) - 1:
            words.append("head")
        parts.append(", ".join(words))
    return " | ".join(parts)


def _ranks_at(topology: Topology, pp_rank: int, world_size: int) -> str:
    """Global ranks at a pipeline position: ``0-3``, or the first few."""
    ranks = [rank for rank in range(world_size) if topology.coordinates(rank)["pp"] == pp_rank]
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    shown = ", ".join(str(rank) for rank in ranks[:4])
    return shown if len(ranks) <= 4 else f"{shown}, ... ({len(ranks)})"


def bytes_text(count: int) -> str:
    """A number of bytes for people.

    Example:
        >>> bytes_text(3 << 20), bytes_text(1500)
        ('3.0 MiB', '1.5 KiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
