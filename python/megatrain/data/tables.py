"""Rows of parquet files and of the arrow files that ``datasets`` saves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megacore.errors import DataError
from megatrain.data.fields import SETTING, column_of
from megatrain.data.file_kinds import import_pyarrow

_ROWS_AT_ONCE = 1024
# Columns of a conversation, or of a pair, beside its messages.
_BESIDE = ("tools", "system", "prompt")


def num_row_groups(path: Path) -> int:
    """Return the number of row groups of a parquet file.

    Raises:
        DataError: If it cannot be read or has no rows.
    """
    with _reading(path, "parquet"):
        metadata = _open_parquet(path).metadata
    if metadata.num_rows == 0:
        raise DataError(f"{path} is a parquet file without rows")
    count: int = metadata.num_row_groups
    return count


def parquet_rows(
    path: Path, names: Sequence[str], begin: int, end: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and values of the rows of the row groups ``[begin, end)``.

    Raises:
        DataError: If the file cannot be read or lacks a column.
    """
    with _reading(path, "parquet"):
        file = _open_parquet(path)
        columns = _columns(path, names, file.schema_arrow.names)
        row = sum(file.metadata.row_group(n).num_rows for n in range(begin))
        groups = list(range(begin, end))
        batches = file.iter_batches(row_groups=groups, columns=columns, batch_size=_ROWS_AT_ONCE)
        for batch in batches:
            yield from enumerate(batch.to_pylist(), start=row)
            row += batch.num_rows


def arrow_rows(path: Path, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and values of the rows of an arrow stream or file.

    Raises:
        DataError: If the file cannot be read or lacks a column.
    """
    pyarrow = import_pyarrow(path, "an arrow file")
    from pyarrow import ipc

    with _reading(path, "arrow"), pyarrow.memory_map(str(path)) as source:
        with path.open("rb") as file:
            is_stream = file.read(6) != b"ARROW1"
        reader = ipc.open_stream(source) if is_stream else ipc.open_file(source)
        columns = _columns(path, names, reader.schema.names)
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        row = 0
        for batch in batches:
            chosen = batch.select(columns)
            for at in range(0, chosen.num_rows, _ROWS_AT_ONCE):
                part = chosen.slice(at, _ROWS_AT_ONCE)
                yield from enumerate(part.to_pylist(), start=row)
                row += part.num_rows


def _open_parquet(path: Path) -> Any:
    import_pyarrow(path, "a parquet file")
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path)


@contextlib.contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    pyarrow = import_pyarrow(path, f"a file of the {kind} format")
    try:
        yield
    except (pyarrow.ArrowInvalid, OSError) as error:
        size = path.stat().st_size
        raise DataError(
            f"{path} is damaged: {kind} of {size:,} bytes; {str(error).splitlines()[0]}"
        ) from error


def _columns(path: Path, names: Sequence[str], present: Sequence[str]) -> list[str]:
    columns = []
    for name in names:
        column = column_of(name, present)
        if column is None:
            raise DataError(
                f'{path} has no column "{name}"; it has {", ".join(present)} ({SETTING})'
            )
        columns.append(column)
    columns += [name for name in _BESIDE if name in present]
    return list(dict.fromkeys(columns))
