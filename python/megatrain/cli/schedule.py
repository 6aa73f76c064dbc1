"""``megacore schedule``: a pipeline schedule as a coloured grid, JSON, SVG, CSV or trace."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megacore.errors import ConfigError
from megatrain.cli.outputs import require_folder, terminal, write_output, write_pictures
from megatrain.cli.schedule_auto import (
    add_auto_options,
    auto_options,
    certificate_json,
    with_cost_flags,
    with_stage_costs,
)
from megatrain.cli.schedule_compare import run_compare
from megatrain.cli.schedule_options import (
    add_program_options,
    print_programs,
    require_options_fit,
)
from megatrain.cli.values import number, whole_number

if TYPE_CHECKING:
    from megacore.pipeline import Costs, Schedule, Timeline
    from megacore.pipeline.timeline import Grid
    from megatrain.view.palette import KindColour

MAX_PANELS = 8  # of the grid; larger schedules are shown by --svg
MAX_ROWS = 32

EPILOG = """\
examples:
  megacore schedule 1f1b --pp 4 --microbatches 8
  megacore schedule interleaved_1f1b --pp 4 --chunks 2 --microbatches 8 --svg schedule.svg
  megacore schedule interleaved_1f1b --pp 8 --chunks 2 --microbatches 33 --send 0.1
  megacore schedule interleaved_1f1b --pp 4 --chunks 2 --pairs split --overlap 1
  megacore schedule zb_v --pp 4 --microbatches 8
  megacore schedule auto --pp 8 --placement v --microbatches 32 --memory-limit 8 --costs send=0.1
  megacore schedule --compare --pp 8 --microbatches 32 --send 0.1
  megacore schedule --from-csv my.csv --forward 1 --backward 1.7
"""


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "schedule",
        description="Build a pipeline schedule, prove it free of deadlock, simulate and show it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="for example 1f1b, interleaved_1f1b or zb_v")
    parser.add_argument(
        "--from-csv", metavar="FILE", help="read a schedule instead (PyTorch's CSV)"
    )
    _add_size_options(parser)
    _add_cost_options(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="a table of all schedules instead; costs are then those of all layers of a rank",
    )
    parser.add_argument(
        "--forward-only", action="store_true", help="leave the backward passes out (evaluation)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--svg", metavar="FILE", help="write a picture")
    parser.add_argument("--csv", metavar="FILE", help="write PyTorch's pipelining CSV")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto or Chrome")
    add_auto_options(parser)
    add_program_options(parser)


def _add_size_options(parser: argparse.ArgumentParser) -> None:
    sizes = (
        ("--pp", "pipeline ranks (default: 4)"),
        ("--chunks", "model chunks per rank (default: what the schedule has, or 1)"),
        ("--microbatches", "microbatches per step (default: 8)"),
        (
            "--group-size",
            "microbatches that run through a chunk before the next chunk (default: best)",
        ),
        (
            "--warmup-multiplier",
            "1: interleaved_1f1b keeps fewer activations, but exposes communication (default: 2)",
        ),
    )
    for flag, text in sizes:
        parser.add_argument(flag, type=whole_number, metavar="N", help=text)
    parser.add_argument(
        "--pairs",
        choices=("whole", "split"),
        help="1f1b, interleaved_1f1b: run each forward with a backward of another microbatch, in "
        "one piece or as I and W",
    )


def _add_cost_options(parser: argparse.ArgumentParser) -> None:
    costs: tuple[tuple[str, float, str], ...] = (
        ("--forward", 1.0, "time of one forward of a stage (default: 1)"),
        ("--backward", 2.0, "time of one backward of a stage (default: 2)"),
        ("--send", 0.0, "time a message takes between two ranks (default: 0)"),
        (
            "--overlap",
            0.0,
            "fraction of the shorter pass that a forward and a backward hide together (default: 0)",
        ),
    )
    for flag, cost, text in costs:
        parser.add_argument(flag, type=number, default=cost, metavar="T", help=text)
    parser.add_argument(
        "--backward-weight",
        type=number,
        metavar="T",
        help="part of --backward for the weights, which a split backward delays (default: half)",
    )


def run(args: argparse.Namespace) -> int:
    """Print a schedule, its bubble and activations in flight; or a comparison of all schedules."""
    costs = _costs(args)
    require_options_fit(args)
    for file in (args.svg, args.csv, args.trace):
        require_folder(file)
    args.pp = 4 if args.pp is None else args.pp
    args.microbatches = 8 if args.microbatches is None else args.microbatches
    if args.compare:
        return run_compare(args, costs)
    try:
        return _show(args, costs)
    except ValueError as error:
        raise ConfigError(with_cost_flags(str(error))) from error


def _show(args: argparse.Namespace, costs: Costs) -> int:
    schedule = _schedule(args, costs)
    if args.program:
        print_programs(schedule, args)
        return 0
    timeline = schedule.simulate(costs)
    if args.json:
        _print_json(schedule, timeline)
    else:
        _print_text(schedule, timeline, costs)
    write_output(args.csv, schedule.to_csv)
    write_pictures(args, schedule, costs)
    return 0


def _costs(args: argparse.Namespace) -> Costs:
    from megacore.pipeline import Costs

    for name in ("forward", "backward", "backward_weight", "send", "overlap"):
        cost, flag = getattr(args, name), name.replace("_", "-")
        if cost is not None and not (math.isfinite(cost) and cost >= 0):
            raise ConfigError(f"--{flag} must be a finite number of at least 0, got {cost:g}")
    if args.overlap > 1:
        raise ConfigError(f"--overlap is {args.overlap:g}; it is a share, from 0 to 1")
    weight = args.backward / 2 if args.backward_weight is None else args.backward_weight
    if weight > args.backward:
        raise ConfigError(
            f"--backward-weight is {weight:g}, but it is a part of --backward, {args.backward:g}"
        )
    costs = Costs(
        forward=args.forward,
        backward_input=args.backward - weight,
        backward_weight=weight,
        send=args.send,
        overlap=args.overlap,
    )
    return with_stage_costs(costs, args.costs)


def _schedule(args: argparse.Namespace, costs: Costs) -> Schedule:
    from megacore.pipeline import Schedule, build_schedule
    from megacore.pipeline.build import KNOWN

    if (args.name is None) == (args.from_csv is None):
        raise ConfigError(
            f"name a schedule ({', '.join(KNOWN)}) or give --from-csv FILE, one of the two"
        )
    if args.from_csv is None:
        return build_schedule(
            args.name,
            num_ranks=args.pp,
            num_chunks=args.chunks,
            num_microbatches=args.microbatches,
            group_size=args.group_size,
            warmup_multiplier=args.warmup_multiplier,
            pairs=args.pairs,
            forward_only=args.forward_only,
            **auto_options(args, costs),
        )
    try:
        schedule = Schedule.from_csv(args.from_csv)
    except OSError as error:
        raise ConfigError(f"cannot read {args.from_csv}: {error.strerror}") from None
    return schedule.forward_only() if args.forward_only else schedule


def _print_json(schedule: Schedule, timeline: Timeline) -> None:
    ranks = range(schedule.num_ranks)
    result = {
        "name": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "span_bubble_fraction": timeline.span_bubble_fraction,
        "busy": timeline.busy,
        "exposed": timeline.exposed,
        "peak_in_flight": timeline.peak_in_flight,
        "critical_path": [[e.rank, str(e.action), e.start, e.end] for e in timeline.critical_path],
        "stages": [schedule.stages(rank) for rank in ranks],
        "actions": [[str(action) for action in schedule.actions(rank)] for rank in ranks],
        "order": [schedule.order(rank) for rank in ranks],
    }
    if schedule.certificate is not None:
        result["certificate"] = certificate_json(schedule.certificate)
    print(json.dumps(result))


def _print_text(schedule: Schedule, timeline: Timeline, costs: Costs) -> None:
    console = terminal(least=60)
    chunks = f", {schedule.num_chunks} chunks each" if schedule.num_chunks > 1 else ""
    kind = " (forward only)" if schedule.is_forward_only else ""
    console.print(
        f"[bold]{schedule.name}[/]{kind}: {schedule.num_ranks} ranks{chunks}, "
        f"{schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
    )
    if schedule.num_chains > 1:
        length = schedule.num_stages // schedule.num_chains
        console.print(
            f"{schedule.num_chains} copies of the model: stage s + {length} holds the layers of "
            "stage s; training adds up the gradients of both"
        )
    console.print(
        f"makespan [bold]{timeline.makespan:g}[/], bubble [bold]{timeline.bubble_fraction:.1%}[/] "
        f"({timeline.span_bubble_fraction:.1%} without a barrier between steps), "
        f"at most [bold]{max(timeline.peak_in_flight)}[/] microbatch activations in flight "
        "on one rank"
    )
    if schedule.certificate is not None:
        console.print(Text(str(schedule.certificate)))
    elif not schedule.is_forward_only and costs.overlap == 0:
        bound = schedule.lower_bound(costs)
        gap = timeline.makespan / bound.value - 1 if bound.value > 0 else 0.0
        if gap < 1e-9:
            verdict = "this order is optimal: none is faster"
        else:
            verdict = f"an order up to {gap:.1%} faster may exist: none is faster"
        console.print(
            f"{verdict} than [bold]{bound.value:g}[/] with this memory ({bound.explanation})"
        )
    console.print()
    _print_grid(console, schedule, timeline)
    _print_ranks(console, schedule, timeline)
    if schedule.num_ranks <= MAX_ROWS:
        _print_critical_path(console, timeline)


def _print_grid(console: Console, schedule: Schedule, timeline: Timeline) -> None:
    """Print the timeline, cut into panels as wide as the console, in colour if supported."""
    from megacore.pipeline.timeline import Grid

    grid = Grid.of(timeline.first_ranks(MAX_ROWS), makespan=timeline.makespan)
    coloured = console.color_system is not None
    cell_width = len(str(schedule.num_microbatches - 1)) + 1 if coloured else grid.cell_width
    fitting = max((console.width - grid.label_width) // cell_width, 1)
    num_panels = max(-(-grid.num_columns // fitting), 1)
    step = max(-(-grid.num_columns // num_panels), 1)
    begins = range(0, grid.num_columns, step)
    for begin in begins[:MAX_PANELS]:
        end = min(begin + step, grid.num_columns)
        if coloured:
            lines = _coloured_lines(grid, schedule, begin, end, cell_width)
        else:
            lines = [Text(line) for line in grid.lines(begin, end)]
        for line in lines:
            console.print(line, no_wrap=True, crop=True)
        if schedule.num_ranks > grid.num_ranks:
            console.print(f"... and {schedule.num_ranks - grid.num_ranks} more ranks")
        console.print()
    if len(begins) > MAX_PANELS:
        shown = MAX_PANELS * step / grid.num_columns
        console.print(f"... that was {shown:.0%} of the time; --svg FILE draws all of it\n")
    if coloured:
        console.print(_legend(schedule), "\n")


def _coloured_lines(
    grid: Grid, schedule: Schedule, begin: int, end: int, cell_width: int
) -> list[Text]:
    """Return a line of times and a line per rank, with one block per action and its microbatch."""
    from megatrain.view.palette import kind_colours

    colours = kind_colours()
    chunks = {
        stage: chunk
        for rank in range(schedule.num_ranks)
        for chunk, stage in enumerate(schedule.stages(rank))
    }
    rows: list[list[tuple[int, str, str]]] = [[] for _ in range(grid.num_ranks)]
    for rank, action, first, last in grid.cells_between(begin, end):
        first, last = max(first, begin), min(last, end)
        # A trailing blank separates equal neighbours.
        block = str(action.microbatch).center((last - first) * cell_width - 1)
        style = _style(colours[action.kind], chunks[action.stage], schedule.num_chunks)
        rows[rank].append(((first - begin) * cell_width, block, style))
    lines = [Text("time".ljust(grid.label_width), style="dim")]
    every = 5 if cell_width * 5 > len(f"{grid.num_columns * grid.unit:g}") else 10
    for column in range(begin, end):
        label = f"{column * grid.unit:g}" if column % every == 0 else ""
        if label:
            lines[0].append(
                " " * (grid.label_width + (column - begin) * cell_width - len(lines[0]))
            )
            lines[0].append(label)
    for rank, blocks in enumerate(rows):
        line = Text(f"rank {rank}".ljust(grid.label_width), style="bold")
        for offset, block, style in sorted(blocks):
            line.append(" " * (grid.label_width + offset - len(line)))
            line.append(block, style=style)
        lines.append(line)
    return lines


def _style(colour: KindColour, chunk: int, num_chunks: int) -> str:
    red, green, blue = colour.rgb(chunk, num_chunks)
    ink = "rgb(255,255,255)" if colour.is_deep(chunk, num_chunks) else "rgb(20,30,44)"
    return f"not bold {ink} on rgb({red},{green},{blue})"


def _legend(schedule: Schedule) -> Text:
    from megatrain.view.palette import kind_colours

    ranks = range(min(schedule.num_ranks, MAX_ROWS))
    used = {action.kind for rank in ranks for action in schedule.actions(rank)}
    text = Text()
    for kind, colour in kind_colours().items():
        if kind in used:
            text.append(f"{colour.name.lower()} ")
            for chunk in range(schedule.num_chunks):
                label = f" {chunk} " if schedule.num_chunks > 1 else "   "
                text.append(label, style=_style(colour, chunk, schedule.num_chunks))
            text.append("   ")
    note = "numbers: microbatches"
    if schedule.num_chunks > 1:
        note += "; shades: model chunks of the rank"
    return text.append(note, style="dim")


def _print_ranks(console: Console, schedule: Schedule, timeline: Timeline) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("rank", justify="right", style="bold cyan")
    table.add_column("stages")
    for name in ("forwards first", "in flight at most", "busy", "idle", "for messages"):
        table.add_column(name, justify="right")
    for rank in range(min(schedule.num_ranks, MAX_ROWS)):
        order = schedule.order(rank)
        warmup = next((i for i, token in enumerate(order) if token < 0), len(order))
        makespan = timeline.makespan or 1.0
        busy = timeline.busy[rank] / makespan
        table.add_row(
            str(rank),
            " ".join(map(str, schedule.stages(rank))),
            str(warmup),
            str(timeline.peak_in_flight[rank]),
            f"{busy:.1%}",
            f"{1 - busy:.1%}",
            f"{timeline.exposed[rank] / makespan:.1%}",
        )
    console.print(table)
    if schedule.num_ranks > MAX_ROWS:
        console.print(f"... and {schedule.num_ranks - MAX_ROWS} more ranks; --json has them all")


def _print_critical_path(console: Console, timeline: Timeline) -> None:
    """Print the share of each rank in the critical path."""
    path = timeline.critical_path
    if not path:
        return
    makespan = timeline.makespan or 1.0
    on_rank: dict[int, float] = {}
    for event in path:
        on_rank[event.rank] = on_rank.get(event.rank, 0.0) + event.end - event.start
    busiest = sorted(on_rank.items(), key=lambda item: (-item[1], item[0]))[:4]
    shares = ", ".join(f"{time / makespan:.0%} on rank {rank}" for rank, time in busiest)
    console.print(
        f"\ncritical path: {len(path)} actions from {path[0].action} to {path[-1].action}, "
        f"{shares}",
        style="dim",
    )
