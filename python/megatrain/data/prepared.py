"""Sources that are tokenized into the cache by the first process that needs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megatrain.config import SourceConfig
from megatrain.config.data import SourceKind
from megatrain.data.cache import built_once, file_facts
from megatrain.data.file_kinds import FileKind
from megatrain.data.frame import frame_of
from megatrain.data.prepare import (
    Prepared,
    PrepareOptions,
    Progress,
    preparation_facts,
    prepare,
)
from megatrain.data.sources import indexed_source
from megatrain.data.stream import TokenSource
from megatrain.data.tokenizer import load_tokenizer


def file_kind(kind: SourceKind) -> FileKind | None:
    """Return the kind of files of a source; ``None``: by their contents and names."""
    match kind:
        case "text" | "jsonl" | "json" | "parquet" | "arrow":
            return kind
    return None


def prepared_source(
    source: SourceConfig,
    files: Sequence[Path],
    options: PrepareOptions,
    cache: Path,
    progress: Progress | None,
) -> TokenSource:
    """Tokenize files into the cache, unless that was done, and open the result.

    Args:
        source: The source.
        files: Its files.
        options: Tokenizer and format.
        cache: The folder of the cache.
        progress: Shows the preparation.

    Raises:
        DataError: See :func:`~megatrain.data.prepare.prepare`.
    """
    facts = {"files": [file_facts(path) for path in files], **preparation_facts(options)}

    def build(partial: Path) -> None:
        prepared = prepare(files, partial / "tokens", options, progress=progress)
        (partial / "prepared.json").write_text(json.dumps(asdict(prepared)), encoding="utf-8")

    folder = built_once(cache, "tokens", facts, build)
    tokenizer = load_tokenizer(options.tokenizer)
    prepared = Prepared(**json.loads((folder / "prepared.json").read_text(encoding="utf-8")))
    frame = frame_of(tokenizer, bos=options.bos, eod=options.eod)
    opened = indexed_source(source.path, folder / "tokens")
    count = f"{opened.num_documents:,} documents"
    description = f"{source.path}, {count}, prepared in {folder}"
    return replace(
        opened,
        description=description,
        tokenizer=tokenizer,
        notes=frame.notes + tuple(f"{source.label}: {note}" for note in prepared.notes),
    )
