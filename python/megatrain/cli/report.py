"""``megacore report RUN [OTHER]``: write the report of a run, or compare two runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatrain.cli.outputs import require_folder


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "report",
        description="Write report.html of a run from its files, also while it runs; with two runs, "
        "write a page that compares them.",
        usage="megacore report RUN [OTHER] [-o FILE]",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument(
        "other", metavar="OTHER", type=Path, nargs="?", help="folder of a run to compare with"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="page of a comparison (default: compare.html in the folder of RUN)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from megacore.errors import ConfigError
    from megatrain.report import write_comparison, write_report

    if args.other is None:
        if args.output is not None:
            raise ConfigError("--output is for a comparison of two runs; leave it out")
        print(write_report(args.run))
        return 0
    require_folder(args.output)
    print(write_comparison(args.run, args.other, args.output or args.run / "compare.html"))
    return 0
