"""Kinds of files of data by contents and name; gzip and zstd."""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from megacore.errors import DataError

# "json": an array, or objects one after the other; "jsonl": an object per line.
FileKind = Literal["text", "jsonl", "json", "parquet", "arrow"]
SNIFFED_BYTES = 64 << 10

_TEXT_SUFFIXES = frozenset({".txt", ".text"})
_PAGES = """
md markdown rst tex html htm org adoc py pyi c h cc cpp cxx hpp hh cu cuh java kt scala go rs js
mjs jsx ts tsx rb php pl pm sh bash swift mm cs fs hs ml mli lisp el clj erl ex lua r jl f f90 sql
v sv vhd s asm lean coq css scss dart zig nim
"""
_PAGE_SUFFIXES = frozenset(f".{name}" for name in _PAGES.split())
_JSON_SUFFIXES = frozenset({".json", ".jsonl", ".ndjson", ".jsonlines"})
_COMPRESSED_SUFFIXES = frozenset({".gz", ".zst", ".zstd"})
_JSON_START = re.compile(rb'\s*(\[\s*)?\{\s*("([^"\\]|\\.)*"\s*:|\})')
# Contents that are not text, by their first bytes.
_MAGICS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd file"),
    (4, b"1AY&SY", "compressed with bzip2; compress it with gzip or zstd"),
    (0, b"\xfd7zXZ", "compressed with xz; compress it with gzip or zstd"),
    (0, b"7z\xbc\xaf", "a 7z archive; unpack it"),
    (0, b"Rar!\x1a", "a RAR archive; unpack it"),
    (0, b"PK\x03\x04", "a ZIP archive; unpack it"),
    (257, b"ustar", "a tar archive; unpack it"),
    (0, b"%PDF-", "a PDF file; extract its text"),
    (0, b"SQLite format 3", "an SQLite database; export its rows as JSON lines"),
    (0, b"\x89HDF", "an HDF5 file; export its rows as JSON lines"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"MMIDIDX\0", "the index of token files; give their prefix as a source of its own"),
    # Before UTF-16, whose mark is the beginning of this one.
    (0, b"\xff\xfe\0\0", "UTF-32, not text in UTF-8; convert it"),
    (0, b"\0\0\xfe\xff", "UTF-32, not text in UTF-8; convert it"),
    (0, b"\xff\xfe", "UTF-16, not text in UTF-8; convert it"),
    (0, b"\xfe\xff", "UTF-16, not text in UTF-8; convert it"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the data; run git lfs pull"),
)
_TABLE_SUFFIXES = {
    ".csv": "a table of comma-separated values",
    ".tsv": "a table of tab-separated values",
    ".psv": "a table of separated values",
}
# Files of a folder that describe its data. They are left out by name.
_DESCRIPTION = re.compile(
    r"(readme|licen[cs]e|copying|notice|authors|contributors|contributing|changelog|citation"
    r"|code[_-]of[_-]conduct|(dataset|data|model)[_-]?card)([._ -].*)?",
    re.IGNORECASE,
)
_DESCRIPTION_SUFFIXES = frozenset({"", ".bib", ".cff", ".pdf"}) | _TEXT_SUFFIXES | _PAGE_SUFFIXES
_METADATA = """
dataset_info.json dataset_infos.json dataset_dict.json state.json croissant.json datapackage.json
tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt
merges.txt requirements.txt _SUCCESS _metadata _common_metadata SHA256SUMS MD5SUMS Thumbs.db
desktop.ini
""".split()  # noqa: SIM905
_HARMLESS_SUFFIXES = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".ico"), "a picture"),
    **dict.fromkeys((".md5", ".sha1", ".sha256", ".crc", ".asc", ".sig"), "a checksum"),
    **dict.fromkeys((".yaml", ".yml", ".toml", ".ini", ".cfg", ".lock", ".dvc"), "settings"),
}
# Names that programs give to copies and to files that they have not finished.
_UNFINISHED = re.compile(
    r".*(~|\.(bak|backup|old|orig|tmp|temp|swp|part|partial|crdownload|download|incomplete))",
    re.IGNORECASE,
)


class RefusedError(Exception):
    """A file that is not data; the message completes "it is ..."."""


def kind_of_file(path: Path, kind: FileKind | None = None) -> FileKind:
    """Return the kind of a file.

    Args:
        path: The file.
        kind: Kind that it should have; ``None``: by its contents and name.

    Raises:
        DataError: If it is not data of this kind, or of a known one.
    """
    if kind is None and (reason := describes_data(path)):
        raise DataError(
            f'data file {path} is {reason}, not data; kind = "text" (--kind text) reads it as text'
        )
    try:
        return file_kind(path, kind)
    except RefusedError as error:
        raise DataError(f"data file {path} is {error}") from None


@contextlib.contextmanager
def open_data(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; gzip and zstd are decompressed.

    Raises:
        DataError: If it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(_opened(path))
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataError(f"cannot read data file {path}: {reason}") from error


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed with gzip or zstd, by its contents."""
    with path.open("rb") as file:
        return _compression(file.read(4)) is not None


def import_pyarrow(path: Path, what: str) -> Any:
    """Import pyarrow.

    Raises:
        DataError: If it is not installed, with the command that installs it.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{path} is {what}, which needs pyarrow: pip install 'megacore[parquet]'"
        ) from error
    return pyarrow


def _opened(path: Path) -> BinaryIO:
    file = path.open("rb")
    compression = _compression(file.read(4))
    file.seek(0)
    if compression is None:
        return file
    file.close()
    if compression == "gzip":
        return cast(BinaryIO, io.BufferedReader(gzip.open(path, "rb"), 1 << 20))
    pyarrow = import_pyarrow(path, "compressed with zstd")
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), 1 << 20)


def _compression(start: bytes) -> Literal["gzip", "zstd"] | None:
    """Return the compression of a file that begins with four bytes."""
    if start.startswith(b"\x1f\x8b"):
        return "gzip"
    # A frame, or one that is skipped, with which files of pzstd begin.
    is_skipped = start[1:] == b"\x2a\x4d\x18" and start[0] >> 4 == 5
    return "zstd" if start == b"\x28\xb5\x2f\xfd" or is_skipped else None


def describes_data(path: Path) -> str:
    """Return what a file is if its name says that it describes data."""
    suffix = _suffix(path)
    if path.name in _METADATA or re.fullmatch(r"cache-[0-9a-f]+\.arrow", path.name):
        return "metadata"
    if _DESCRIPTION.fullmatch(path.name) and suffix in _DESCRIPTION_SUFFIXES:
        return "a description"
    return ""


def advice_of_text(path: Path) -> str:
    """Return what to do with text that is not JSON although it begins so, by the file's name."""
    if _suffix(path) in _JSON_SUFFIXES:
        return ""
    return '; if it is text that begins like JSON, kind = "text" (--kind text) reads it'


def is_page(path: Path) -> bool:
    """Return whether a file of text is a page or a script rather than a ``.txt`` file."""
    return _suffix(path) not in _TEXT_SUFFIXES


def is_unfinished(path: Path) -> bool:
    """Return whether a file's name is that of a copy or of an unfinished file."""
    return _UNFINISHED.fullmatch(path.name) is not None


def is_harmless(path: Path) -> bool:
    """Return whether a file beside data may be left out: a picture, a checksum, settings."""
    return _suffix(path) in _HARMLESS_SUFFIXES


def _suffix(path: Path) -> str:
    """Return the suffix in lower case, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in _COMPRESSED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def file_kind(path: Path, asked: FileKind | None) -> FileKind:
    """Return the kind of a file.

    Raises:
        RefusedError: If it is not data of this kind, with what it is.
    """
    suffix = _suffix(path)
    if not path.is_file():
        broken = path.is_symlink() and not path.exists()
        raise RefusedError("a link to nothing" if broken else "not a regular file")
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        raise RefusedError("one of two token files; give their prefix as a source of its own")
    if path.suffix == ".mask" and path.with_suffix(".bin").is_file():
        raise RefusedError("the mask of token files")
    with open_data(path) as file:
        start = file.read(SNIFFED_BYTES)
    kind = _kind_of_contents(start, suffix, asked, is_compressed(path))
    if asked is None or kind == asked or (asked == "json" and kind == "jsonl"):
        return kind
    raise RefusedError(f"{kind}, not {asked}")


def _kind_of_contents(
    start: bytes, suffix: str, asked: FileKind | None, is_packed: bool
) -> FileKind:
    wanted = asked if asked in {"parquet", "arrow"} else suffix[1:]
    if not start and wanted not in {"parquet", "arrow"}:
        raise RefusedError("empty")
    for magic, kind in ((b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"\xff\xff\xff\xff", "arrow")):
        if start.startswith(magic):
            if is_packed:
                raise RefusedError(f"a compressed {kind} file; decompress it")
            return cast(FileKind, kind)
    for offset, magic, what in _MAGICS:
        if start[offset:].startswith(magic):
            raise RefusedError(what)
    if wanted in {"parquet", "arrow"}:
        begin = f"begins with {start[:8]!r}" if start else "has 0 bytes"
        raise RefusedError(f"not a file of the {wanted} format: it {begin}")
    if asked in {"text", "jsonl"}:
        if b"\0" in start and asked == "text":
            raise RefusedError("binary, not text")
        return asked
    if asked is None and suffix in _HARMLESS_SUFFIXES:
        raise RefusedError(_HARMLESS_SUFFIXES[suffix])
    if suffix in _JSON_SUFFIXES or asked == "json" or _JSON_START.match(_without_mark(start)):
        return _kind_of_json(_without_mark(start))
    if b"\0" in start:
        raise RefusedError("binary, not text")
    if suffix in _TABLE_SUFFIXES:
        raise RefusedError(f"{_TABLE_SUFFIXES[suffix]}; write JSON lines or parquet of it")
    if suffix in _TEXT_SUFFIXES or suffix in _PAGE_SUFFIXES:
        return "text"
    if suffix == "" and _is_utf8(start):
        return "text"
    raise RefusedError('of an unknown kind; kind = "text" (--kind text) reads it as text')


def _kind_of_json(start: bytes) -> FileKind:
    """Decide between a value per line and values over several lines."""
    line, end, _ = start.lstrip().partition(b"\n")
    goes_on = end and line.rstrip().endswith((b"{", b",", b":", b"["))
    return "json" if goes_on or line.startswith(b"[") else "jsonl"


def _without_mark(start: bytes) -> bytes:
    return start.removeprefix(b"\xef\xbb\xbf")


def _is_utf8(start: bytes) -> bool:
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character may be cut by the end of the sniffed bytes.
        return error.start >= len(start) - 3 and len(start) == SNIFFED_BYTES
    return True
