"""``megacore schedule --compare``: all schedules for the same sizes and costs, as a table."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from megacore.errors import ConfigError
from megatrain.cli.outputs import terminal

if TYPE_CHECKING:
    from megacore.pipeline import Costs
    from megacore.pipeline.compare import ComparedSchedule, Comparison

# Limits of about ten seconds: the time of simulations grows with the number of actions, that of
# bounds with the square of the number of stages.
MOST_ACTIONS = 1 << 24
_MOST_STAGES = 2048

_WIDE = 104  # width of all columns, in characters
_SHORT = {"chunks": "v", "group_size": "G", "warmup_multiplier": "k", "copies": "copies"}


def run_compare(args: argparse.Namespace, costs: Costs) -> int:
    """Print the table, or its contents as JSON."""
    from megacore.pipeline.compare import compare_schedules

    if args.name is not None:
        _require_comparable(args.name)
    _require_size(args)
    comparison = compare_schedules(
        num_ranks=args.pp,
        num_microbatches=args.microbatches,
        num_chunks=args.chunks,
        group_size=args.group_size,
        warmup_multiplier=args.warmup_multiplier,
        costs=costs,
    )
    if args.json:
        _print_json(comparison)
    else:
        _print_text(args, costs, comparison)
    return 0


def _require_comparable(name: str) -> None:
    """Check that the table has a schedule of this name."""
    from megacore.pipeline.auto import AUTO
    from megacore.pipeline.build import require_schedule_name

    require_schedule_name(name)
    if name == AUTO:
        raise ConfigError(
            f"--compare shows the schedules with a generator, {name!r} searches for one; leave "
            "one of them out"
        )


def _require_size(args: argparse.Namespace) -> None:
    """Raise an error for sizes that would take minutes, with the largest legal ones."""
    from megacore.pipeline.compare import compared_actions

    chunks = 2 if args.chunks is None else args.chunks
    if min(args.pp, args.microbatches, chunks) < 1:
        return  # rejected by the comparison itself
    alone = "or look at one schedule alone (megacore schedule NAME)"
    chunks = max(chunks, 2)  # schedules in V placement always have two
    if args.pp * chunks > _MOST_STAGES:
        raise ConfigError(
            f"--compare is for up to {_MOST_STAGES} stages, but {args.pp} ranks x {chunks} chunks "
            f"are {args.pp * chunks}; use at most {_fewer_stages(args.pp, chunks)}, {alone}"
        )
    each = compared_actions(num_ranks=args.pp, num_microbatches=1, num_chunks=args.chunks)
    if each * args.microbatches > MOST_ACTIONS:
        raise ConfigError(
            f"--compare is for up to {MOST_ACTIONS:,} actions, but {args.pp} ranks x "
            f"{args.microbatches} microbatches are {each * args.microbatches:,} in all schedules; "
            f"use at most --microbatches {MOST_ACTIONS // each}, {alone}"
        )


def _fewer_stages(num_ranks: int, num_chunks: int) -> str:
    if num_chunks <= _MOST_STAGES:
        return f"--pp {_MOST_STAGES // num_chunks}"
    if 2 * num_ranks <= _MOST_STAGES:
        return f"--chunks {_MOST_STAGES // num_ranks}"
    return f"--pp {_MOST_STAGES // 2} with --chunks 2"


def _print_json(comparison: Comparison) -> None:
    rows = [
        {
            "name": row.schedule.name,
            "parameters": row.parameters,
            "makespan": row.timeline.makespan,
            "bubble_fraction": row.timeline.bubble_fraction,
            "span_bubble_fraction": row.timeline.span_bubble_fraction,
            "in_flight": row.in_flight,
            "lower_bound": None if row.bound is None else row.bound.value,
            "bound_reason": None if row.bound is None else row.bound.reason,
            "gap": row.gap,
            "is_best": row.is_best,
        }
        for row in comparison.rows
    ]
    print(json.dumps({"schedules": rows, "not_applicable": comparison.refused}))


def _print_text(args: argparse.Namespace, costs: Costs, comparison: Comparison) -> None:
    console = terminal(least=60)
    weight = costs.backward_weight
    console.print(
        f"[bold]{args.pp} ranks, {args.microbatches} microbatches[/]; all layers of a rank take "
        f"{args.forward:g} forward, {args.backward:g} backward ({weight:g} of it for the weights), "
        f"a message {args.send:g}\n"
    )
    console.print(_table(comparison, marked=args.name, wide=console.width >= _WIDE))
    console.print(
        "\n* no other is both faster and smaller. In flight: microbatches of all layers of a rank "
        "whose activations it holds. Span: the bubble without a barrier between steps. Bound: what "
        "no order beats with this memory, placement and kind of backward. v: chunks per rank; "
        "G: group size; k: warm-up multiplier; copies of the parameters.",
        style="dim",
    )
    if comparison.refused:
        console.print("\nNot possible with these sizes:")
        for name, reason in comparison.refused.items():
            console.print(f"  [bold]{name}[/]: {reason}")


def _table(comparison: Comparison, *, marked: str | None, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    names = ["makespan", "bubble", "span", "in flight", "bound", "gap"]
    if not wide:
        names = ["makespan", "bubble", "in flight", "gap"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("with", no_wrap=True)
    for row in comparison.rows:
        cells = _cells(row)
        style = "reverse" if row.schedule.name == marked else "bold" if row.is_best else ""
        star = ">" if row.schedule.name == marked else ""
        table.add_row(
            star + ("*" if row.is_best else ""),
            row.schedule.name,
            *(cells[name] for name in names),
            *([cells["with"]] if wide else []),
            style=style,
        )
    return table


def _cells(row: ComparedSchedule) -> dict[str, str]:
    return {
        "makespan": f"{row.timeline.makespan:g}",
        "bubble": f"{row.timeline.bubble_fraction:.1%}",
        "span": f"{row.timeline.span_bubble_fraction:.1%}",
        "in flight": f"{row.in_flight:g}",
        "bound": "" if row.bound is None else f"{row.bound.value:g}",
        "gap": "" if row.gap is None else f"{row.gap:.1%}",
        "with": ", ".join(f"{_SHORT[name]} {value}" for name, value in row.parameters.items()),
    }
