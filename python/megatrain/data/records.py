"""Documents of the files of a source, read in parts of bounded size."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from megacore.errors import DataError
from megatrain.data.chat import ChatTemplate, MarkedText
from megatrain.data.fields import FieldForm
from megatrain.data.file_kinds import (
    FileKind,
    advice_of_text,
    is_compressed,
    kind_of_file,
    open_data,
)
from megatrain.data.pair_text import PAIR_COLUMNS, PairText, pair_of
from megatrain.data.tables import arrow_rows, num_row_groups, parquet_rows

SHARD_BYTES = 32 << 20
# Small files of lines are cut into smaller shards, so that all workers end at about the same time.
_SMALL_SHARD_BYTES = 1 << 20
_SHARDS_PER_FILE = 256
# Text is encoded in blocks of whole lines of about this size.
BLOCK_BYTES = 64 << 10
_SPACE = " \t\r\n"
# The only other reason of Python's JSON reader.
_LONG_INTEGER = f"an integer has more than {sys.get_int_max_str_digits():,} digits"


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
        text: The text; marked if only parts of it are learned; or a pair, two documents.
        ends: Whether the document ends with it.
    """

    text: str | MarkedText | PairText
    ends: bool = True

    @property
    def length(self) -> int:
        """Number of characters."""
        if isinstance(self.text, PairText):
            return self.text.length
        return len(self.text if isinstance(self.text, str) else self.text.text)


OnBad = Callable[[str], None]


def shards_of(path: Path, kind: FileKind | None = None) -> list[Shard]:
    """Cut a file into parts that workers read independently.

    Compressed files, JSON over several lines and arrow files are one part each.

    Args:
        path: The file.
        kind: Its kind; ``None``: by its contents and name.

    Raises:
        DataError: If the file is empty or of another kind.
    """
    found = kind_of_file(path, kind)
    if found in {"arrow", "json"} or is_compressed(path):
        return [Shard(path=path, kind=found, begin=0, end=sys.maxsize, is_last=True)]
    if found == "parquet":
        count, step = num_row_groups(path), 1
    else:
        count, step = path.stat().st_size, SHARD_BYTES
        if found == "jsonl":
            step = min(step, max(_SMALL_SHARD_BYTES, count // _SHARDS_PER_FILE))
    return [
        Shard(
            path=path, kind=found, begin=at, end=min(at + step, count), is_last=at + step >= count
        )
        for at in range(0, count, step)
    ]


def read_records(
    shard: Shard,
    *,
    field: str,
    on_bad: OnBad,
    template: ChatTemplate | None = None,
    separator: str | None = None,
    pairs: bool = False,
) -> Iterator[Record]:
    """Yield the documents of a shard in order.

    Args:
        shard: The part of a file.
        field: Fields of JSON objects, or columns of tables, see `FieldForm`.
        on_bad: Called with one sentence for a record that cannot be read; it may raise.
        template: Renders conversations.
        separator: Text after each field of a prompt, see `FieldForm`.
        pairs: Read pairs of answers, see `pair_of`, and not ``field``.

    Raises:
        DataError: If pairs are to be read from text.
    """
    if shard.kind == "text":
        if pairs:
            raise DataError(
                f"{shard.path} must have pairs, records with chosen and rejected, but it is text"
            )
        yield from _text_records(shard, on_bad)
        return
    form = FieldForm.of(field, separator)
    names = PAIR_COLUMNS if pairs else form.names
    noun = "field" if shard.kind in {"jsonl", "json"} else "column"
    for where, row in _rows(shard, names, on_bad):
        try:
            if not isinstance(row, dict):
                raise ValueError(f"expected a JSON object, got {type(row).__name__}")
            text: str | MarkedText | PairText
            if pairs:
                text = pair_of(row, template)
                _check_surrogates(text.chosen + text.rejected)
            else:
                text = form.document(row, template, noun=noun)
                _check_surrogates(text if isinstance(text, str) else text.text)
        except DataError:
            raise
        except ValueError as error:
            on_bad(f"{where()}: {error}")
        else:
            yield Record(text=text)


def _rows(
    shard: Shard, names: Sequence[str], on_bad: OnBad
) -> Iterator[tuple[Callable[[], str], Any]]:
    """Yield the place and the values of each record."""
    path = shard.path
    if shard.kind == "jsonl":
        for offset, line in _lines(shard):
            for row in _row_of_line(line, path, offset, on_bad):
                yield partial(_line_place, path, offset), row
    elif shard.kind == "json":
        for line_of_value, row in _json_values(path):
            yield partial(f"{path}, line {{}}".format, line_of_value), row
    else:
        rows = (
            parquet_rows(path, names, shard.begin, shard.end)
            if shard.kind == "parquet"
            else arrow_rows(path, names)
        )
        for number, row in rows:
            yield partial(f"{path}, row {{}}".format, number), row


def _lines(shard: Shard) -> Iterator[tuple[int, bytes]]:
    """Yield ``(offset, line)`` of the lines that start in the shard."""
    with open_data(shard.path) as file:
        offset = shard.begin
        if offset > 0:
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
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


def _row_of_line(line: bytes, path: Path, offset: int, on_bad: OnBad) -> tuple[Any, ...]:
    """Return the value of a line; nothing for an empty or a bad one."""
    if not line.strip():
        return ()
    try:
        return (json.loads(line.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")),)
    except UnicodeDecodeError as error:
        on_bad(_not_utf8(path, offset, error))
    except json.JSONDecodeError as error:
        on_bad(
            f"{_line_place(path, offset)}, column {error.colno}: not valid JSON: {error.msg}"
            f"{advice_of_text(path)}"
        )
    except RecursionError:
        on_bad(f"{_line_place(path, offset)}: nested too deeply to be read")
    except ValueError:
        on_bad(f"{_line_place(path, offset)}: {_LONG_INTEGER}")
    return ()


def _json_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield line and value of the elements of an array, or of objects one after the other.

    Raises:
        DataError: If the file is not valid JSON; what follows cannot be read then.
    """
    with open_data(path) as file:
        text = _JsonText(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
        try:
            yield from text.elements() if text.next_character() == "[" else text.values()
        except UnicodeDecodeError:
            raise DataError(_first_not_utf8(path)) from None
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, {text.place(error.pos)}: not valid JSON: {error.msg}"
                f"{advice_of_text(path)}"
            ) from error
        except RecursionError as error:
            raise DataError(f"{path}, line {text.line}: nested too deeply to be read") from error
        except ValueError as error:
            raise DataError(f"{path}, line {text.line}: {_LONG_INTEGER}") from error


class _JsonText:
    """JSON values of a text of any length, read piece by piece.

    Attributes:
        line: Number, from 1, of the line of the next character.
    """

    def __init__(self, reader: TextIO) -> None:
        self.line = 1
        self._reader = reader
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0
        # Characters of the first line of `_text` that were read before.
        self._column = 0

    def values(self) -> Iterator[tuple[int, Any]]:
        """Yield line and value until the end."""
        while self.next_character():
            yield self.line, self._value()

    def elements(self) -> Iterator[tuple[int, Any]]:
        """Yield line and value of the elements of an array, which is the whole text."""
        self._advance(self._at + 1)
        if self.next_character() == "]":
            self._advance(self._at + 1)
        else:
            while True:
                self.next_character()
                yield self.line, self._value()
                following = self.next_character()
                if following not in {",", "]"}:
                    raise json.JSONDecodeError("Expecting ',' or ']'", self._text, self._at)
                self._advance(self._at + 1)
                if following == "]":
                    break
        if self.next_character():
            raise json.JSONDecodeError("text after the end of the array", self._text, self._at)

    def place(self, position: int) -> str:
        """Return line and column, from 1, of a position of an error."""
        line = self.line + self._text.count("\n", self._at, position)
        last = self._text.rfind("\n", 0, position)
        column = position - last if last >= 0 else self._column + position + 1
        return f"line {line}, column {column}"

    def next_character(self) -> str:
        """Skip white space; return the next character, or "" at the end."""
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] in _SPACE:
                end += 1
            self._advance(end)
            if end < len(self._text):
                return self._text[end]
            if not self._read_more():
                return ""

    def _value(self) -> Any:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                if self._read_more():
                    continue
                raise
            if end == len(self._text) and self._read_more():
                continue  # a number may go on
            self._advance(end)
            return value

    def _read_more(self) -> bool:
        """Read at least as much as is left, so that a long value is parsed a few times only."""
        part = self._reader.read(max(1 << 20, len(self._text) - self._at))
        if part:
            last = self._text.rfind("\n", 0, self._at)
            self._column = self._column + self._at if last < 0 else self._at - last - 1
            self._text = self._text[self._at :] + part
            self._at = 0
        return bool(part)

    def _advance(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end


def _check_surrogates(text: str) -> None:
    """Check that no escape is half of a surrogate pair, which is not a character.

    Raises:
        ValueError: With the first of them.
    """
    if text.isascii():  # takes no time
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"the text has {half}, half of a surrogate pair") from error


def _line_place(path: Path, offset: int) -> str:
    return f"{path}, line {line_number(path, offset)}"


def line_number(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that starts at a byte of a file's contents."""
    count = 1
    with open_data(path) as file:
        while offset > 0 and (part := file.read(min(offset, 1 << 20))):
            count += part.count(b"\n")
            offset -= len(part)
    return count


def _first_not_utf8(path: Path) -> str:
    offset = 0
    with open_data(path) as file:
        for line in file:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return _not_utf8(path, offset, error)
            offset += len(line)
    raise AssertionError("the file has changed")


def _not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> str:
    wrong = error.object[error.start]
    return (
        f"{_line_place(path, offset)}: not UTF-8 text: byte "
        f"{offset + error.start:,} is 0x{wrong:02x}; convert it, e.g. iconv -f latin1 -t utf-8"
    )
