"""``megacore ranks``: process groups of a layout, as tables, JSON or SVG."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.errors import ConfigError
from megatrain.cli.outputs import require_folder, terminal, write_output
from megatrain.cli.values import require_at_least, whole_number

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.console import Console

    from megacore.parallel.topology import RankGenerator, Topology

DENSE_TOKENS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp")
EXPERT_TOKENS = ("ep", "edp", "etp", "pp")

EPILOG = """\
examples:
  megacore ranks --world-size 16 --tp 4 --pp 2
  megacore ranks --world-size 16 --tp 4 --pp 2 --etp 1 --ep 4 --svg layout.svg
  megacore ranks --world-size 1024 --tp 8 --cp 2 --pp 4 --token tp-pp
"""


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "ranks",
        description="Show which ranks form a group. What the sizes leave over is data parallel.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sizes = (
        ("--tp", 1, "tensor parallel ranks of dense layers"),
        ("--cp", 1, "context parallel ranks"),
        ("--pp", 1, "pipeline ranks"),
        ("--ep", 1, "expert parallel ranks"),
        ("--etp", None, "tensor parallel ranks of expert layers (default: tp)"),
    )
    parser.add_argument(
        "--world-size", type=whole_number, required=True, metavar="N", help="all ranks"
    )
    for flag, default, text in sizes:
        parser.add_argument(flag, type=whole_number, default=default, metavar="N", help=text)
    parser.add_argument(
        "--order",
        default="tp-cp-ep-dp-pp",
        help="axes from the fastest varying to the slowest (default: %(default)s)",
    )
    parser.add_argument(
        "--token",
        action="append",
        metavar="AXES",
        help='only these axes, joined by dashes: "tp-pp", "etp-ep"; may be repeated',
    )
    parser.add_argument(
        "--gpus-per-node",
        type=whole_number,
        default=8,
        metavar="N",
        help="ranks per node (default: 8)",
    )
    parser.add_argument(
        "--lines",
        type=whole_number,
        default=4,
        metavar="N",
        help="lines per axis; 0: all (default: 4)",
    )
    parser.add_argument("--json", action="store_true", help="print all groups as JSON")
    parser.add_argument("--svg", metavar="FILE", help="write a picture of nodes and ranks")


def run(args: argparse.Namespace) -> int:
    """Print the groups of a layout."""
    from megacore.parallel.topology import Topology

    require_at_least(args, world_size=1, tp=1, cp=1, pp=1, ep=1, etp=1, gpus_per_node=1, lines=0)
    require_folder(args.svg)
    topology = Topology(
        world_size=args.world_size,
        tp=args.tp,
        cp=args.cp,
        pp=args.pp,
        ep=args.ep,
        etp=args.etp,
        order=args.order,
    )
    tokens = _tokens(topology, args.token)
    if args.json:
        _print_json(topology, tokens)
    else:
        shows_expert = topology.ep > 1 or topology.etp != topology.tp or args.etp is not None
        if not (args.token or shows_expert):
            tokens["expert"] = ()
        _print_tables(topology, tokens, args)
    write_output(args.svg, lambda path: _draw(path, topology, args.gpus_per_node))
    return 0


def _draw(path: Path, topology: Topology, gpus_per_node: int) -> None:
    from megatrain.view import topology_svg

    path.write_text(topology_svg(topology, gpus_per_node=gpus_per_node), encoding="utf-8")


def _tokens(topology: Topology, asked: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Return the tokens to show per view; raise an error for a token of neither view."""
    if asked is None:
        return {"dense": DENSE_TOKENS, "expert": EXPERT_TOKENS}
    tokens: dict[str, tuple[str, ...]] = {"dense": (), "expert": ()}
    for token in asked:
        axes = set(token.split("-"))
        unknown = sorted(axes - {*topology.dense.axes, *topology.expert.axes})
        if unknown:
            raise ConfigError(
                f'--token {token}: unknown axis "{unknown[0]}"; the axes of dense layers are '
                f"{', '.join(topology.dense.axes)}, of expert layers "
                f"{', '.join(topology.expert.axes)}"
            )
        view = "expert" if axes & {"ep", "etp", "edp"} else "dense"
        _view(topology, view).group_size(token)  # raises for an axis of the other view
        tokens[view] += (token,)
    return tokens


def _view(topology: Topology, name: str) -> RankGenerator:
    return topology.expert if name == "expert" else topology.dense


def _print_json(topology: Topology, tokens: dict[str, tuple[str, ...]]) -> None:
    result: dict[str, Any] = {
        "world_size": topology.world_size,
        "order": topology.order,
        "sizes": {**topology.dense.sizes, **topology.expert.sizes},
    }
    for name, wanted in tokens.items():
        result[name] = {token: _view(topology, name).get_ranks(token) for token in wanted}
    print(json.dumps(result))


def _print_tables(
    topology: Topology, tokens: dict[str, tuple[str, ...]], args: argparse.Namespace
) -> None:
    console = terminal(least=80)
    num_nodes = -(-topology.world_size // args.gpus_per_node)
    console.print(
        f"[bold]{topology.world_size:,} ranks[/], {args.gpus_per_node} per node, "
        f"nodes: {num_nodes:,}, order: {topology.order}"
    )
    for name, wanted in tokens.items():
        if wanted:
            _print_view(console, name, _view(topology, name), wanted, args)
    if not args.token and not tokens["expert"]:
        console.print("Expert layers: the same groups; --ep and --etp give them their own.")


def _print_view(
    console: Console,
    name: str,
    view: RankGenerator,
    tokens: Sequence[str],
    args: argparse.Namespace,
) -> None:
    from rich import box
    from rich.table import Table

    product = " x ".join(f"{axis} {size:,}" for axis, size in view.sizes.items())
    console.print(f"\n[bold]{name.capitalize()} layers[/]: {product} = {view.world_size:,}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("axes", style="bold cyan", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("groups", justify="right", no_wrap=True)
    table.add_column("traffic", no_wrap=True)
    table.add_column("ranks of each group", no_wrap=True)
    # Width of the other columns: their longest texts and the space between columns.
    room = console.width - (8 + 6 + len(f"{view.world_size:,}") + 13 + 4 * 3)
    for token in tokens:
        groups = view.groups(token)
        num_groups, size = groups.shape
        lines = _group_lines(groups, width=room, max_lines=args.lines or num_groups)
        traffic = _traffic(groups, args.gpus_per_node)
        table.add_row(token, f"{size:,}", f"{num_groups:,}", traffic, "\n".join(lines))
    console.print(table, markup=False)


def _traffic(groups: npt.NDArray[np.int32], gpus_per_node: int) -> str:
    if groups.shape[1] == 1:
        return "none"
    homes = groups // gpus_per_node
    inside = bool((homes[:, 0] == homes[:, -1]).all())
    return "inside a node" if inside else "between nodes"


def _group_lines(groups: npt.NDArray[np.int32], *, width: int, max_lines: int) -> list[str]:
    """Return the groups as lines of at most ``width`` characters, without breaking groups."""
    from megacore.parallel.topology import groups_text

    num_groups, size = groups.shape
    rank_width = len(f"{groups[-1, -1]}, ")
    max_ranks = min(size, width)
    if len(groups_text(groups[-1:], max_ranks=max_ranks)[0]) > width:
        max_ranks = max((width - len(f"[... {size:,} more]")) // rank_width, 1)
    candidates = groups[: max_lines * width // len("[0] ") + 1]
    lines, shown = [""], 0
    for text in groups_text(candidates, max_groups=len(candidates), max_ranks=max_ranks):
        if not lines[-1] or len(lines[-1]) + 1 + len(text) <= width:
            lines[-1] = f"{lines[-1]} {text}".strip()
        elif len(lines) == max_lines:
            break
        else:
            lines.append(text)
        shown += 1
    if shown < num_groups:
        lines.append(f"... {num_groups - shown:,} more")
    return lines
