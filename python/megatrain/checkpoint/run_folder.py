"""Exclusive run folders: a lock during the run, and archiving of an earlier run's results.

A run that starts from scratch never overwrites the results of another run. Those are moved to
``previous-1``, ``previous-2``, …, where ``megacore generate`` and the report can still read them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from megacore.errors import CheckpointError, ConfigError
from megacore.parallel.process_groups import ProcessGroups
from megatrain.checkpoint.agreement import on_rank_0
from megatrain.checkpoint.changes import is_same_run
from megatrain.checkpoint.format import LATEST_NAME, step_folders
from megatrain.checkpoint.model_files import copy_kept_files
from megatrain.config import ResolvedConfig
from megatrain.config.resolved import ResolvedCheckpointConfig
from megatrain.config.schedule_file import COPY_NAME
from megatrain.files import describe_os_error

LOCK_NAME = ".lock"
PREVIOUS = "previous-"
# Results prove that a run has made progress; its settings and tracebacks are moved with them.
_RESULTS = ("metrics.jsonl", "run.json", "timeline.json", "trace.json", "report.html")
_COMPANIONS = ("config.toml", COPY_NAME, "rank_*.err", "tensorboard", "wandb", "profile")


# ---- the lock ------------------------------------------------------------------------------------


@contextlib.contextmanager
def hold_folders(
    run: Path, checkpoint: ResolvedCheckpointConfig, groups: ProcessGroups
) -> Iterator[None]:
    """Lock the folders of this run against other runs. Collective at the start.

    Rank 0 holds an advisory lock on ``<run.dir>/.lock``, and on one in ``checkpoint.dir`` if that
    is not inside ``run.dir``. The system releases the locks on any exit of the process.

    Args:
        run: Folder of the run.
        checkpoint: The ``[checkpoint]`` section.
        groups: Process groups of this rank.

    Raises:
        ConfigError: On every rank, if another run holds a folder.
    """
    wanted = [("run.dir", run)]
    if checkpoint.saves and not is_inside(checkpoint.dir, run):
        wanted.append(("checkpoint.dir", Path(checkpoint.dir)))
    with contextlib.ExitStack() as held:

        def lock_all() -> None:
            for setting, folder in wanted:
                file = _lock(folder, setting)
                if file is not None:
                    held.enter_context(file)

        on_rank_0(lock_all, groups)
        yield


def _lock(folder: Path, setting: str) -> TextIO | None:
    """Open and lock the lock file; ``None`` if it cannot be created or locks are unsupported."""
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError:
        return None  # the probes of both folders report the reason
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            return None
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(
                f"cannot lock {path}: {describe_os_error(error)}; check the disk, or choose "
                f"another folder with {setting}"
            ) from error
        raise ConfigError(
            f"another run{f' ({holder})' if holder else ''} is writing to {setting} {folder}; wait "
            f"for its end, or give this run another folder"
        ) from error
    file.truncate(0)
    file.write(f"pid {os.getpid()} on host {socket.gethostname()}\n")
    file.flush()
    return file


# ---- a run that was restarted --------------------------------------------------------------------


def choose_resume(config: ResolvedConfig, groups: ProcessGroups, *, restarts: int) -> str | None:
    """Choose the start of a run: as configured, or ``auto`` for a restart. Collective.

    A restarted run has the same command, so it would start anew forever without this rule. It is
    the same run if its checkpoints are of the same model, data and seed.

    Args:
        config: Resolved configuration.
        groups: Process groups of this rank.
        restarts: Number of times that SLURM or torchrun has restarted the run.
    """
    if config.checkpoint.resume is not None or restarts == 0:
        return config.checkpoint.resume

    def has_same_run() -> bool:
        folders = step_folders(Path(config.checkpoint.dir))
        for _, folder in reversed(folders):
            with contextlib.suppress(CheckpointError):
                return is_same_run(folder, config)
        return bool(folders)  # all are damaged, which is reported

    return "auto" if on_rank_0(has_same_run, groups) else None


# ---- results of an earlier run -------------------------------------------------------------------


def move_aside(
    run: Path, checkpoint: ResolvedCheckpointConfig, found: Path | None, groups: ProcessGroups
) -> tuple[str, ...]:
    """Move an earlier run's results aside unless this run continues that run. Collective.

    Args:
        run: Folder of the run.
        checkpoint: The ``[checkpoint]`` section.
        found: The checkpoint this run starts from; ``None`` to start from scratch.
        groups: Process groups of this rank.

    Returns:
        A note if results were moved, else an empty tuple.

    Raises:
        ConfigError: On every rank, if the results cannot be moved.
    """
    if found is not None and _continues(found, run, Path(checkpoint.dir)):
        return ()
    return on_rank_0(lambda: _move_results(run, checkpoint), groups)


def _continues(found: Path, run: Path, checkpoints: Path) -> bool:
    """Check if a checkpoint belongs to the run of these folders."""
    run, path = run.resolve(), found.resolve()
    if path.parent == checkpoints.resolve():
        return True
    return path.is_relative_to(run) and not path.relative_to(run).parts[0].startswith(PREVIOUS)


def _move_results(run: Path, checkpoint: ResolvedCheckpointConfig) -> tuple[str, ...]:
    checkpoints = Path(checkpoint.dir)
    inside = is_inside(checkpoints, run)
    has_checkpoints = bool(step_folders(checkpoints))
    if not inside and not checkpoint.saves:
        has_checkpoints = False  # this run writes nothing there
    results = [run / name for name in _RESULTS if _has_content(run / name)]
    if not results and not has_checkpoints:
        return ()
    homes = [run] if inside else [run, checkpoints]
    name = _free_name(homes)
    moves: list[tuple[Path, Path]] = []
    if has_checkpoints:
        # Keep the relative path below previous-N, so that it can be resumed like any run.
        below = checkpoints.resolve().relative_to(run.resolve()) if inside else Path()
        base = run if inside else checkpoints
        moves += [(path, base / name / below / path.name) for path in _saved(checkpoints)]
    if results:
        results += [path for pattern in _COMPANIONS for path in sorted(run.glob(pattern))]
        moves += [(path, run / name / path.name) for path in results]
    for source, target in moves:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
        except OSError as error:
            raise ConfigError(
                f"cannot move the results of an earlier run from {source} to {target}: "
                f"{describe_os_error(error)}; give this run another run.dir"
            ) from error
    for home in homes:
        if (home / name).exists():
            with contextlib.suppress(OSError):  # the original may still be where it was
                copy_kept_files(home, home / name)
    places = sorted({str(home / name) for home in homes if (home / name).exists()})
    note = f"results of an earlier run were moved to {' and '.join(places)}"
    if has_checkpoints:
        note += f"; to continue it, start with --checkpoint.resume={moves[0][1].parent}"
    return (note,)


def _saved(checkpoints: Path) -> list[Path]:
    """List the files of a checkpoint folder to move; ``latest`` first, so that it never dangles."""
    latest = checkpoints / LATEST_NAME
    folders = sorted(checkpoints.glob("step_*"))  # leftovers too
    return [*([latest] if latest.is_file() else []), *folders]


def _free_name(homes: Sequence[Path]) -> str:
    number = 1
    while any((home / f"{PREVIOUS}{number}").exists() for home in homes):
        number += 1
    return f"{PREVIOUS}{number}"


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def is_inside(folder: str | Path, parent: Path) -> bool:
    """Check if ``folder`` is inside ``parent``, with symbolic links resolved."""
    return Path(folder).resolve().is_relative_to(parent.resolve())
