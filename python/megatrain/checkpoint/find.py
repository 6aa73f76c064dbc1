"""Selection of the checkpoint to resume from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megacore.errors import CheckpointError
from megacore.parallel.process_groups import ProcessGroups
from megacore.suggest import closest_matches
from megatrain.checkpoint.agreement import on_every_rank, on_rank_0
from megatrain.checkpoint.checked_files import check_content, check_size, without_advice
from megatrain.checkpoint.format import (
    INDEX_NAME,
    LATEST_NAME,
    PARTIAL_SUFFIX,
    REPLACED_SUFFIX,
    CheckpointIndex,
    is_step_folder,
    read_index,
    step_folders,
)


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """Checkpoint to resume from.

    Attributes:
        path: The checkpoint folder; ``None`` to start from scratch.
        skipped: Reasons for skipping newer checkpoints, one sentence each.
        verified: Whether the checksums of the files were already verified.
    """

    path: Path | None
    skipped: tuple[str, ...] = ()
    verified: bool = False


def find_checkpoint(
    resume: str | None, directory: str | Path, *, groups: ProcessGroups
) -> FoundCheckpoint:
    """Select the checkpoint to resume from. Collective: rank 0 reads the folder for all ranks.

    With ``"auto"`` all ranks verify the checksums together, each a share of the files, so that a
    damaged checkpoint is detected before it is loaded.

    Args:
        resume: ``None`` to start from scratch; ``"auto"`` for the newest intact checkpoint of
            ``directory``, or to start from scratch if there is no checkpoint; else the path of a
            checkpoint, which must exist.
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
    """Resolve a path to a checkpoint folder: the path itself, or the latest checkpoint below it.

    Args:
        path: A checkpoint folder, a folder of checkpoints, its ``latest`` file, or a run's folder.

    Raises:
        CheckpointError: If there is no checkpoint, or if ``latest`` does not contain the name of a
            checkpoint folder.
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
        # Starting from scratch would replace the run's results.
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
    """Verify the checksums of all files of a checkpoint, each rank a share. Collective.

    Raises:
        CheckpointError: On every rank, with the name of a missing or damaged file.
    """

    def verify_share() -> CheckpointIndex:
        index = read_index(folder)
        share = sorted(index.files)[groups.world.position :: groups.world.size]
        for name in share:  # before any content, which takes long
            check_size(folder / name, index.files[name])
        for name in share:
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
    # A run killed right after the rename of a checkpoint leaves the new `latest` as .partial.
    names = [_first_line(directory / name) for name in (LATEST_NAME + PARTIAL_SUFFIX, LATEST_NAME)]
    if names[1]:
        names.append(names[1] + REPLACED_SUFFIX)
    folders = [directory / name for name in names if is_step_folder(name)]
    return next((folder for folder in folders if folder.is_dir()), None)


def _first_line(file: Path) -> str:
    """Read the text of a one-line file; empty if the file is missing or unreadable."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _suggest(path: Path) -> str:
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    close = closest_matches(path.name, names, count=3)
    if folder == path.absolute().parent and close:
        return "; did you mean " + " or ".join(str(path.parent / name) for name in close) + "?"
    shown = ", ".join(sorted(names)[:6]) or "no folders"
    return f"; {folder} holds {shown}"
