"""Decisions that all ranks take together after a step: save, stop early, or give up.

A rank votes with a few numbers that are part of the step's only all-reduce, so agreement costs
neither communication nor a wait for the device.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.calls.processes import signal_name
from megacore.errors import DivergedError
from megatrain.config import RunConfig, TrainSectionConfig, duration_s
from megatrain.config.unused import SPIKE_START as SPIKE_START
from megatrain.launch.context import RankContext

# [ranks with a signal, sum of their (rank, signal) codes, time is over, a checkpoint is due]
NUM_VOTES = 4
_CODE = 128  # signal numbers are below

# A spike is this many standard deviations above the mean of the last finite losses, and this part
# of the mean; judged from the first number of losses on.
SPIKE_DEVIATIONS = 8.0
SPIKE_PART = 0.1
SPIKE_WINDOW = 100


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Common decision of all ranks after a step.

    Attributes:
        save: Whether a checkpoint is due by time.
        stop: Reason to stop early; ``None`` to continue.
        notes: Lines for the console.
    """

    save: bool
    stop: str | None
    notes: tuple[str, ...] = ()


class RunControl:
    """Votes of one rank and the rules for their sum; equal decisions on every rank.

    Args:
        train: The ``[train]`` section.
        run: The ``[run]`` section.
        save_interval_s: Seconds between checkpoints by time; ``None`` for none.
        context: The rank, with its signals.
        started: `time.monotonic` of the start of this process's run.

    Attributes:
        loss_limit: Largest loss that is not a spike; infinite before there are enough losses.
    """

    def __init__(
        self,
        train: TrainSectionConfig,
        run: RunConfig,
        context: RankContext,
        *,
        save_interval_s: float | None,
        started: float,
    ) -> None:
        self._train, self._run = train, run
        self._context = context
        self._stop_at = math.inf
        if run.stop_after is not None:
            self._stop_at = started + duration_s(run.stop_after)
        self._save_interval_s = save_interval_s or math.inf
        self._saved_at = time.monotonic()
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self.loss_limit = math.inf
        self._num_skipped_in_row = 0
        self._has_noted_empty = False

    @property
    def is_skipping(self) -> bool:
        """True if the last update was skipped because of a non-finite gradient."""
        return self._num_skipped_in_row > 0

    @property
    def will_give_up(self) -> bool:
        """True if one more skipped update ends the run."""
        limit = self._train.max_skipped_steps
        return 0 < limit <= self._num_skipped_in_row + 1

    def votes(self) -> tuple[float, ...]:
        """Return this rank's votes for the next step."""
        rank, number = self._context.rank, self._context.stop.signal
        if rank != 0:
            return (float(number > 0), float(number and rank * _CODE + number), 0.0, 0.0)
        now = time.monotonic()
        due = now >= self._saved_at + self._save_interval_s
        return (float(number > 0), float(number), float(now >= self._stop_at), float(due))

    def state(self) -> dict[str, Any]:
        """Return the history that decisions depend on, for a checkpoint; equal on every rank."""
        return {"losses": list(self._losses), "num_skipped_in_row": self._num_skipped_in_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with the history of :meth:`state`; an empty one changes nothing.

        Raises:
            ValueError: If it is not such a history.
        """
        losses, num_skipped = state.get("losses", ()), state.get("num_skipped_in_row", 0)
        if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
            raise ValueError(f"losses must be finite numbers, got {losses}")
        if not isinstance(num_skipped, int) or num_skipped < 0:
            raise ValueError(f"num_skipped_in_row must be at least 0, got {num_skipped}")
        self._num_skipped_in_row = num_skipped
        for loss in losses:
            self._keep(loss)

    def note_saved(self) -> None:
        """Restart the clock of checkpoints by time."""
        self._saved_at = time.monotonic()

    def judge(
        self,
        votes: tuple[float, ...],
        *,
        step: int,
        loss: float,
        skipped: bool,
        is_empty: bool = False,
    ) -> Verdict:
        """Decide after a step.

        Args:
            votes: Sum of the votes of all ranks.
            step: Number of the step, from 0.
            loss: Its loss.
            skipped: Whether its update was skipped.
            is_empty: Whether no label of the step counts, so that there was nothing to update.

        Raises:
            DivergedError: If the run must not continue.
        """
        is_spike = math.isfinite(loss) and loss > self.loss_limit
        by_rule = is_spike and self._train.on_spike == "skip"
        if not is_empty:
            is_failure = skipped and not by_rule
            self._num_skipped_in_row = self._num_skipped_in_row + 1 if is_failure else 0
        limit = self._train.max_skipped_steps
        if 0 < limit <= self._num_skipped_in_row:
            raise DivergedError(
                f"step {step + 1:,}: the updates of {self._num_skipped_in_row} steps in a row were "
                f"skipped because of a non-finite gradient (train.max_skipped_steps); earlier "
                f"checkpoints are kept"
            )
        notes = self._judge_loss(step, loss)
        if is_empty and not self._has_noted_empty:
            self._has_noted_empty = True
            notes += (
                f"step {step + 1:,}: no label of the batch counts, so nothing was updated; later "
                "steps of this kind are recorded without a loss",
            )
        num_signals, codes, is_over, is_due = (round(vote) for vote in votes)
        stop = None
        if num_signals == 1:
            rank, number = divmod(codes, _CODE)
            stop = f"{signal_name(number)} to rank {rank}"
        elif num_signals > 1:
            stop = f"signals to {num_signals} ranks (Ctrl-C, SIGTERM or SIGUSR1)"
        elif is_over:
            stop = f"run.stop_after = {self._run.stop_after}"
        return Verdict(save=is_due > 0, stop=stop, notes=notes)

    def _judge_loss(self, step: int, loss: float) -> tuple[str, ...]:
        limit, action = self.loss_limit, self._train.on_spike
        if not math.isfinite(loss):
            return ()
        if loss <= limit:
            self._keep(loss)
            return ()
        text = f"step {step + 1:,}: the loss {loss:.4f} is a spike (limit {limit:.4f})"
        if action == "stop":
            raise DivergedError(f'{text}; train.on_spike = "stop", earlier checkpoints are kept')
        if action == "skip":
            return (f"{text}, so the update was skipped",)
        self._keep(loss)
        return (text,)

    def _keep(self, loss: float) -> None:
        """Add a loss to those that the next ones are compared with."""
        self._losses.append(loss)
        if len(self._losses) < SPIKE_START or self._train.on_spike == "ignore":
            return
        # Not by the statistics module, which computes with fractions: 0.3 ms per call.
        mean = math.fsum(self._losses) / len(self._losses)
        squares = math.fsum([(each - mean) ** 2 for each in self._losses])
        deviation = math.sqrt(squares / len(self._losses))
        self.loss_limit = mean + max(SPIKE_DEVIATIONS * deviation, SPIKE_PART * abs(mean))
