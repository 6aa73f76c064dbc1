"""One run per folder: a lock while it lives, and a place for what a former run left.

A run that starts anew never writes over the results of another one. They move to
``previous-1``, ``previous-2``, …, where ``megacore generate`` and the report still read them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megacore.checkpoint.agreement import on_rank_0
from megacore.checkpoint.format import LATEST_NAME, read_index, step_folders
from megacore.config import Config, filled
from megacore.errors import ConfigError
from megacore.files import describe_os_error
from megacore.parallel.process_groups import ProcessGroups

LOCK_NAME = ".lock"
PREVIOUS = "previous-"
# Results show that a run got somewhere; its settings and tracebacks go with them.
_RESULTS = ("metrics.jsonl", "run.json", "timeline.json", "trace.json", "report.html")
_COMPANIONS = ("config.toml", "rank_*.err")
# Settings that shape what a run computes, besides the model's and the data's.
_TRAIN_KEYS = ("seed", "global_batch_size")
# Used once, at the start of a fresh run.
_START_KEYS = frozenset({"init_std"})


# ---- the lock ------------------------------------------------------------------------------------


@contextlib.contextmanager
def hold_folders(config: Config, groups: ProcessGroups) -> Iterator[None]:
    """Keep other runs out of the folders of this one. Collective at the start.

    Rank 0 holds an advisory lock on ``<run.dir>/.lock``, and on one in ``checkpoint.dir`` if that
    lies elsewhere. The system releases them when the process ends, however it ends.

    Raises:
        ConfigError: On every rank, if another run holds a folder.
    """
    wanted = [("run.dir", _run_dir(config))]
    if config.checkpoint.interval >= 0 and not _is_inside(
        _checkpoint_dir(config), _run_dir(config)
    ):
        wanted.append(("checkpoint.dir", _checkpoint_dir(config)))
    with contextlib.ExitStack() as held:

        def lock_all() -> None:
            for setting, folder in wanted:
                file = _lock(folder, setting)
                if file is not None:
                    held.enter_context(file)

        on_rank_0(lock_all, groups)
        yield


def _lock(folder: Path, setting: str) -> TextIO | None:
    """The locked file; ``None`` where none can be made or the file system knows no locks."""
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError:
        return None  # the probes of both folders say what is wrong with it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise ConfigError(
            f"another run{f' ({holder})' if holder else ''} is writing to {setting} {folder}; wait "
            f"for its end, or give this run another folder"
        ) from error
    file.truncate(0)
    file.write(f"pid {os.getpid()} on host {socket.gethostname()}\n")
    file.flush()
    return file


# ---- what a former run left ----------------------------------------------------------------------


def make_place(config: Config, found: Path | None, groups: ProcessGroups) -> tuple[str, ...]:
    """Move a former run's results aside unless this run continues it. Collective.

    Args:
        config: Resolved configuration.
        found: The checkpoint this run starts from; ``None`` if it starts anew.
        groups: Process groups of this rank.

    Returns:
        A sentence about what was moved, if anything was.

    Raises:
        ConfigError: On every rank, if it cannot be moved.
    """
    if found is not None and _continues(found, config):
        return ()
    return on_rank_0(lambda: _set_aside(config), groups)


def _continues(found: Path, config: Config) -> bool:
    """Whether a checkpoint belongs to the run in ``run.dir``."""
    run, path = _run_dir(config).resolve(), found.resolve()
    if path.parent == _checkpoint_dir(config).resolve():
        return True
    return path.is_relative_to(run) and not path.relative_to(run).parts[0].startswith(PREVIOUS)


def _set_aside(config: Config) -> tuple[str, ...]:
    run, checkpoints = _run_dir(config), _checkpoint_dir(config)
    inside = _is_inside(checkpoints, run)
    has_checkpoints = bool(step_folders(checkpoints))
    if not inside and config.checkpoint.interval < 0:
        has_checkpoints = False  # this run writes nothing there
    results = [run / name for name in _RESULTS if _has_content(run / name)]
    if not results and not has_checkpoints:
        return ()
    homes = [run] if inside else [run, checkpoints]
    name = _free_name(homes)
    moves: list[tuple[Path, Path]] = []
    if has_checkpoints:
        # With the folder's own name below previous-N, so that it can be resumed like any run.
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
                f"cannot move what a former run left in {source} to {target}: "
                f"{describe_os_error(error)}; give this run another run.dir"
            ) from error
    places = sorted({str(home / name) for home in homes if (home / name).exists()})
    return (f"what a former run left here was moved to {' and '.join(places)}",)


def _saved(checkpoints: Path) -> list[Path]:
    """Everything of ours in a folder of checkpoints; ``latest`` goes first, lest it dangle."""
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


# ---- settings that changed -----------------------------------------------------------------------


def changed_settings(found: Path, config: Config) -> tuple[str, ...]:
    """Sentences about settings that change what is computed and differ from the checkpoint's.

    Args:
        found: The checkpoint that this run continues from.
        config: Resolved configuration of this run.
    """
    ours = json.loads(config.model_dump_json())
    return compare_settings(read_index(found).config, ours)


def compare_settings(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[str, ...]:
    """As `changed_settings`, from plain values.

    Example:
        >>> compare_settings({"train": {"seed": 1, "steps": 9}}, {"train": {"seed": 2, "steps": 8}})
        ('train.seed is 2 now and was 1 in the checkpoint: the run goes on with 2',)
    """
    notes = []
    for section in ("model", "moe", "data", "train"):
        before, now = theirs.get(section, {}), ours.get(section, {})
        for key in sorted(set(before) & set(now)):
            matters = key in _TRAIN_KEYS if section == "train" else key not in _START_KEYS
            if matters and before[key] != now[key]:
                notes.append(
                    f"{section}.{key} is {now[key]} now and was {before[key]} in the checkpoint: "
                    f"the run goes on with {now[key]}"
                )
    return tuple(notes)


def _run_dir(config: Config) -> Path:
    return Path(filled(config.run.dir))


def _checkpoint_dir(config: Config) -> Path:
    return Path(filled(config.checkpoint.dir))


def _is_inside(folder: Path, parent: Path) -> bool:
    """Whether ``folder`` really lies in ``parent``, with symbolic links followed."""
    return folder.resolve().is_relative_to(parent.resolve())
