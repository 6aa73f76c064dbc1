"""``megacore trace``: the profiles of all ranks as one trace."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from megacore.errors import MegacoreError
from megatrain.cli.outputs import require_folder


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "trace",
        description="Join the profiles of all ranks (debug.profile_steps) on one clock, in one "
        "file for ui.perfetto.dev.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="merge")
    merge = actions.add_parser("merge", help="write one trace")
    merge.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    merge.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write, .json or .json.gz (default: RUN/profile/all_ranks.json.gz)",
    )


def run(args: argparse.Namespace) -> int:
    """Merge the profiles and print the path."""
    from megatrain.view.merged_trace import merge_profiles

    folder = args.run / "profile"
    found = {
        int(match[1]): path
        for path in folder.glob("rank_*.json.gz")
        if (match := re.fullmatch(r"rank_(\d+)\.json\.gz", path.name))
    }
    if not found:
        raise MegacoreError(
            f"{args.run} has no profiles in {folder}; train with debug.profile_steps, as in "
            '"10-12", and copy the folder of each host here'
        )
    out = args.out or folder / "all_ranks.json.gz"
    require_folder(str(out))
    ranks, events = merge_profiles([path for _, path in sorted(found.items())], out)
    missing = sorted(set(range(max(found))) - set(found))
    note = (
        f"; without ranks {', '.join(map(str, missing))}, which have no profile" if missing else ""
    )
    print(f"{out}: {ranks:,} ranks, {events:,} events{note}; open it in ui.perfetto.dev")
    return 0
