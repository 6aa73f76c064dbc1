"""Tokenization of files into a ``.bin``/``.idx`` pair by several processes.

Each shard of the input becomes one part file; the parts are joined at the end. A part and the final
files get their names only when they are complete, so an interrupted call continues with the parts
that exist.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megacore.errors import DataError
from megatrain.data.cache import RULES, file_facts, remove_partial
from megatrain.data.chat import ChatTemplate, template_files
from megatrain.data.fields import FieldForm
from megatrain.data.file_kinds import FileKind
from megatrain.data.frame import frame_of
from megatrain.data.indexed import IndexWriter, token_dtype
from megatrain.data.pair_text import PairText, answer_start
from megatrain.data.records import (
    OnBad,
    Record,
    Shard,
    read_records,
    shards_of,
    texts_around,
)
from megatrain.data.text_pieces import Cut, find_cut, tokens_of_pieces
from megatrain.data.tokenizer import ByteTokenizer, TokenArray, load_tokenizer

# Text given to the tokenizer library at once.
_BATCH_CHARS = 1 << 20
# Below this size, starting processes takes longer than the work.
_INLINE_BYTES = 8 << 20
# A sequence of the format has fewer tokens.
_MAX_SEQUENCE = (1 << 31) - 1

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options of :func:`prepare`.

    Attributes:
        tokenizer: As ``data.tokenizer``.
        field: Field or column with the text or the messages; or those of prompt and completion,
            joined by commas, see :class:`~megatrain.data.fields.FieldForm`.
        separator: Text after each field of a prompt. Default: see ``FieldForm``.
        kind: Kind of all files; ``None``: by their contents and names.
        bos: Token before every document; ``None``: as the tokenizer has it; ``""``: none.
        eod: Token to append to every document; ``None``: that of the tokenizer; ``""``: none.
        pairs: Read pairs of answers, each as two documents whose answers count.
        skip_bad: Leave out records that cannot be read, and count them, instead of stopping.
        advice: End of the message about such a record if the run stops.

    Raises:
        DataError: If a name of ``field`` is empty.
    """

    tokenizer: str = "bytes"
    field: str = "text"
    separator: str | None = None
    kind: FileKind | None = None
    bos: str | None = None
    eod: str | None = None
    pairs: bool = False
    skip_bad: bool = False
    advice: str = ""

    def __post_init__(self) -> None:
        FieldForm.of(self.field, self.separator)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Result of :func:`prepare`.

    Attributes:
        num_documents: Documents written.
        num_tokens: Tokens written.
        num_empty: Documents without text, left out.
        num_skipped: Records that could not be read, left out.
        first_skipped: The first of these, as one sentence.
        num_left_out: Answers of conversations that do not count in the loss.
        num_unprompted: Answers that do not begin as the chat template prompts for them.
    """

    num_documents: int
    num_tokens: int
    num_empty: int
    num_skipped: int
    first_skipped: str
    num_left_out: int = 0
    num_unprompted: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about answers of conversations."""
        notes = (
            f"answers left out of the loss: {self.num_left_out:,} (the chat template renders them "
            "otherwise once other messages follow; mark its answers with {% generation %} to "
            "train on all)",
            "answers that do not begin as the chat template prompts for them, e.g. with "
            f"reasoning: {self.num_unprompted:,} (they count from where they differ)",
        )
        counts = (self.num_left_out, self.num_unprompted)
        return tuple(note for note, count in zip(notes, counts, strict=True) if count)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Facts about a finished part; its file is the mark that the part is complete."""

    lengths: list[int]
    continues: bool
    unfinished: bool
    num_empty: int
    num_skipped: int
    first_skipped: str
    num_left_out: int
    num_unprompted: int
    is_marked: bool


def prepare(
    files: Sequence[Path],
    prefix: Path,
    options: PrepareOptions,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Tokenize files into ``<prefix>.bin`` and ``<prefix>.idx``, in the order of the files.

    The result does not depend on the number of processes. Every document gets the tokens of
    :func:`~megatrain.data.frame.frame_of` around it; conversations have their own.

    Args:
        files: Text, JSON, parquet or arrow files.
        prefix: Path of the result without suffix; its folder is created.
        options: Tokenizer and format.
        workers: Processes; default: the processors of this machine, one for little text.
        progress: Called with finished and all shards.

    Raises:
        DataError: For a file or record that cannot be read, with file, line and column.
    """
    shards = [shard for path in files for shard in shards_of(path, options.kind)]
    dtype = token_dtype(load_tokenizer(options.tokenizer).vocab_size)
    parts = prefix.with_name(prefix.name + ".parts")
    _start_parts(parts, files, options, len(shards))
    missing = [number for number in range(len(shards)) if not _facts_path(parts, number).is_file()]
    if workers is None:
        size = sum(path.stat().st_size for path in files)
        workers = 1 if size <= _INLINE_BYTES else os.cpu_count() or 1
    report = progress or (lambda _done, _total: None)
    report(len(shards) - len(missing), len(shards))
    for done, _ in enumerate(_encode_all(missing, shards, parts, options, workers), start=1):
        report(len(shards) - len(missing) + done, len(shards))
    result = _join(prefix, parts, len(shards), dtype)
    if result.num_tokens == 0:
        raise DataError(f"{files[0]} and all other files have no text")
    shutil.rmtree(parts)
    return result


def _encode_all(
    missing: Sequence[int],
    shards: Sequence[Shard],
    parts: Path,
    options: PrepareOptions,
    workers: int,
) -> Iterator[None]:
    """Encode the missing shards; yields after each."""
    if workers == 1 or len(missing) < 2 or multiprocessing.current_process().daemon:
        encoder = _Encoder(options)
        for number in missing:
            encoder.encode(shards[number], parts, number)
            yield
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(workers, len(missing)), context, initializer=_start_worker, initargs=(options,)
    ) as pool:
        waiting = iter(missing)
        running = {
            pool.submit(_encode_in_worker, shards[number], parts, number)
            for number in islice(waiting, 2 * workers)
        }
        try:
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                    yield
                    for number in islice(waiting, 1):
                        running.add(pool.submit(_encode_in_worker, shards[number], parts, number))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_worker: list[_Encoder] = []


def _start_worker(options: PrepareOptions) -> None:
    # The library would start as many threads per process as there are processors.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is not None:  # a killed parent cannot end its workers
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _worker.append(_Encoder(options))


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _encode_in_worker(shard: Shard, parts: Path, number: int) -> None:
    _worker[0].encode(shard, parts, number)


class _Encoder:
    """Encoder of shards in one process."""

    def __init__(self, options: PrepareOptions) -> None:
        self._options = options
        self._tokenizer = load_tokenizer(options.tokenizer)
        self._dtype = token_dtype(self._tokenizer.vocab_size)
        self._frame = frame_of(self._tokenizer, bos=options.bos, eod=options.eod)
        self._template = ChatTemplate.of_tokenizer(options.tokenizer)

    def encode(self, shard: Shard, parts: Path, number: int) -> None:
        """Write the part of a shard."""
        problems: list[str] = []

        def on_bad(sentence: str) -> None:
            if not self._options.skip_bad:
                raise DataError(sentence + self._options.advice)
            problems.append(sentence)

        lengths: list[int] = []
        length = num_empty = num_left_out = num_unprompted = 0
        data = parts / f"{number:06}.bin"
        partial = data.with_suffix(".partial")
        continues = shard.kind == "text" and shard.begin > 0
        marks = _Marks()
        with partial.open("wb") as file:
            for document in self._encoded(shard, on_bad):
                num_left_out += document.num_left_out
                num_unprompted += document.num_unprompted
                begins = length == 0 and not (continues and not lengths)
                if document.ends and begins and len(document.ids) == 0:
                    num_empty += 1
                    continue
                around = self._framed(document, begins=begins and len(document.ids) > 0)
                for ids, counted in around:
                    file.write(ids.astype(self._dtype, copy=False).tobytes())
                    marks.add(len(ids), counted)
                    length += len(ids)
                if document.ends:
                    lengths.append(length)
                    length = 0
        partial.replace(data)
        is_marked = marks.write(data.with_suffix(".mask"))
        facts = _Part(
            lengths=[*lengths, length] if length else lengths,
            continues=continues,
            unfinished=length > 0,
            num_empty=num_empty,
            num_skipped=len(problems),
            first_skipped=problems[0] if problems else "",
            num_left_out=num_left_out,
            num_unprompted=num_unprompted,
            is_marked=is_marked,
        )
        path = _facts_path(parts, number)
        path.with_suffix(".partial").write_text(json.dumps(asdict(facts)), encoding="utf-8")
        path.with_suffix(".partial").replace(path)

    def _encoded(self, shard: Shard, on_bad: OnBad) -> Iterator[_Encoded]:
        """Yield the tokens of the documents of a shard, of text in pieces."""
        records = read_records(
            shard,
            field=self._options.field,
            separator=self._options.separator,
            on_bad=on_bad,
            template=self._template,
            pairs=self._options.pairs,
        )
        if shard.kind == "text" and not isinstance(self._tokenizer, ByteTokenizer):
            pieces = (record.text for record in records if isinstance(record.text, str))
            yield from map(_Encoded, self._tokens_of_text(shard, pieces))
            yield _Encoded(self._tokenizer.encode(""), ends=shard.is_last)
            return
        for batch in _batches(records):
            whole = [record.text for record in batch if isinstance(record.text, str)]
            encoded = iter(self._tokenizer.encode_many(whole))
            for record in batch:
                if isinstance(record.text, str):
                    yield _Encoded(next(encoded), ends=record.ends)
                elif isinstance(record.text, PairText):
                    yield from self._encoded_pair(record.text)
                else:
                    yield _Encoded(
                        *self._tokenizer.encode_marked(record.text),
                        ends=True,
                        is_closed=record.text.is_closed,
                        num_left_out=record.text.num_left_out,
                        num_unprompted=record.text.num_unprompted,
                    )

    def _encoded_pair(self, pair: PairText) -> Iterator[_Encoded]:
        texts = [pair.prompt, pair.chosen, pair.rejected]
        prompt, *answers = self._tokenizer.encode_many(texts)
        start = answer_start(prompt, *answers)
        for ids in answers:
            counted = np.arange(len(ids)) >= start
            yield _Encoded(ids, counted, ends=True, is_closed=pair.is_closed)

    def _tokens_of_text(self, shard: Shard, pieces: Iterator[str]) -> Iterator[TokenArray]:
        def cut_at(byte: int) -> Cut | None:
            return find_cut(self._tokenizer, *texts_around(shard.path, byte))

        return tokens_of_pieces(
            self._tokenizer,
            pieces,
            first=cut_at(shard.begin) if shard.begin > 0 else None,
            last=None if shard.is_last else cut_at(shard.end),
        )

    def _framed(
        self, document: _Encoded, *, begins: bool
    ) -> list[tuple[TokenArray, NDArray[np.bool_] | None]]:
        """Return the tokens of a document, or of a part of it, with those around it."""
        ids, counted = document.ids, document.counted
        if begins and not (document.is_closed and self._options.bos is None):
            opened = self._frame.opened(ids)
            if counted is not None:
                counted = np.pad(counted, (len(opened) - len(ids), 0))
            ids = opened
        closes = document.ends and not (document.is_closed and self._options.eod is None)
        after = np.array(self._frame.after if closes else (), dtype=np.int64)
        if self._options.pairs and len(after) and ids[-len(after) :].tolist() == after.tolist():
            after = after[:0]
        return [(ids, counted), (after, None)]


@dataclass(frozen=True)
class _Encoded:
    """Tokens of a document or of a part of it, and which of them count if not all do."""

    ids: TokenArray
    counted: NDArray[np.bool_] | None = None
    ends: bool = False
    is_closed: bool = False
    num_left_out: int = 0
    num_unprompted: int = 0


class _Marks:
    """Marks of the tokens that count, one byte per token; kept once some do not."""

    def __init__(self) -> None:
        self._num_before = 0
        self._masks: list[NDArray[np.bool_]] = []

    def add(self, count: int, counted: NDArray[np.bool_] | None = None) -> None:
        """Append the marks of some tokens; without marks, all of them count."""
        if counted is not None:
            self._masks.append(counted)
        elif self._masks:
            self._masks.append(np.ones(count, dtype=np.bool_))
        else:
            self._num_before += count

    def write(self, path: Path) -> bool:
        """Write the marks if there are any."""
        if self._masks:
            before = np.ones(self._num_before, dtype=np.bool_)
            path.write_bytes(np.concatenate((before, *self._masks)).tobytes())
        return bool(self._masks)


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.length
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def preparation_facts(options: PrepareOptions) -> dict[str, object]:
    """Return everything that the result depends on besides the files, as JSON values."""
    path = Path(options.tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    return {
        "rules": RULES["tokens"],
        "tokenizer": file_facts(file) if file.is_file() else None,
        "templates": [file_facts(path) for path in template_files(options.tokenizer)],
        # Results of before there were pairs stay valid.
        "options": {k: v for k, v in asdict(options).items() if k != "pairs" or v},
    }


def _start_parts(
    parts: Path, files: Sequence[Path], options: PrepareOptions, num_shards: int
) -> None:
    """Create the folder of parts; discard parts of other files, options or shards.

    Raises:
        DataError: If there is a folder of this name that is not one of parts.
    """
    parts.mkdir(parents=True, exist_ok=True)
    facts = {"files": [file_facts(path) for path in files], "num_shards": num_shards}
    text = json.dumps({**facts, **preparation_facts(options)})
    path = parts / "facts.json"
    if not path.is_file() and any(parts.iterdir()):
        raise DataError(f"{parts} is not a folder of unfinished parts; choose another prefix")
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        remove_partial(parts)
        path.write_text(text, encoding="utf-8")


def _facts_path(parts: Path, number: int) -> Path:
    return parts / f"{number:06}.json"


def _join(prefix: Path, parts: Path, count: int, dtype: np.dtype[np.integer]) -> Prepared:
    num_empty = num_skipped = num_left_out = num_unprompted = 0
    first_skipped = ""
    open_length = 0
    with IndexWriter(prefix, dtype) as writer:
        for number in range(count):
            facts = _Part(**json.loads(_facts_path(parts, number).read_text(encoding="utf-8")))
            data = parts / f"{number:06}.bin"
            writer.append_file(data, data.with_suffix(".mask") if facts.is_marked else None)
            lengths = facts.lengths
            if open_length and not facts.continues:
                _add_document(writer, open_length)
                open_length = 0
            for index, length in enumerate(lengths):
                open_length += length
                if facts.unfinished and index == len(lengths) - 1:
                    break
                _add_document(writer, open_length)
                open_length = 0
            num_empty += facts.num_empty
            num_skipped += facts.num_skipped
            num_left_out += facts.num_left_out
            num_unprompted += facts.num_unprompted
            first_skipped = first_skipped or facts.first_skipped
        if open_length:
            _add_document(writer, open_length)
        num_documents, num_tokens = writer.num_documents, writer.num_tokens
    return Prepared(
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_empty=num_empty,
        num_skipped=num_skipped,
        first_skipped=first_skipped,
        num_left_out=num_left_out,
        num_unprompted=num_unprompted,
    )


def _add_document(writer: IndexWriter, length: int) -> None:
    """End a document, of several sequences if it is longer than one may be."""
    while length > _MAX_SEQUENCE:
        writer.add(_MAX_SEQUENCE, ends_document=False)
        length -= _MAX_SEQUENCE
    writer.add(length)
