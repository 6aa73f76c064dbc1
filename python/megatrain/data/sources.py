"""Sources of training text: the Python installation, files, folders, token files."""

from __future__ import annotations

import hashlib
import importlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megacore.errors import DataError
from megatrain.config.user_objects import call_object, import_object
from megatrain.data.file_kinds import FileKind
from megatrain.data.files import find_files, token_prefix
from megatrain.data.frame import Frame, frame_of
from megatrain.data.indexed import indexed_prefix, read_indexed
from megatrain.data.paths import missing_path
from megatrain.data.records import read_records, shards_of
from megatrain.data.stream import TokenSource
from megatrain.data.tokenizer import Tokenizer

BUILT_IN = ("python-docs", "stdlib")


@dataclass(frozen=True, kw_only=True)
class _Text:
    description: str
    documents: list[str]
    notes: tuple[str, ...] = ()


def load_tokens(
    source: str,
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    kind: FileKind | None = None,
    frame: Frame | None = None,
) -> TokenSource:
    """Read a source of text and tokenize it into one stream.

    Args:
        source: ``"python-docs"`` (English prose of the Python reference, about 0.5 MB, in every
            Python installation), ``"stdlib"`` (the standard library's own sources, about 10 MB),
            a file of text, JSON, parquet or arrow, a folder of such files, or the prefix of a
            ``.bin``/``.idx`` pair.
        tokenizer: Encodes text. A ``.bin``/``.idx`` pair is used as is.
        field: Field or column with the text of records.
        kind: Kind of the files; ``None``: by their contents and names.
        frame: Tokens around every document of text. Default: those of the tokenizer.

    Raises:
        DataError: If the source does not exist (with the closest names), has two readings, has no
            text, or holds a file or record that cannot be read.
    """
    if source not in BUILT_IN and kind is None:
        prefix = token_prefix(source)
        if prefix is not None:
            return indexed_source(source, prefix)
    return _joined(source, _read_text(source, field, kind), tokenizer, frame or frame_of(tokenizer))


def factory_source(path: str, tokenizer: Tokenizer) -> TokenSource:
    """Call the factory ``module:function`` with the tokenizer; it returns a :class:`TokenSource`.

    Raises:
        ConfigError: If there is no such function, or it fails.
        DataError: If it returns something else.
    """
    factory = import_object(path, setting="path of a data factory")
    source = call_object(factory, tokenizer, shown=f'the data factory "{path}"')
    if not isinstance(source, TokenSource):
        raise DataError(
            f'the data factory "{path}" must return a megatrain.data.TokenSource, got '
            f"{type(source).__name__}"
        )
    return source


def _joined(name: str, text: _Text, tokenizer: Tokenizer, frame: Frame) -> TokenSource:
    parts = [frame.opened(tokenizer.encode(document)) for document in text.documents]
    last = len(parts) - (0 if frame.ends_last else 1)
    after = np.array(frame.after, dtype=parts[0].dtype)
    parts = [np.concatenate((part, after)) for part in parts[:last]] + parts[last:]
    ends = np.cumsum([len(part) for part in parts])
    return TokenSource(
        name=name,
        description=text.description,
        tokens=np.concatenate(parts),
        document_starts=[0, *ends[:-1].tolist()],
        tokenizer=tokenizer,
        notes=text.notes + frame.notes,
    )


def indexed_source(source: str, prefix: Path) -> TokenSource:
    """Open token files as a source of the given name."""
    indexed = read_indexed(prefix)
    return TokenSource(
        name=source,
        description=f"token files {prefix}.bin and .idx, {indexed.num_documents:,} documents",
        tokens=indexed.tokens,
        document_starts=indexed.document_starts,
        loss_mask=indexed.mask,
        indexed=indexed,
    )


def _check_name(source: str) -> None:
    """Check that the name of a built-in source is not also that of a file or folder.

    Raises:
        DataError: If it is.
    """
    if source in BUILT_IN and (Path(source).exists() or indexed_prefix(source) is not None):
        raise DataError(
            f"data source {source} is both text that comes with Python and a name in "
            f"{Path.cwd()}; write ./{source} for the latter, or rename it"
        )


def _read_text(source: str, field: str, kind: FileKind | None) -> _Text:
    _check_name(source)
    if source == "python-docs":
        return _python_docs()
    if source == "stdlib":
        return _stdlib()
    path = Path(source)
    if not path.exists():
        known = ' (data.source is "python-docs", "stdlib", a file, a folder or a .bin/.idx prefix)'
        for half, other in ((".bin", ".idx"), (".idx", ".bin")):
            if Path(source + half).is_file():
                raise DataError(
                    f"{source}{half} exists but {source}{other} does not; both are needed"
                )
        raise DataError(missing_path("data source", path, names=BUILT_IN) + known)
    found = find_files(path, kind)
    documents = list(_documents(found.files, field, kind))
    if not documents:
        raise DataError(f"data source {path} has no text: every document is empty")
    count = f"{len(found.files):,} files" if path.is_dir() else "file"
    return _Text(
        description=f"{count} {'of ' if path.is_dir() else ''}{path}",
        documents=documents,
        notes=found.notes(path),
    )


def _documents(files: Sequence[Path], field: str, kind: FileKind | None) -> Iterator[str]:
    """Yield the documents of files that have text."""
    parts: list[str] = []
    for shard in (shard for path in files for shard in shards_of(path, kind)):
        for record in read_records(shard, field=field, on_bad=_refuse):
            if not isinstance(record.text, str):
                raise DataError(
                    f"{shard.path}: only text is read here; prepare pairs with a tokenizer"
                )
            parts.append(record.text)
            if record.ends:
                text = "".join(parts)
                parts.clear()
                if text:
                    yield text


def _refuse(sentence: str) -> None:
    raise DataError(sentence)


def _mixed(name: str) -> bytes:
    """Return a sort key that is independent of a document's subject and equal everywhere.

    Sorted by name, the last documents (which become validation data) would share one subject.
    """
    return hashlib.sha256(name.encode()).digest()


def _python_docs() -> _Text:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError(
            "this Python has no pydoc_data.topics (some distributions strip it); "
            'set data.source to "stdlib" or to a text file'
        ) from error
    return _Text(
        description=f"{len(topics)} topics of the Python language reference",
        documents=[topics[name] for name in sorted(topics, key=_mixed)],
    )


def _stdlib() -> _Text:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = {path.relative_to(root).as_posix(): path for path in _files_below(root, skipped)}
    documents = [
        text
        for path in (paths[name] for name in sorted(paths, key=_mixed))
        if path.suffix == ".py" and (text := _text_or_none(path)) is not None
    ]
    if not documents:
        raise DataError(
            f"the standard library folder {root} holds no .py files; "
            f'set data.source to "python-docs" or to a text file'
        )
    return _Text(
        description=f"{len(documents)} modules of Python's standard library", documents=documents
    )


def _files_below(folder: Path, skipped: set[str]) -> Iterator[Path]:
    """Yield the regular, visible files below ``folder`` in a deterministic order."""
    try:
        entries = sorted(folder.iterdir(), key=lambda path: path.name)
    except OSError as error:
        raise DataError(f"cannot read data folder {folder}: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith(".") or entry.name in skipped:
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _files_below(entry, skipped)
        elif entry.is_file():
            yield entry


def _text_or_none(path: Path) -> str | None:
    """Return the text of a module, or None if it is empty or not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DataError(f"cannot read data file {path}: {error.strerror}") from error
    return None if not text.strip() else text
