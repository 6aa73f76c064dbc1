"""``megacore schedule --program``: the program of each rank, with its messages."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megacore.cli.values import require_at_least, whole_number

if TYPE_CHECKING:
    from megacore.pipeline import Schedule


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
