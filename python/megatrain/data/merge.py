"""Joining of indexed datasets, and the check that a result replaces nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from megacore.errors import DataError
from megatrain.data.indexed import IndexWriter, read_indexed


def merge_indexed(prefixes: Sequence[Path], output: Path, *, force: bool = False) -> int:
    """Join datasets into one, document after document; return the number of documents.

    Raises:
        DataError: If the datasets have different token types, the result is one of them, or it
            exists and ``force`` is not set.
    """
    sources = [read_indexed(prefix) for prefix in prefixes]
    dtypes = {source.stored.dtype.name for source in sources}
    if len(dtypes) > 1:
        raise DataError(
            f"token files of different types cannot be joined: {', '.join(sorted(dtypes))}; "
            f"prepare them with one tokenizer"
        )
    if output.resolve() in [prefix.resolve() for prefix in prefixes]:
        raise DataError(f"the result {output} must not be one of the joined files")
    check_output(output, force=force)
    with IndexWriter(output, sources[0].stored.dtype) as writer:
        for source in sources:
            for begin, end in itertools.pairwise(source.document_borders.tolist()):
                for number in range(begin, end):
                    mask = None if source.stored_mask is None else source.mask_of(number)
                    writer.append(source.sequence(number), mask)
                    writer.add(int(source.lengths[number]), ends_document=False)
                writer.end_document()
        return writer.num_documents


def check_output(prefix: Path, *, force: bool = False) -> None:
    """Check that token files can be written without loss.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        force: Replace existing token files.

    Raises:
        DataError: If files of this prefix exist, or the prefix is also the name of a folder or
            file, so that a source of this name would have two readings.
    """
    if prefix.exists():
        what = "folder" if prefix.is_dir() else "file"
        raise DataError(
            f"the prefix {prefix} is also the name of a {what}, and a source of this name would "
            f"have two readings; choose another one, e.g. {prefix}_tokens"
        )
    suffixes = (".bin", ".idx", ".mask", ".idx.partial")
    *files, unfinished = (prefix.with_name(prefix.name + suffix) for suffix in suffixes)
    present = [path for path in files if path.exists()]
    # Between the renames of an interrupted call, its index has its temporary name.
    if present and not force and not unfinished.exists():
        raise DataError(
            f"{present[0]} exists already; choose another prefix, or replace it with --force"
        )
