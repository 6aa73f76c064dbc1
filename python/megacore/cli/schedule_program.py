"""``megacore schedule --program``: the program of each rank, with messages and collectives."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from megacore.cli.values import require_at_least, whole_number

if TYPE_CHECKING:
    from megacore.pipeline import Lowering, Schedule

LEVELS = ("compute", "data", "resources")


def add_program_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``--program``."""
    group = parser.add_argument_group("options of --program")
    group.add_argument(
        "--program",
        choices=LEVELS,
        metavar="LEVEL",
        help="print the program of each rank instead: compute (what it computes), data (with "
        "messages, collectives and releases) or resources (with peers, sequence numbers and "
        "buffers)",
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


def lowering_of(args: argparse.Namespace) -> Lowering:
    """Return the lowering for the options.

    Raises:
        ConfigError: If ``--keep`` is negative.
    """
    from megacore.pipeline import Lowering, Recompute

    require_at_least(args, keep=0)
    recompute = None if args.keep is None else Recompute(keep=args.keep)
    return Lowering(receives=args.receives or "ahead", recompute=recompute)


def print_programs(schedule: Schedule, args: argparse.Namespace) -> None:
    """Print the validated programs of all ranks, and the transports without deadlock."""
    lowering = lowering_of(args)
    for rank, program in enumerate(schedule.lower(lowering)):
        print(f"rank {rank}: {program.to_text(args.program)}")
    report = schedule.transport_report(lowering)
    safe = [name for name, problem in report.items() if problem is None]
    print(f"\nfree of deadlock with these queues of messages: {', '.join(safe)}")
    unsafe = [name for name, problem in report.items() if problem is not None]
    if unsafe:
        print(f"not with: {', '.join(unsafe)}", file=sys.stdout)
