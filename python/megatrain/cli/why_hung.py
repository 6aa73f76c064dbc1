"""``megacore why-hung``: compare the calls of the ranks of a run that does not respond."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megacore.errors import ConfigError

EPILOG = """\
For a run in progress, the ranks of this machine are compared. After a failure, the ranks of all
machines are, from RUN/calls.
"""


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "why-hung",
        description="Show which ranks of a run wait for whom, and why.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the run (run.dir)")
    parser.add_argument(
        "--flight-recorder",
        metavar="PREFIX",
        type=Path,
        help="path of the dumps of torch's flight recorder, without the ranks at their ends "
        "(default: RUN/calls/flight_)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis."""
    from megatrain.hang.diagnosis import diagnosis_of_run

    found = diagnosis_of_run(args.run_dir, dumps=args.flight_recorder)
    if found is None:
        raise ConfigError(
            f"{args.run_dir}: no calls of ranks were found; give the run's folder on a machine "
            "that runs it with several ranks, or the folder of a run that has failed"
        )
    text = str(found)
    if not found.findings and not found.waits:
        text = "\n".join(filter(None, ["no rank waits for another", text]))
    print(text)
    return 0
