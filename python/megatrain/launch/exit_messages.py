"""Exit messages of the launcher, and immediate process exit."""

from __future__ import annotations

import contextlib
import os
import sys

from megacore.errors import printable
from megatrain.launch.context import LaunchOptions
from megatrain.launch.worker import Outcome, error_file

CLEAR_LINE = "\r\x1b[K"
SHOW_CURSOR = "\x1b[?25h"


def print_outcome(
    outcome: Outcome, *, options: LaunchOptions, num_others: int = 0, all_ranks: bool = False
) -> None:
    """Print the outcome of a rank to standard error.

    Args:
        outcome: The outcome.
        options: Options for tracebacks (``debug``, ``error_dir``).
        num_others: Number of ranks that were stopped because of this outcome.
        all_ranks: Whether every rank prints its own outcome; a survivor then adds its rank number.
    """
    if not outcome.first or not outcome.sentence:
        return
    sentence = outcome.sentence
    if all_ranks and outcome.kind == "victim":
        sentence = f"[rank {outcome.rank}] {sentence}"
    if outcome.kind in ("error", "victim", "stopped"):
        sentence += stopped_too(num_others)
    if outcome.diagnosis:
        sentence += "".join(f"\n  {line}" for line in outcome.diagnosis.splitlines())
    if outcome.traceback and (
        options.debug or (outcome.kind == "error" and options.error_dir is None)
    ):
        sentence += f"\n{outcome.traceback.rstrip()}"
    elif outcome.kind == "error" and options.error_dir is not None:
        sentence += f"\n  full traceback: {error_file(options.error_dir, outcome.rank)}"
    complain(sentence)


def stopped_too(num_others: int) -> str:
    """Format the number of stopped ranks as the end of a sentence."""
    if num_others < 1:
        return ""
    others = "rank was" if num_others == 1 else f"{num_others} ranks were"
    return f"; the other {others} stopped"


def complain(sentence: str) -> None:
    """Print a sentence to standard error."""
    # A rank that died with a progress bar on screen leaves the cursor hidden in the bar's line.
    tidy = CLEAR_LINE + SHOW_CURSOR if sys.stderr.isatty() else ""
    print(f"{tidy}megacore: {printable(sentence)}", file=sys.stderr, flush=True)


def leave(code: int) -> None:
    """End the process immediately, because lost connections would block an orderly exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
