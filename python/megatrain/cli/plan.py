"""``megacore plan CONFIG.toml``: layout, memory and schedule of a run, without starting it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.errors import ConfigError
from megatrain.cli.outputs import plain_table
from megatrain.cli.plan_source import load_planned
from megatrain.cli.values import refuse_given, whole_number
from megatrain.config import (
    ModelConfig,
    MoEConfig,
    PipelineConfig,
    ResolvedConfig,
    TrainSectionConfig,
    stages_of_ranks,
)
from megatrain.config.graph_rules import graph_scopes
from megatrain.config.train import RECOMPUTE_MODULES

if TYPE_CHECKING:
    from rich.table import Table

    from megacore.optim import MemoryRow
    from megacore.parallel import Topology
    from megatrain.plan.echo_estimate import EchoEstimate
    from megatrain.plan.run_plan import RankPlan, RunPlan

_PREDICTION_OPTIONS = (
    "device",
    "nodes_of",
    "imbalance",
    "svg",
    "trace",
    "search",
    "top",
    "write",
    "tokens",
    "hours",
    "price",
)


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "plan",
        description="Show layout, memory and schedule of a run without starting it.",
        usage="megacore plan CONFIG [--world-size N] [--buffers|--shard D|--echo] [--json]\n"
        "       megacore plan CONFIG --gpus N[,N...] [--device NAME] [--search] ...\n"
        "       [--section.key=value ...]",
        epilog="Settings of the file can be changed as for train: --parallel.pp=4",
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        type=Path,
        help="TOML file, or a model of Hugging Face: its folder or config.json, without weights",
    )
    parser.add_argument(
        "--world-size",
        "--nproc",
        dest="nproc",
        metavar="N",
        help="number of processes (default: as train would start)",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--buffers", action="store_true", help="print where each parameter lies, bucket by bucket"
    )
    parser.add_argument(
        "--shard",
        metavar="D",
        type=whole_number,
        help="print which ranges of the buffers the data parallel rank D owns",
    )
    _add_prediction_options(parser)
    parser.add_argument(
        "--echo", action="store_true", help="print what clones of experts cost and guarantee"
    )


def _add_prediction_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a prediction."""
    group = parser.add_argument_group("prediction (needs no torch)")
    group.add_argument("--gpus", metavar="N[,N...]", help="predict memory and time on N devices")
    group.add_argument("--device", metavar="NAME|FILE", help="kind of device (default: h100)")
    group.add_argument("--nodes-of", metavar="N", help="devices joined by the fastest links")
    group.add_argument("--imbalance", metavar="F", help="load of the busiest expert rank / mean")
    group.add_argument("--svg", metavar="FILE", help="draw the predicted step")
    group.add_argument("--trace", metavar="FILE", help="write it as a trace for Perfetto")
    group.add_argument("--search", action="store_true", help="find the best layouts")
    group.add_argument("--top", metavar="N", help="layouts to list (default: 10)")
    group.add_argument("--write", metavar="FILE", help="write the configuration of the best layout")
    group.add_argument("--tokens", metavar="N", help="show the time that N tokens take")
    group.add_argument("--hours", metavar="H", help="show the tokens that H hours train")
    group.add_argument("--price", metavar="P", help="price of a device and hour, for the cost")


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it."""
    if args.gpus is not None:
        refused = "{} cannot be combined with --gpus; leave one out"
        refuse_given(args, ("nproc",), refused.replace("{}", "--world-size"))
        refuse_given(args, ("buffers", "shard", "echo"), refused)
        from megatrain.cli.plan_forecast import run as predict

        return predict(args)
    refuse_given(args, _PREDICTION_OPTIONS, "{} belongs to a prediction; add --gpus N")
    from megatrain.cli.train import default_nproc, resolve_for_training

    _require_one_form(args)
    loaded = load_planned(args)
    world_size = loaded.run.nproc or default_nproc(loaded.run, loaded.parallel)
    config = resolve_for_training(
        loaded, world_size, launcher="--world-size", vocab_size=loaded.model.vocab_size
    )

    from megatrain.plan.run_plan import buffer_layouts, plan_run

    if args.buffers or args.shard is not None:
        print("\n\n".join(buffer_layouts(config, world_size, shard=args.shard)))
        return 0
    plan = plan_run(config, world_size)
    if args.echo:
        from megatrain.plan.echo_estimate import estimate_echo

        echo = estimate_echo(config, plan.topology)
        print(json.dumps(dataclasses.asdict(echo), indent=2) if args.json else echo.text)
        return 0
    if args.json:
        print(json.dumps(_as_json(plan, config, world_size), indent=2))
    else:
        _print(plan, config, world_size)
    return 0


def _require_one_form(args: argparse.Namespace) -> None:
    """Raise an error for combinations of options of which one would be ignored."""
    buffers = "--buffers" if args.buffers else None if args.shard is None else "--shard"
    other = "--echo" if args.echo else "--json" if args.json else None
    if buffers and other:
        raise ConfigError(f"{buffers} prints buffers as text, {other} other things; leave one out")


def _as_json(plan: RunPlan, config: ResolvedConfig, world_size: int) -> dict[str, Any]:
    ranks = []
    for rank in plan.ranks:
        entry = dataclasses.asdict(rank)
        for name, chunks in (("layers", rank.layers), ("mtp_layers", rank.mtp_layers)):
            entry[name] = [[layers.start, layers.stop] for layers in chunks]
        entry["total_bytes"] = rank.total_bytes
        ranks.append(entry)
    echo = _echo_of(plan, config)
    return {
        "world_size": world_size,
        "dp": plan.topology.dp,
        "num_params": plan.num_params,
        "num_active_params": plan.num_active_params,
        "num_microbatches": plan.num_microbatches,
        "bubble_fraction": plan.bubble_fraction,
        "clones": None if echo is None else dataclasses.asdict(echo),
        "ranks": ranks,
    }


def _print(plan: RunPlan, config: ResolvedConfig, world_size: int) -> None:
    from rich.console import Console

    ranks = _rank_table(plan, config, world_size)
    console = Console(highlight=False)
    # Columns truncated to a narrow terminal would hide the numbers.
    unlimited = console.options.update(max_width=10_000)
    console.width = max(console.width, console.measure(ranks, options=unlimited).maximum)
    console.print(_facts_table(plan, config, world_size))
    console.print()
    console.print(ranks)
    where = "dp and both copies of the model" if config.pipeline.copies > 1 else "dp"
    sharding = f"sharded over {where} (ZeRO-1)" if config.optimizer.distributed else "not sharded"
    console.print()
    console.print(_memory_text(plan, config), soft_wrap=True)
    if plan.ranks[0].graphs is not None:
        console.print(_graphs_text(plan, config), soft_wrap=True)
    console.print(
        f"params, grads, optim: memory per rank, no activations; optimizer state {sharding}\n"
        f"held: peak number of microbatches (per chunk) whose activations a rank stores"
        f"{_recompute_text(config.train)}",
        soft_wrap=True,
    )


def _facts_table(plan: RunPlan, config: ResolvedConfig, world_size: int) -> Table:
    from rich.table import Table

    parallel, train, pipeline = config.parallel, config.train, config.pipeline
    chunks = f", {pipeline.chunks} chunks per rank" if pipeline.chunks > 1 else ""
    if pipeline.copies > 1:
        chunks = f", {pipeline.copies} copies of the model"
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    facts.add_row(
        "[bold]layout[/]",
        f"{ranks} = tp {parallel.tp} x pp {parallel.pp} x dp {plan.topology.dp} "
        f"(order {parallel.order})",
    )
    if config.moe.num_experts > 0:
        facts.add_row("[bold]experts[/]", _experts_text(plan, config.model, config.moe))
    if echo := _echo_of(plan, config):
        slots, memory = echo.text.splitlines()[:2]
        facts.add_row("[bold]clones[/]", slots)
        facts.add_row("", f"{memory}, not in the sums below; more with --echo")
    active = f", {plan.num_active_params:,} per token" if config.moe.num_experts > 0 else ""
    facts.add_row("[bold]model[/]", f"{plan.num_params:,} parameters{active}, {train.dtype}")
    facts.add_row(
        "[bold]step[/]",
        f"{train.global_batch_size} sequences of {config.model.seq_length} tokens = dp "
        f"{plan.topology.dp} x {plan.num_microbatches} microbatches of {train.microbatch_size}",
    )
    facts.add_row(
        "[bold]schedule[/]",
        f"{pipeline.shown_schedule}{chunks}, bubble {plan.bubble_fraction:.1%} "
        "(backward = 2 forwards)",
    )
    return facts


def _echo_of(plan: RunPlan, config: ResolvedConfig) -> EchoEstimate | None:
    """Return the memory plan of expert clones, or ``None`` without clones."""
    if not config.has_clones:
        return None
    from megatrain.plan.echo_estimate import estimate_echo

    return estimate_echo(config, plan.topology)


def _experts_text(plan: RunPlan, model: ModelConfig, moe: MoEConfig) -> str:
    """Describe the layout of the experts and the number per rank."""
    topology, num_layers = plan.topology, model.mtp_layers.stop
    layers = len(moe.moe_layers(num_layers))
    return (
        f"etp {topology.etp} x ep {topology.ep} x edp {topology.expert_dp} x pp {topology.pp}; "
        f"{layers} of {num_layers} layers with {moe.num_experts} experts, "
        f"{moe.num_experts // topology.ep} per rank, {moe.top_k} per token, {moe.dispatcher}"
    )


def _graphs_text(plan: RunPlan, config: ResolvedConfig) -> str:
    """Describe the predicted memory of the graphs of each pipeline rank."""
    with_step = ", the optimizer's included" if config.graphs.mode == "full_step" else ""
    scopes = ",".join(graph_scopes(config)) or f"the whole step{with_step}"
    mode = "partial" if config.graphs.is_partial else config.graphs.mode
    lines = [f"graphs ({mode}, {scopes}), predicted in MiB; the log shows measured:"]
    for rank in plan.ranks:
        assert rank.graphs is not None
        lines.append(f"  pp {rank.pp_rank}: {rank.graphs.text()}")
    return "\n".join(lines)


def _memory_text(plan: RunPlan, config: ResolvedConfig) -> str:
    """Describe the bytes per parameter by formula, and the sizes of buckets."""
    from megatrain.plan.state import memory_rows_of

    rows = memory_rows_of(config.optimizer, dtype=config.train.dtype)
    largest = max(max(rank.bucket_numels) for rank in plan.ranks)
    texts = [
        f"bytes per parameter{'' if len(rows) == 1 else f' ({kind})'}: "
        f"{_bytes_text(row, plan, config)}; padding comes on top"
        for kind, row in rows.items()
    ]
    for group in config.optimizer.groups:
        if group.optimizer not in (None, "none"):
            own = memory_rows_of(group.optimizer_of(config.optimizer), dtype=config.train.dtype)
            texts += [
                f"of {group.pattern}{'' if len(own) == 1 else f' ({kind})'}: "
                f"{_bytes_text(row, plan, config)}"
                for kind, row in own.items()
            ]
    buckets = f"buckets: units of one reduce-scatter and one all-gather, up to {largest:,} elements"
    return "\n".join([buckets, *texts])


def _bytes_text(row: MemoryRow, plan: RunPlan, config: ResolvedConfig) -> str:
    """Return bytes per parameter as a formula, and for the number of shards."""
    formula = row.formula() if config.optimizer.distributed else f"{float(row.whole):g}"
    shards = _shards_of_state(plan, config)
    told = [
        f"{float(row.per_rank(count)):.4g} with d = {count}"
        + (f" ({kind})" if len(shards) > 1 else "")
        for kind, count in shards.items()
    ]
    each = f" = {', '.join(told)}" if max(shards.values()) > 1 else ""
    return f"{formula}{each}"


def _shards_of_state(plan: RunPlan, config: ResolvedConfig) -> dict[str, int]:
    """Return the number of optimizer shards per parameter, by kind if kinds differ."""
    if not config.optimizer.distributed:
        return {"dense": 1}
    from megatrain.plan.state import ranks_per_buffer

    dense, experts = ranks_per_buffer(config, plan.topology.world_size)
    if config.moe.num_experts == 0 or dense == experts:
        return {"dense": dense}
    return {"dense": dense, "experts": experts}


def _rank_table(plan: RunPlan, config: ResolvedConfig, world_size: int) -> Any:
    from megatrain.plan.footprint import memory_unit

    unit, unit_bytes = memory_unit(max(rank.total_bytes for rank in plan.ranks))
    sizes_columns = ("params", "grads", "optim", f"sum {unit}")
    table = plain_table(
        ("pp", "ranks", "layers"), ("parameters", "buckets", *sizes_columns, "held", "busy")
    )
    for rank in plan.ranks:
        sizes = (rank.param_bytes, rank.grad_bytes, rank.optimizer_bytes, rank.total_bytes)
        table.add_row(
            str(rank.pp_rank),
            _ranks_at(plan.topology, rank.pp_rank, world_size),
            _layers_text(rank, config.pipeline, config.parallel.pp),
            f"{rank.num_params:,}",
            str(len(rank.bucket_numels)),
            *(f"{size / unit_bytes:.1f}" for size in sizes),
            _held_text(rank, config.train),
            f"{rank.busy_fraction:.0%}",
        )
    return table


def _held_text(rank: RankPlan, train: TrainSectionConfig) -> str:
    if not train.recompute:
        return str(rank.peak_in_flight)
    return f"{rank.peak_in_flight}, {rank.peak_kept} in full"


def _recompute_text(train: TrainSectionConfig) -> str:
    if "full" in train.recompute:
        return ";\nnot in full: only the input of each layer is held, the rest is recomputed"
    if train.recompute:
        parts = ", ".join(part for part in RECOMPUTE_MODULES if part in train.recomputed)
        return f";\nnot in full: without {parts}, which are recomputed"
    return ""


def _layers_text(rank: RankPlan, pipeline: PipelineConfig, pp: int) -> str:
    """Return the layers of a rank as ``embed 0-3``, with chunks separated by ``|``."""
    parts, stages = [], stages_of_ranks(pipeline, pp)[rank.pp_rank]
    for chunk, (layers, further) in enumerate(zip(rank.layers, rank.mtp_layers, strict=True)):
        words = []
        if stages[chunk] == 0:
            words.append("embed")
        if len(layers) > 0:
            last = f"-{layers.stop - 1}" if len(layers) > 1 else ""
            words.append(f"{layers.start}{last}")
        if len(further) > 0:
            last = f"-{further.stop - 1}" if len(further) > 1 else ""
            words.append(f"mtp {further.start}{last}")
        if stages[chunk] == pp * pipeline.stages_per_rank - 1:
            words.append("head")
        parts.append(" ".join(words))
    return " | ".join(parts)


def _ranks_at(topology: Topology, pp_rank: int, world_size: int) -> str:
    """Return the global ranks at a pipeline position as ``0-3``, or the first few."""
    ranks = [rank for rank in range(world_size) if topology.coordinates(rank)["pp"] == pp_rank]
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    shown = ", ".join(str(rank) for rank in ranks[:4])
    return shown if len(ranks) <= 4 else f"{shown}, ... ({len(ranks)})"
