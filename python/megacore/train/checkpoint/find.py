"""Which checkpoint to start from."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from megacore.errors import CheckpointError
from megacore.parallel.process_groups import ProcessGroups
from megacore.train.checkpoint.agreement import on_rank_0
from megacore.train.checkpoint.format import (
    INDEX_NAME,
    LATEST_NAME,
    PARTIAL_SUFFIX,
    check_files,
    read_index,
    step_folders,
)


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """What there is to resume from.

    Attributes:
        path: The checkpoint folder; ``None`` to start anew.
        skipped: Why newer checkpoints were passed over, one sentence each.
    """

    path: Path | None
    skipped: tuple[str, ...] = ()


def find_checkpoint(
    resume: str | None, directory: str | Path, *, groups: ProcessGroups
) -> FoundCheckpoint:
    """Decide what to resume from. Collective: rank 0 looks, all ranks get its answer.

    Args:
        resume: ``None`` to start anew; ``"auto"`` for the newest complete checkpoint of
            ``directory``, if there is one; else the path of a checkpoint, which must exist.
        directory: Folder of the run's checkpoints.
        groups: Process groups of this rank.

    Raises:
        CheckpointError: If ``resume`` is a path without a checkpoint.
    """
    if resume is None:
        return FoundCheckpoint(path=None)
    if resume == "auto":
        return on_rank_0(lambda: _newest_complete(Path(directory)), groups)
    found = on_rank_0(lambda: resolve_checkpoint(resume), groups)
    return FoundCheckpoint(path=found)


def resolve_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder that a path means: itself, or the latest one below it.

    Args:
        path: A checkpoint folder, a folder of checkpoints, its ``latest`` file, or a run's folder.

    Raises:
        CheckpointError: If there is none, with what there is instead.
    """
    path = Path(path)
    if path.name == LATEST_NAME and path.is_file():
        path = path.parent
    if path.name.endswith(PARTIAL_SUFFIX):
        raise CheckpointError(
            f"{path} is an unfinished checkpoint: the run that wrote it was interrupted; use a "
            f"finished one (step_…, without {PARTIAL_SUFFIX})"
        )
    if (path / INDEX_NAME).is_file():
        return path
    for directory in (path, path / "checkpoints"):
        latest = _read_latest(directory)
        if latest is not None:
            return latest
        folders = step_folders(directory)
        if folders:
            return folders[-1][1]
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}{_suggest(path)}")
    raise CheckpointError(
        f"{path} is no checkpoint: it has no {INDEX_NAME}, no {LATEST_NAME} and no step_… folder"
    )


def _newest_complete(directory: Path) -> FoundCheckpoint:
    candidates = [path for _, path in reversed(step_folders(directory))]
    latest = _read_latest(directory)
    if latest in candidates:
        candidates.remove(latest)
        candidates.insert(0, latest)
    skipped: list[str] = []
    for folder in candidates:
        try:
            check_files(folder, read_index(folder))
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        return FoundCheckpoint(path=folder, skipped=tuple(skipped))
    return FoundCheckpoint(path=None, skipped=tuple(skipped))


def _read_latest(directory: Path) -> Path | None:
    try:
        name = (directory / LATEST_NAME).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = directory / name
    return folder if name and folder.is_dir() else None


def _suggest(path: Path) -> str:
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if folder == path.absolute().parent and close:
        return "; did you mean " + " or ".join(str(path.parent / name) for name in close) + "?"
    shown = ", ".join(sorted(names)[:6]) or "no folders"
    return f"; {folder} holds {shown}"
