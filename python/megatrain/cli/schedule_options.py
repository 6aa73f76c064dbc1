"""Options of ``megacore schedule``: which fit together, and those of ``--program``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatrain.cli.values import refuse_given, require_at_least, whole_number

if TYPE_CHECKING:
    from megacore.pipeline import Schedule

# Options without a default, by purpose.
_FILES = ("svg", "csv", "trace")
_SIZES = ("pp", "chunks", "microbatches", "group_size", "warmup_multiplier")
_SEARCH = ("placement", "memory_limit", "activation_size", "whole_backward", "effort")
_PROGRAM = ("receives", "keep")
_LEAVE = "leave one of them out"


def require_options_fit(args: argparse.Namespace) -> None:
    """Raise an error for options that would be ignored.

    Raises:
        ConfigError: If a given option does not apply to this form of the command.
    """
    if args.compare:
        unused = (*_FILES, "from_csv", "forward_only", "program", "pairs", *_SEARCH, *_PROGRAM)
        refuse_given(args, unused, "--compare shows all schedules, {} is about one; " + _LEAVE)
        return
    if args.from_csv is not None:
        making = (*_SIZES, "pairs", *_SEARCH)
        refuse_given(args, making, "--from-csv reads a schedule, {} is to make one; " + _LEAVE)
    elif args.name is not None and args.name != "auto":
        # Other options are checked by the builders, whose argument names match the options.
        only = f"{{}} is for auto only, not for {args.name}; {_LEAVE}"
        refuse_given(args, ("whole_backward",), only)
    if args.program:
        times = "--program prints the programs only, {} is about times; " + _LEAVE
        refuse_given(args, (*_FILES, "json"), times)
    else:
        refuse_given(args, _PROGRAM, "{} is for --program; add that, or leave it out")


def add_program_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--program`` and its options."""
    group = parser.add_argument_group("options of --program")
    group.add_argument(
        "--program",
        action="store_true",
        help="print what each rank executes instead: its compute actions, sends and receives",
    )
    group.add_argument(
        "--receives",
        choices=("ahead", "in_order"),
        help="post receives ahead of their readers, or in one order with the sends "
        "(default: ahead)",
    )
    group.add_argument(
        "--keep",
        type=whole_number,
        metavar="N",
        help="recompute activations, except for N of as many microbatches as a rank holds",
    )


def print_programs(schedule: Schedule, args: argparse.Namespace) -> None:
    """Print the proved programs of all ranks.

    Raises:
        ConfigError: If ``--keep`` is negative.
    """
    from megacore.pipeline import Lowering, Recompute

    require_at_least(args, keep=0)
    recompute = None if args.keep is None else Recompute(keep=args.keep)
    lowering = Lowering(receives=args.receives or "ahead", recompute=recompute)
    for rank, program in enumerate(schedule.lower(lowering)):
        print(f"rank {rank}: {program.to_text()}")
