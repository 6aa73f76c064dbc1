"""Schedules from files: `pipeline.schedule_file`, read and proved once per start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.errors import ConfigError
from megacore.suggest import closest_matches

if TYPE_CHECKING:
    from megacore.pipeline import Schedule

COPY_NAME = "schedule.csv"  # in the folder of a run


@dataclass(frozen=True)
class ScheduleFile:
    """Content of a schedule file. A change of the file does not change a run that has read it.

    Attributes:
        path: As `pipeline.schedule_file`.
        text: The schedule in its text form, with the name of the file.
    """

    path: str
    text: str

    @property
    def schedule(self) -> Schedule:
        """The proved schedule."""
        return _schedule_of(self.text)

    @property
    def stages(self) -> Sequence[Sequence[int]]:
        """Stages of each rank, in chunk order."""
        return [self.schedule.stages(rank) for rank in range(self.schedule.num_ranks)]

    @property
    def has_pairs(self) -> bool:
        """True if forwards run together with backwards of other microbatches."""
        return any(self.schedule.overlaps(rank) for rank in range(self.schedule.num_ranks))

    @property
    def splits_backward(self) -> bool:
        """True if a backward runs as I and W."""
        from megacore.pipeline import ActionKind

        return any(
            action.kind == ActionKind.BACKWARD_WEIGHT
            for rank in range(self.schedule.num_ranks)
            for action in self.schedule.actions(rank)
        )


@lru_cache(maxsize=16)
def _schedule_of(text: str) -> Schedule:
    from megacore.pipeline import Schedule

    return Schedule.from_text(text)


def read_schedule_file(path: str, *, place: str = "default") -> ScheduleFile:
    """Read and prove a schedule from PyTorch's CSV of compute actions.

    Args:
        path: The file.
        place: Origin of the setting, for messages.

    Raises:
        ConfigError: If the file cannot be read or its schedule cannot be run, with the reason.
    """
    from megacore.pipeline import Schedule

    shown = f"pipeline.schedule_file = {path} ({place})"
    try:
        return ScheduleFile(path, Schedule.from_csv(path).to_text())
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}{_near(Path(path))}"
        raise ConfigError(f"{shown} {reason}") from None
    except ValueError as error:
        reason = str(error).removeprefix(f"{Path(path)}: ")
        reason = re.sub(r"'([^']{40})[^']+'", r"'\1...'", reason)  # of another kind of file
        raise ConfigError(f"{shown} is not a schedule that can be run: {reason}") from None


def _near(path: Path) -> str:
    """Return the files of the same folder with a similar name, as the end of a message."""
    if path.exists() or not path.parent.is_dir():
        return ""
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    close = closest_matches(path.name, names, count=3)
    guesses = " or ".join(str(path.parent / name) for name in close)
    return f"; did you mean {guesses}?" if close else ""
