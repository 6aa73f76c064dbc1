"""Files of a data source: those to read, and other files of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.errors import DataError, printable
from megatrain.data.file_kinds import (
    FileKind,
    RefusedError,
    describes_data,
    file_kind,
    is_harmless,
    is_page,
    is_unfinished,
    kind_of_file,
)
from megatrain.data.indexed import indexed_prefix
from megatrain.data.paths import missing_path


@dataclass(frozen=True, kw_only=True)
class FoundFiles:
    """Files of a source.

    Attributes:
        files: Files to read, in their order.
        left_out: Other files and folders below the source, each with the reason.
    """

    files: tuple[Path, ...]
    left_out: tuple[str, ...] = ()

    def notes(self, source: Path) -> tuple[str, ...]:
        """Return a sentence about what is left out of a source, or nothing."""
        return (printable(f"{source}: left out: {_some(self.left_out)}"),) if self.left_out else ()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 6:,} others" if names[6:] else ""
    return ", ".join(names[:6]) + more


def token_prefix(source: str) -> Path | None:
    """Return the prefix of token files that a source names, or ``None`` for files of text.

    Raises:
        DataError: If the name has two readings.
    """
    prefix = None if source.endswith("/") else indexed_prefix(source)
    if prefix is None:
        return None
    path = Path(source)
    if prefix == path and path.exists():
        what, name = ("folder", f"{source}/") if path.is_dir() else ("file", "another name")
        raise DataError(
            f"data source {source} is both a {what} and the token files {source}.bin and .idx; "
            f"write {source}.bin for the token files, {name} for the {what}"
        )
    stem = path.with_suffix("")
    if prefix == path and path.suffix in {".bin", ".idx"} and indexed_prefix(stem) == stem:
        raise DataError(
            f"data source {source} is both a file of {stem}.bin and .idx and the prefix of "
            f"{source}.bin and .idx; rename one of the pairs"
        )
    return prefix


def find_files(source: Path, kind: FileKind | None = None) -> FoundFiles:
    """Return a file, or the files of data below a folder, sorted by name.

    READMEs, licenses, metadata, pictures, settings and hidden entries of a folder are left out.
    Beside records (JSON, parquet, arrow), so are scripts and pages.

    Args:
        source: The file or folder.
        kind: Kind of all files; ``None``: each by its contents and name.

    Raises:
        DataError: For a file that is not data of a known kind; or without files.
    """
    if source.is_file():
        kind_of_file(source, kind)
        return FoundFiles(files=(source,))
    if not source.is_dir():
        if source.exists():
            raise DataError(f"data source {source} is neither a regular file nor a folder")
        if indexed_prefix(source) is not None:
            raise DataError(f"{source} names token files, which are prepared already")
        raise DataError(missing_path("data source", source))
    kinds: dict[Path, FileKind] = {}
    left_out: list[str] = []
    refused: list[str] = []
    for path, reason in _walk(source, set()):
        name = path.relative_to(source).as_posix()
        if reason or (reason := describes_data(path)):
            left_out.append(f"{name} ({reason})")
            continue
        if kind is None and is_unfinished(path):
            refused.append(f"{name} (by its name, a copy or an unfinished file)")
            continue
        try:
            kinds[path] = file_kind(path, kind)
        except RefusedError as error:
            unneeded = str(error) == "empty" or is_harmless(path)
            (left_out if unneeded else refused).append(f"{name} ({error})")
    if refused:
        raise DataError(
            f"data source {source} holds files that cannot be read: {_some(refused)}; move them "
            "away, or give the files to read"
        )
    for path in _links_to(kinds):
        name = path.relative_to(source).as_posix()
        left_out.append(f"{name} (a link to a file that is read under another name)")
        del kinds[path]
    if kind is None and any(found != "text" for found in kinds.values()):
        pages = [path for path, found in kinds.items() if found == "text" and is_page(path)]
        for path in pages:
            left_out.append(f"{path.relative_to(source).as_posix()} (a page beside records)")
            del kinds[path]
    if not kinds:
        found = f"left out: {_some(left_out)}" if left_out else "found no files"
        raise DataError(f"data source {source} has no text: {found}")
    return FoundFiles(files=tuple(kinds), left_out=tuple(left_out))


def _links_to(files: Iterable[Path]) -> list[Path]:
    """Return the links among files to others of them."""
    found, links = set[Path](), list[Path]()
    for path in sorted(files, key=Path.is_symlink):  # files before links
        target = path.resolve()
        if path.is_symlink() and target in found:
            links.append(path)
        found.add(target)
    return links


def _walk(folder: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder in order, and for those to leave out the reason."""
    try:
        entries = sorted(folder.iterdir(), key=lambda path: path.name)
    except OSError as error:
        raise DataError(f"cannot read data folder {folder}: {error.strerror}") from error
    seen.add(folder.resolve())
    saved = _saved_dataset(folder)
    for entry in entries:
        if entry.name.startswith("."):
            yield entry, "hidden"
        elif entry.name == "__pycache__":
            yield entry, "compiled Python"
        elif entry.is_dir():
            if entry.resolve() in seen:
                yield entry, "a link to a folder that is read under another name"
            else:
                yield from _walk(entry, seen)
        elif saved and entry.suffix == ".arrow" and entry.name not in saved:
            yield entry, "not part of the saved dataset"
        elif saved and entry.suffix == ".arrow":
            if entry.name == saved[0]:  # in the order of the dataset
                yield from ((folder / name, "") for name in saved)
        else:
            yield entry, ""


def _saved_dataset(folder: Path) -> list[str]:
    """Return the files of a dataset saved by ``datasets``, in their order; none elsewhere.

    Raises:
        DataError: If it has several splits or rows in another order, or a file is missing.
    """
    splits = _json_object(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list) and len(splits) > 1:
        raise DataError(
            f"{folder} is a saved DatasetDict with the splits {', '.join(map(str, splits))}; give "
            f"the folder of one of them, e.g. {folder / str(splits[0])}"
        )
    state = _json_object(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(f"{folder} has its rows in another order; save flatten_indices() of it")
    stored = state.get("_data_files")
    names = [str(one.get("filename")) for one in stored] if isinstance(stored, list) else []
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise DataError(f"the saved dataset {folder} lacks its file {name}; copy it again")
    return names


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
