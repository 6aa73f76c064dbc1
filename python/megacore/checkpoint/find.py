"""Which checkpoint to start from."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from megacore.checkpoint.agreement import on_every_rank, on_rank_0
from megacore.checkpoint.checked_files import check_content
from megacore.checkpoint.format import (
    INDEX_NAME,
    LATEST_NAME,
    PARTIAL_SUFFIX,
    REPLACED_SUFFIX,
    CheckpointIndex,
    check_files,
    is_step_folder,
    read_index,
    step_folders,
    without_advice,
)
from megacore.errors import CheckpointError
from megacore.parallel.process_groups import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """What there is to resume from.

    Attributes:
        path: The checkpoint folder; ``None`` to start anew.
        skipped: Why newer checkpoints were passed over, one sentence each.
        verified: Whether its files were compared with their checksums already.
    """

    path: Path | None
    skipped: tuple[str, ...] = ()
    verified: bool = False


def find_checkpoint(
    resume: str | None, directory: str | Path, *, groups: ProcessGroups
) -> FoundCheckpoint:
    """Decide what to resume from. Collective: rank 0 looks, all ranks get its answer.

    With ``"auto"`` the ranks share the work of comparing a checkpoint with its checksums, so a
    damaged one is found before anything of it is loaded.

    Args:
        resume: ``None`` to start anew; ``"auto"`` for the newest sound checkpoint of
            ``directory``, or to start anew if it holds none at all; else the path of a checkpoint,
            which must exist.
        directory: Folder of the run's checkpoints.
        groups: Process groups of this rank.

    Raises:
        CheckpointError: If ``resume`` is a path without a checkpoint, or ``"auto"`` and there are
            checkpoints but every one is damaged.
    """
    if resume is None:
        return FoundCheckpoint(path=None)
    if resume == "auto":
        return _newest_sound(Path(directory), groups)
    found = on_rank_0(lambda: resolve_checkpoint(resume), groups)
    return FoundCheckpoint(path=found)


def resolve_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder that a path means: itself, or the latest one below it.

    Args:
        path: A checkpoint folder, a folder of checkpoints, its ``latest`` file, or a run's folder.

    Raises:
        CheckpointError: If there is none, with what there is instead, or if ``latest`` names
            something else than a checkpoint folder beside it.
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
        _check_latest(directory / LATEST_NAME)
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


def _newest_sound(directory: Path, groups: ProcessGroups) -> FoundCheckpoint:
    skipped: list[str] = []
    for folder in on_rank_0(lambda: _newest_first(directory), groups):
        try:
            verify_files(folder, groups)
        except CheckpointError as error:
            skipped.append(without_advice(error))
            continue
        return FoundCheckpoint(path=folder, skipped=tuple(skipped), verified=True)
    if skipped:
        # Starting anew would bury the run under another one.
        count = (
            "the only checkpoint" if len(skipped) == 1 else f"none of {len(skipped)} checkpoints"
        )
        state = "is damaged" if len(skipped) == 1 else "is sound"
        raise CheckpointError(
            f"checkpoint.resume=auto: {count} in {directory} {state} ({'; '.join(skipped)}); "
            f"restore one, resume from another path, or start anew without checkpoint.resume"
        )
    return FoundCheckpoint(path=None)


def _newest_first(directory: Path) -> list[Path]:
    candidates = [path for _, path in reversed(step_folders(directory))]
    latest = _read_latest(directory)
    if latest in candidates:
        candidates.remove(latest)
        candidates.insert(0, latest)
    return candidates


def verify_files(folder: Path, groups: ProcessGroups) -> CheckpointIndex:
    """Compare all files of a checkpoint with their checksums, each rank a share. Collective.

    Raises:
        CheckpointError: On every rank, naming a file that is missing or damaged.
    """

    def verify_share() -> CheckpointIndex:
        index = read_index(folder)
        check_files(folder, index)
        for name in sorted(index.files)[groups.world.position :: groups.world.size]:
            check_content(folder / name, index.files[name])
        return index

    return on_every_rank(verify_share, groups)


def _check_latest(file: Path) -> None:
    name = _first_line(file)
    if name and not is_step_folder(name):
        raise CheckpointError(
            f"{file} names {name!r}, which is no checkpoint folder beside it; write the name of "
            f"one into it, such as step_00000001, or remove it to use the newest"
        )


def _read_latest(directory: Path) -> Path | None:
    # A run killed right after a checkpoint got its name has left the new `latest` unfinished.
    names = [_first_line(directory / name) for name in (LATEST_NAME + PARTIAL_SUFFIX, LATEST_NAME)]
    if names[1]:
        names.append(names[1] + REPLACED_SUFFIX)
    folders = [directory / name for name in names if is_step_folder(name)]
    return next((folder for folder in folders if folder.is_dir()), None)


def _first_line(file: Path) -> str:
    """The text of a file of one line; empty if there is none."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _suggest(path: Path) -> str:
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if folder == path.absolute().parent and close:
        return "; did you mean " + " or ".join(str(path.parent / name) for name in close) + "?"
    shown = ", ".join(sorted(names)[:6]) or "no folders"
    return f"; {folder} holds {shown}"
