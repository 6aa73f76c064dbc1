"""Console output of rank 0: a start table, a progress bar or plain lines, and a summary."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as RemainingColumn
from rich.text import Text

from megatrain.report import RunInfo
from megatrain.train.metrics import StepRecord

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Contents of the end summary.

    Attributes:
        loss: Last training loss of this start; ``None`` if no label of its steps counted.
        validation_loss: Last validation loss, if there was one.
        unigram_entropy: Unigram entropy of the training text, nats per token; ``None`` if the loss
            is not of tokens.
        tokens_per_s: Average over the run.
        wall_time_s: Wall time of the run in seconds.
        num_skipped: Steps skipped because of a non-finite gradient.
        files: Output files by name: ``{"report": path, ...}``.
    """

    loss: float | None
    validation_loss: float | None
    unigram_entropy: float | None
    tokens_per_s: float
    wall_time_s: float
    num_skipped: int
    files: dict[str, Path]


class Console:
    """Console of a run, the only part of the trainer that prints; silent on all ranks but 0.

    Shows a live progress bar on a terminal, else plain lines every ``every`` steps. Use it as a
    context manager, so that the progress bar is removed on every exit.

    Args:
        steps: Steps of the whole run.
        first_step: First step that will run.
        plain: Print lines even on a terminal.
        silent: Print nothing at all.
        every: Steps between plain lines; default about 20 lines per run.
        file: Where to print; default standard output.
    """

    def __init__(
        self,
        *,
        steps: int,
        first_step: int = 0,
        plain: bool = False,
        silent: bool = False,
        every: int | None = None,
        file: TextIO | None = None,
    ) -> None:
        self._silent = silent
        self._rich = RichConsole(file=file, quiet=self._silent, highlight=False)
        live = self._rich.is_terminal and not self._rich.is_dumb_terminal and not plain
        self._progress = _make_progress(self._rich) if live and not self._silent else None
        self._task: TaskID | None = None
        self._steps = steps
        self._first_step = first_step
        self._every = every or max(1, (steps - first_step) // 20)
        self._started = time.monotonic()
        self._num_skipped: int | None = None
        self._losses: list[tuple[int, float]] = []  # with the numbers of their steps

    @property
    def is_live(self) -> bool:
        """True if a progress bar is shown."""
        return self._progress is not None

    def start(self, info: RunInfo, *, layout: str, folder: Path, notes: Sequence[str] = ()) -> None:
        """Print the start table and start the clock of the remaining-time estimate.

        Args:
            info: The run.
            layout: The parallel layout, e.g. ``"4 ranks = tp 2 x pp 2 (gloo, cpu)"``.
            folder: Output folder.
            notes: Additional lines, e.g. skipped checkpoints.
        """
        self._started = time.monotonic()
        left = f"{self._first_step + 1:,} to {self._steps:,}"
        tokens = f"{short_count(info.num_tokens)} training tokens"
        entropy = ""
        if info.unigram_entropy is not None:
            entropy = f", unigram entropy {info.unigram_entropy:.3f} nats"
        rows = [
            ("run", info.name),
            ("layout", layout),
            ("model", f"{info.model}, {short_count(info.num_parameters)} parameters"),
            ("data", f"{info.data}: {tokens}{entropy}"),
            ("schedule", info.schedule),
            *([("kernels", kernels)] if (kernels := info.environment.get("kernels")) else []),
            ("steps", left if self._first_step < self._steps else f"all {self._steps:,} are done"),
            ("results", str(folder)),
        ]
        if info.resumed_from is not None:
            rows.append(("resumed", info.resumed_from))
        self._table(rows + [("note", note) for note in notes])
        self._rich.print()

    def step(self, record: StepRecord) -> None:
        """Show one finished step."""
        if self._silent:
            return
        if record.loss is not None:
            self._losses.append((record.step, record.loss))
        self._report_skips(record)
        if self._progress is not None:
            self._show_live(record)
        elif self._is_due(record):
            self._line(self._plain_line(record))
        if record.validation_loss is not None and self._progress is not None:
            self._line(f"step {record.step:,}: {_validations_text(record)}")

    def note(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        self._line(text)

    def finish(self, summary: RunSummary) -> None:
        """Remove the progress bar and print the end summary."""
        self._stop()
        if self._silent:
            return
        self._rich.print()
        rows = [("loss", self._loss_text(summary))]
        finite = [loss for _, loss in self._losses if math.isfinite(loss)]
        if finite and self._rich.encoding.startswith("utf"):
            rows.append(("", f"{finite[0]:.2f} {sparkline(finite)} {finite[-1]:.2f}"))
        if summary.validation_loss is not None:
            rows.append(
                (
                    "validation",
                    _validation_text(
                        summary.validation_loss,
                        name="loss",
                        is_of_tokens=summary.unigram_entropy is not None,
                    ),
                )
            )
        rows.append(("speed", f"{summary.tokens_per_s:,.0f} tokens/s"))
        rows.append(("time", duration(summary.wall_time_s)))
        if summary.num_skipped:
            steps = "step" if summary.num_skipped == 1 else "steps"
            rows.append(("skipped", f"{summary.num_skipped} {steps} with a non-finite gradient"))
        rows += [(what, str(path)) for what, path in summary.files.items()]
        self._table(rows)

    def _loss_text(self, summary: RunSummary) -> str:
        if summary.loss is None:
            return "none, because no label counted"
        if math.isfinite(summary.loss):
            if summary.unigram_entropy is None:
                return f"{summary.loss:.4f}"
            gap = summary.unigram_entropy - summary.loss
            versus = f"{abs(gap):.3f} {'below' if gap > 0 else 'above'} the unigram entropy"
            return f"{summary.loss:.4f} nats per token, {versus}"
        finite = [k for k, (_, loss) in enumerate(self._losses) if math.isfinite(loss)]
        since, _ = self._losses[finite[-1] + 1 if finite else 0]
        return f"not finite since step {since:,}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.stop()
            self._task = None

    def _show_live(self, record: StepRecord) -> None:
        progress = self._progress
        assert progress is not None
        if self._task is None:
            # Added with the first step, so that the estimate excludes loading and building.
            self._task = progress.add_task(
                "train", total=self._steps, completed=self._first_step, metrics=""
            )
            progress.start()
        progress.update(
            self._task, completed=record.step, metrics="  ".join(record.console_texts())
        )

    def _is_due(self, record: StepRecord) -> bool:
        number = record.step
        return (
            number % self._every == 0
            or number in {self._first_step + 1, self._steps}
            or record.validation_loss is not None
        )

    def _plain_line(self, record: StepRecord) -> str:
        done = record.step - self._first_step
        left = (self._steps - record.step) * (time.monotonic() - self._started) / done
        width = len(f"{self._steps:,}")
        parts = [f"step {record.step:>{width},}/{self._steps:,}", *record.console_texts()]
        if record.validation_loss is not None:
            parts.append(_validations_text(record))
        if record.step < self._steps:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def _report_skips(self, record: StepRecord) -> None:
        before = record.num_skipped if self._num_skipped is None else self._num_skipped
        norm = record.grad_norm
        is_bad = norm is not None and not math.isfinite(norm)
        first_was_skipped = self._num_skipped is None and is_bad
        if record.num_skipped > before or first_was_skipped:
            self._line(
                f"step {record.step:,}: the gradient is not finite, so the update was skipped "
                f"({record.num_skipped} so far)"
            )
        self._num_skipped = record.num_skipped

    def _table(self, rows: Sequence[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self._rich.print(
                Text.assemble((f"{name:<{width}}  ", "bold cyan"), value), soft_wrap=True
            )

    def _line(self, text: str) -> None:
        self._rich.print(Text(text), soft_wrap=True)


class EvaluationConsole:
    """Progress of an evaluation: a bar on a terminal, else about 20 lines. A context manager.

    Args:
        num_batches: Global batches of all validation sets.
        num_tokens: Their tokens.
        silent: Print nothing at all.
        file: Where to print.
    """

    def __init__(self, *, num_batches: int, num_tokens: int, silent: bool, file: TextIO) -> None:
        self._rich = RichConsole(file=file, quiet=silent, highlight=False)
        live = self._rich.is_terminal and not self._rich.is_dumb_terminal and not silent
        self._bar = _make_progress(self._rich) if live else None
        self._num_batches, self._num_tokens = num_batches, num_tokens
        self._every = max(1, num_batches // 20)
        self._done = 0
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._rich.print(f"evaluating {self._num_tokens:,} tokens", soft_wrap=True)
        if self._bar is not None:
            self._bar.add_task("eval", total=self._num_batches, metrics="")
            self._bar.start()
        self._started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def batch(self) -> None:
        """Show one more finished batch."""
        self._done += 1
        spent = time.monotonic() - self._started
        speed = self._num_tokens * self._done / self._num_batches / max(spent, 1e-9)
        rate = f"{speed:,.0f} tok/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, metrics=rate)
        elif self._done % self._every == 0 or self._done in (1, self._num_batches):
            left = (self._num_batches - self._done) * spent / self._done
            width = len(f"{self._num_batches:,}")
            parts = [f"batch {self._done:>{width},}/{self._num_batches:,}", rate]
            parts += [f"{duration(left)} left"] if self._done < self._num_batches else []
            self._rich.print("  ".join(parts), soft_wrap=True)


def short_count(number: int) -> str:
    """Format a count with three significant digits.

    Example:
        >>> short_count(950), short_count(442958), short_count(12_000_000_000)
        ('950', '443k', '12B')
    """
    for unit, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{suffix}"
    return str(number)


def duration(seconds: float) -> str:
    """Format a time span.

    Example:
        >>> duration(4.2), duration(95), duration(7322)
        ('4.2 s', '1:35', '2:02:02')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """Draw a curve in one line of text; each character is the mean of a range of values.

    Example:
        >>> sparkline([5.0, 3.0, 2.0, 1.0])
        '█▅▃▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    cuts = [len(finite) * k // count for k in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _validation_text(
    loss: float, *, name: str = "validation loss", is_of_tokens: bool = True
) -> str:
    if not math.isfinite(loss):
        return f"{name} not finite"
    perplexity = f" (perplexity {math.exp(loss):.2f})" if is_of_tokens and loss < 20 else ""
    return f"{name} {loss:.4f}{perplexity}"


def _validations_text(record: StepRecord) -> str:
    """Format the validation loss and, in brackets, that of each of several sets."""
    assert record.validation_loss is not None
    text = _validation_text(record.validation_loss, is_of_tokens=not record.groups)
    sets = [
        f"{name} {f'{loss:.4f}' if math.isfinite(loss) else 'not finite'}"
        for name, loss in record.validation_losses.items()
    ]
    return f"{text} [{', '.join(sets)}]" if sets else text


def _make_progress(console: RichConsole) -> Progress:
    return Progress(
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}"),
        RemainingColumn(compact=True),
        console=console,
        expand=True,
    )
