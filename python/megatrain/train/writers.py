"""Writers of step metrics: ``metrics.jsonl``, TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megacore.errors import ConfigError, MegacoreError
from megatrain.config import RunConfig
from megatrain.files import describe_os_error
from megatrain.train.metrics import MetricsWriter, StepRecord


class Writer(Protocol):
    """Interface of a writer, on rank 0 only."""

    def write(self, record: StepRecord) -> None:
        """Write one record."""

    def close(self) -> None:
        """Flush and close."""


def check_writers(names: Sequence[str]) -> None:
    """Check that the packages of ``run.writers`` are installed.

    Raises:
        ConfigError: If one is missing.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        # A folder of that name in the working directory would be found too, without an origin.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f'run.writers names "{name}", whose package is not installed; run '
                f'`pip install "megacore[{name}]"` or remove it from run.writers'
            )


class RunFileGuard:
    """Policy for files of a run that cannot be written, such as on a full disk.

    Args:
        note: Prints one line for the user.
        tolerant: Note an error, as ``checkpoint.on_failure = "continue"`` asks for; else it ends
            the run.
    """

    def __init__(self, note: Callable[[str], None], *, tolerant: bool) -> None:
        self._tolerant = tolerant
        self._note = note
        self._noted: set[str] = set()

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Context of writing ``what``: an ``OSError`` is noted once, or ends the run.

        Raises:
            MegacoreError: If the run must end.
        """
        try:
            yield
        except OSError as error:
            reason = f"{error.filename or what}: {describe_os_error(error)}"
            if not self._tolerant:
                raise MegacoreError(
                    f"{what} cannot be written: {reason}; make room and continue with "
                    'checkpoint.resume = "auto", or set checkpoint.on_failure = "continue"'
                ) from error
            if what not in self._noted:
                self._noted.add(what)
                self._note(f"{what} cannot be written now, training goes on: {reason}")


class RunWriters:
    """All writers of a run, for rank 0 only.

    Args:
        config: Resolved configuration.
        first_step: Finished steps; records of later ones, of an earlier start, are removed.
        guard: Policy for write errors.

    Raises:
        MegacoreError: If Weights & Biases refuses to start.
    """

    def __init__(
        self,
        run: RunConfig,
        settings: Mapping[str, Any],
        *,
        first_step: int,
        guard: RunFileGuard,
    ) -> None:
        directory = Path(run.dir)
        self._guard = guard
        path = directory / "metrics.jsonl"
        self._writers: dict[str, Writer] = {path.name: MetricsWriter(path, resume_step=first_step)}
        if "tensorboard" in run.writers:
            folder = directory / "tensorboard"
            self._writers["tensorboard"] = TensorBoardWriter(folder, first_step=first_step)
        if "wandb" in run.writers:
            self._writers["wandb"] = WandbWriter(directory, settings, resumed=first_step > 0)

    def write(self, record: StepRecord) -> None:
        """Write a record with every writer."""
        for name, writer in self._writers.items():
            with self._guard.guard(name):
                writer.write(record)

    def close(self, *, failed: bool) -> None:
        """Close all writers; after a failure only ``metrics.jsonl``, which waits for nothing."""
        for name, writer in self._writers.items():
            if not failed or isinstance(writer, MetricsWriter):
                with self._guard.guard(name):
                    writer.close()


class TensorBoardWriter:
    """Writer of event files.

    Args:
        folder: Folder of the event files.
        first_step: Finished steps; later ones are hidden.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events: Any = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, record: StepRecord) -> None:
        """Add the numbers of a record at its step."""
        for name, value in record.scalars().items():
            self._events.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._events.close()


class WandbWriter:
    """Writer of a run in Weights & Biases; offline with ``WANDB_MODE=offline``.

    A resumed run continues the same run there, whose id is in ``<run.dir>/wandb/id``.

    Args:
        directory: Folder of the run, which is called as it.
        settings: The resolved configuration as JSON values.
        resumed: Whether to continue a run.

    Raises:
        MegacoreError: If it does not start, for example without an API key.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, resumed: bool) -> None:
        import wandb

        file = directory / "wandb" / "id"
        file.parent.mkdir(parents=True, exist_ok=True)
        if not (resumed and file.exists()):
            file.write_text(uuid.uuid4().hex[:12])
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "megacore"),
                name=directory.absolute().name,
                id=file.read_text(),
                resume="allow",
                dir=str(directory),
                config=dict(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise MegacoreError(
                f"Weights & Biases does not start: {error}; set WANDB_API_KEY or WANDB_MODE=offline"
            ) from error
        # Its own axis must never decrease, as steps do after a resume from an older checkpoint.
        self._run.define_metric("*", step_metric="step")

    def write(self, record: StepRecord) -> None:
        """Log the numbers of a record at its step."""
        self._run.log({**record.scalars(), "step": record.step})

    def close(self) -> None:
        """Finish the run; online, this waits for the upload."""
        self._run.finish()
