"""Documents of text, JSON lines and parquet files, read in parts of bounded size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megacore.data.chat import ChatTemplate, MarkedText, marked_pair
from megacore.data.paths import missing_path
from megacore.errors import DataError

FileKind = Literal["text", "jsonl", "parquet"]
SHARD_BYTES = 32 << 20
# Small files of lines are cut into smaller shards, so that all workers end at about the same time.
_SMALL_SHARD_BYTES = 1 << 20
_SHARDS_PER_FILE = 256
_SETTING = "set data.field; --field of data prepare"
# Text is encoded in blocks of whole lines of about this size.
BLOCK_BYTES = 64 << 10
_SUFFIXES: dict[str, FileKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_BYTE_ORDER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip"}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part of one file: the lines, or row groups, that start in ``[begin, end)``.

    Attributes:
        path: The file.
        kind: Its format.
        begin: First byte, or first row group.
        end: One after the last byte or row group.
        is_last: Whether the file ends here.
    """

    path: Path
    kind: FileKind
    begin: int
    end: int
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Record:
    """Text of a document, or of a part of it.

    Attributes:
        text: The text; marked if only parts of it are learned.
        ends: Whether the document ends with it.
    """

    text: str | MarkedText
    ends: bool = True

    @property
    def length(self) -> int:
        """Number of characters."""
        return len(self.text if isinstance(self.text, str) else self.text.text)


OnBad = Callable[[str], None]


def kind_of_file(path: Path) -> FileKind:
    """Return the format of a file by its suffix; unknown suffixes are text."""
    return _SUFFIXES.get(path.suffix.lower(), "text")


def find_files(source: Path) -> list[Path]:
    """Return a file, or the visible files below a folder, sorted by name.

    In a folder, files that do not begin with UTF-8 text are left out, unless they are parquet.

    Raises:
        DataError: If there are none.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(missing_path("data source", source))
    files = [
        path
        for path in sorted(source.rglob("*"))
        if path.is_file()
        and path.stat().st_size > 0
        and not any(part.startswith(".") for part in path.relative_to(source).parts)
    ]
    usable = [path for path in files if kind_of_file(path) == "parquet" or _begins_as_text(path)]
    if not usable:
        found = f"{len(files)} files, none of them text in UTF-8" if files else "no files"
        raise DataError(f"data source {source} has no text: found {found}")
    return usable


def shards_of(path: Path, kind: FileKind) -> list[Shard]:
    """Cut a file into parts that workers read independently.

    Raises:
        DataError: If the file is empty or of another format.
    """
    if kind == "parquet":
        count, step = _open_parquet(path).metadata.num_row_groups, 1
    else:
        count, step = path.stat().st_size, SHARD_BYTES
        if kind == "jsonl":
            step = min(step, max(_SMALL_SHARD_BYTES, count // _SHARDS_PER_FILE))
        _check_encoding(path)
    if count == 0:
        raise DataError(f"data file {path} is empty")
    return [
        Shard(path=path, kind=kind, begin=at, end=min(at + step, count), is_last=at + step >= count)
        for at in range(0, count, step)
    ]


def read_records(
    shard: Shard, *, field: str, on_bad: OnBad, template: ChatTemplate | None = None
) -> Iterator[Record]:
    """Yield the documents of a shard in order.

    Args:
        shard: The part of a file.
        field: Field of JSON objects, or column of parquet files, with the text or the messages of a
            conversation; or those of prompt and completion, with a comma.
        on_bad: Called with one sentence for a record that cannot be read; it may raise.
        template: Renders conversations.
    """
    if shard.kind == "parquet":
        yield from _parquet_records(shard, field, on_bad, template)
    elif shard.kind == "jsonl":
        for offset, line in _lines(shard):
            text = _text_of_line(line, shard.path, offset, field, on_bad, template)
            if text is not None:
                yield Record(text=text)
    else:
        yield from _text_records(shard, on_bad)


def _lines(shard: Shard) -> Iterator[tuple[int, bytes]]:
    """Yield ``(offset, line)`` of the lines that start in the shard."""
    with shard.path.open("rb") as file:
        if shard.begin > 0:
            file.seek(shard.begin - 1)
            file.readline()
        offset = file.tell()
        while offset < shard.end:
            line = file.readline()
            if not line:
                return
            yield offset, line
            offset += len(line)


def _text_records(shard: Shard, on_bad: OnBad) -> Iterator[Record]:
    """Yield blocks of whole lines; the document is the file."""
    block: list[bytes] = []
    size = 0
    for offset, line in _lines(shard):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            on_bad(_not_utf8(shard.path, offset, error))
            continue
        block.append(line)
        size += len(line)
        if size >= BLOCK_BYTES:
            yield Record(text=_text(block), ends=False)
            block, size = [], 0
    if block or shard.is_last:
        yield Record(text=_text(block), ends=shard.is_last)


def texts_around(path: Path, at: int) -> tuple[str, str]:
    """Return text before and after the first line of a file that starts at a byte or later.

    Each has `BLOCK_BYTES` if the file has them. Lines that are not UTF-8 are left out.
    """
    with path.open("rb") as file:
        file.seek(at - 1)
        file.readline()
        border = file.tell()
        file.seek(max(0, border - BLOCK_BYTES))
        before, after = file.read(min(border, BLOCK_BYTES)), file.read(BLOCK_BYTES)
    # A character may be cut at the outer ends.
    before = before.lstrip(bytes(range(0x80, 0xC0)))
    return _readable(before), _readable(after)


def _readable(raw: bytes) -> str:
    lines = []
    for line in raw.splitlines(keepends=True):
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                lines.append(line[: error.start].decode("utf-8"))
    return "".join(lines)


def _text(lines: Sequence[bytes]) -> str:
    return b"".join(lines).decode("utf-8").removeprefix("\ufeff")


def _text_of_line(
    line: bytes,
    path: Path,
    offset: int,
    field: str,
    on_bad: OnBad,
    template: ChatTemplate | None,
) -> str | MarkedText | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        on_bad(_not_utf8(path, offset, error))
        return None
    except json.JSONDecodeError as error:
        place = f"{path}, line {line_number(path, offset)}, column {error.colno}"
        on_bad(f"{place}: not valid JSON: {error.msg}")
        return None
    except RecursionError:
        on_bad(f"{path}, line {line_number(path, offset)}: nested too deeply to be read")
        return None
    try:
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, got {type(row).__name__}")
        for name in field.split(","):
            if name not in row:
                fields = ", ".join(map(str, row)) or "none"
                raise ValueError(f'no field "{name}"; it has {fields} ({_SETTING})')
        text = _text_of_row(row, field, template, place="field")
        if b"\\u" in line:
            _check_surrogates(text if isinstance(text, str) else text.text)
        return text
    except DataError:
        raise
    except ValueError as error:
        on_bad(f"{path}, line {line_number(path, offset)}: {error}")
        return None


def _check_surrogates(text: str) -> None:
    """Check that no escape is half of a surrogate pair, which is not a character.

    Raises:
        ValueError: With the first of them.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"the text has {half}, half of a surrogate pair") from error


def _text_of_row(
    row: Mapping[str, Any], field: str, template: ChatTemplate | None, *, place: str
) -> str | MarkedText:
    """Return the document of a row that has all fields.

    Raises:
        ValueError: For a value of another type, or a conversation that cannot be rendered.
        DataError: For a conversation without a template.
    """
    values = [row[name] for name in field.split(",")]
    if isinstance(values[0], list) and len(values) == 1:
        if template is None:
            raise DataError(
                "conversations need a chat template: set the tokenizer to a tokenizer.json with "
                "chat_template.jinja, or chat_template in tokenizer_config.json, beside it"
            )
        return template.render(values[0], row.get("tools"))
    for name, value in zip(field.split(","), values, strict=True):
        if not isinstance(value, str):
            raise ValueError(f'the {place} "{name}" must be text, got {type(value).__name__}')
    return values[0] if len(values) == 1 else marked_pair(*values)


def _parquet_records(
    shard: Shard, field: str, on_bad: OnBad, template: ChatTemplate | None
) -> Iterator[Record]:
    file = _open_parquet(shard.path)
    names = file.schema_arrow.names
    columns = field.split(",")
    for column in columns:
        if column not in names:
            raise DataError(
                f'{shard.path} has no column "{column}"; it has {", ".join(names)} ({_SETTING})'
            )
    columns += [name for name in ("tools",) if name in names]
    row = sum(file.metadata.row_group(n).num_rows for n in range(shard.begin))
    groups = list(range(shard.begin, shard.end))
    for batch in file.iter_batches(row_groups=groups, columns=columns, batch_size=1024):
        for values in batch.to_pylist():
            try:
                text = _text_of_row(values, field, template, place="column")
            except DataError:
                raise
            except ValueError as error:
                on_bad(f"{shard.path}, row {row}: {error}")
            else:
                yield Record(text=text)
            row += 1


def _open_parquet(path: Path) -> Any:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{path} needs the pyarrow package: pip install '.[parquet]'") from error
    try:
        file = ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        size = path.stat().st_size
        raise DataError(
            f"{path} is not a parquet file: it has {size:,} bytes; {str(error).splitlines()[0]}"
        ) from error
    if file.metadata.num_rows == 0:
        raise DataError(f"{path} is a parquet file without rows")
    return file


def line_number(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that starts at a byte of a file."""
    count = 1
    with path.open("rb") as file:
        while offset > 0 and (part := file.read(min(offset, 1 << 20))):
            count += part.count(b"\n")
            offset -= len(part)
    return count


def _not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> str:
    wrong = error.object[error.start]
    return (
        f"{path}, line {line_number(path, offset)}: not UTF-8 text: byte "
        f"{offset + error.start:,} is 0x{wrong:02x}; convert it, e.g. iconv -f latin1 -t utf-8"
    )


def _check_encoding(path: Path) -> None:
    with path.open("rb") as file:
        mark = file.read(2)
    if mark in _BYTE_ORDER_MARKS:
        raise DataError(
            f"data file {path} is {_BYTE_ORDER_MARKS[mark]}, not text in UTF-8; convert it first"
        )


def _begins_as_text(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(BLOCK_BYTES)
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character may be cut by the end of the block.
        if error.start < len(start) - 3 or len(start) < BLOCK_BYTES:
            return False
    return b"\0" not in start
