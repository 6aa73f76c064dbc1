"""Samples of pairs of answers: two documents each, one pair or several in a sample."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megacore.errors import DataError
from megatrain.config import PreferenceConfig, ResolvedConfig, SourceConfig
from megatrain.data.cache import cache_folder
from megatrain.data.dataset import mixed_seed, permute
from megatrain.data.files import find_files
from megatrain.data.packing import ordered_by_best_fit
from megatrain.data.paths import missing_path
from megatrain.data.prepare import PrepareOptions, Progress
from megatrain.data.prepared import file_kind, prepared_source
from megatrain.data.sample import NO_LABEL, Sample
from megatrain.data.stream import TokenSource
from megatrain.data.tokenizer import load_tokenizer
from megatrain.data.training_data import TrainingData

REFERENCE_SUFFIX = ".reference"
_FORMAT = "megacore reference log-probs 2"
_CHOSEN, _REJECTED = "ref_chosen_logps", "ref_rejected_logps"


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs of a source after the limit on their length, in the order of the files.

    Attributes:
        source: Documents: chosen and rejected answer of each pair, each with its prompt.
        numbers: Pairs of the source that are used, ``(N,)``, int64.
        starts: First token of both documents, ``(N, 2)``, int64.
        lengths: Tokens of both after the limit, ``(N, 2)``, int64.
        notes: Sentences about pairs that were cut or left out.
    """

    source: TokenSource
    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: TokenSource, *, label: str, max_length: int) -> Pairs:
        """Limit the answers of a source; a pair without a token to learn on one side is left out.

        Args:
            source: Documents, two of each pair.
            label: Name of the source in messages.
            max_length: Most tokens of prompt and answer; what is behind is cut.

        Raises:
            DataError: If no pair is left.
        """
        starts = np.asarray(source.document_starts, dtype=np.int64)
        lengths = np.diff(starts, append=source.num_tokens).reshape(-1, 2)
        starts = starts.reshape(-1, 2)
        is_cut = (lengths > max_length).any(1)
        lengths = np.minimum(lengths, max_length)
        assert source.loss_mask is not None
        # The first token of a document is not predicted.
        borders = np.stack((starts + 1, starts + np.maximum(lengths, 1)), -1)
        sums = np.concatenate(([0], np.cumsum(source.loss_mask, dtype=np.int64)))
        learned = sums[borders[..., 1]] - sums[borders[..., 0]]
        is_used = (learned > 0).all(1)
        count, used = len(starts), int(is_used.sum())
        rule = f"preference.max_length = {max_length:,} tokens"
        if used == 0:
            raise DataError(
                f"{label} has no pair whose answers begin within {rule}, of {count:,} pairs; raise "
                "it, with model.seq_length"
            )
        notes = []
        if num_cut := int((is_cut & is_used).sum()):
            notes.append(
                f"{label}: {num_cut:,} of {count:,} pairs have an answer that is cut at {rule}"
            )
        if used < count:
            notes.append(
                f"{label}: {count - used:,} of {count:,} pairs are left out: a prompt fills "
                f"{rule}, or an answer has no token"
            )
        return cls(
            source=source,
            numbers=np.flatnonzero(is_used),
            starts=starts[is_used],
            lengths=lengths[is_used],
            notes=tuple(notes),
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def part(self, begin: int, end: int) -> Pairs:
        """Return the pairs ``[begin, end)``."""
        numbers, starts, lengths = self.numbers, self.starts, self.lengths
        return replace(
            self,
            numbers=numbers[begin:end],
            starts=starts[begin:end],
            lengths=lengths[begin:end],
        )

    def answer(self, at: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the tokens of an answer with its prompt, and which count."""
        start, length = int(self.starts[at, side]), int(self.lengths[at, side])
        window = self.source.range().window(start, length)
        assert window.counted is not None
        return window.tokens, window.counted

    def checksum(self, at: int) -> int:
        """Return a checksum of the tokens of a pair and of which of them count."""
        total = 0
        for side in (0, 1):
            for values in self.answer(at, side):
                total = zlib.crc32(values.tobytes(), zlib.crc32(b"|", total))
        return total


class PairDataset:
    """Samples of whole pairs: of each the chosen answer, then the rejected one, as documents.

    Without packing, a sample is one pair. The last token of a document predicts nothing.

    Args:
        pairs: The pairs.
        name: Name of the data in messages.
        label: Name of the source in metrics.
        seq_length: Tokens of a sample, at least those of a pair.
        seed: Seed of packing and order.
        vocab_size: Every token read must be in ``[0, vocab_size)``.
        packed: Fit several pairs into a sample.
        reshuffle: A new order in every epoch.
        reference: Log-probs of the answers by the reference, ``(N, 2)``; ``None`` without.
    """

    def __init__(
        self,
        pairs: Pairs,
        *,
        name: str,
        label: str,
        seq_length: int,
        seed: int,
        vocab_size: int,
        packed: bool,
        reshuffle: bool = True,
        reference: NDArray[np.float64] | None = None,
    ) -> None:
        self.name, self.label, self.seq_length = name, label, seq_length
        self.pairs = pairs
        self._seed, self._reshuffle = seed, reshuffle
        self._vocab_size = vocab_size
        self._reference = reference
        self._order, self._rows = np.arange(len(pairs)), np.arange(len(pairs) + 1)
        if packed:
            sizes = pairs.lengths.sum(1).astype(np.int32)
            order, self._rows = ordered_by_best_fit(sizes, seq_length, seed)
            self._order = order.astype(np.int64)
        self.num_rows = len(self._rows) - 1

    @classmethod
    def in_order(cls, other: PairDataset) -> PairDataset:
        """Return the pairs of a dataset once, in the same order in every epoch."""
        again = copy.copy(other)
        again._reshuffle = False
        return again

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        return int(self.pairs.lengths.sum())

    def pairs_of(self, number: int) -> NDArray[np.int64]:
        """Return the pairs of sample ``number`` >= 0, as indices of ``pairs``."""
        epoch, index = divmod(number, self.num_rows)
        key = mixed_seed(mixed_seed(self._seed) ^ (epoch if self._reshuffle else 0))
        row = permute(index, self.num_rows, key)
        return self._order[self._rows[row] : self._rows[row + 1]]

    def sample(self, number: int) -> Sample:
        """Return sample ``number`` >= 0.

        Raises:
            DataError: If a token is not in the vocabulary.
        """
        tokens = np.zeros(self.seq_length, dtype=np.int64)
        labels = np.full(self.seq_length, NO_LABEL, dtype=np.int64)
        starts, at, chosen = [], 0, self.pairs_of(number)
        whole = self.pairs.source.range()
        for pair in chosen:
            for side in (0, 1):
                ids, counted = self.pairs.answer(pair, side)
                start = int(self.pairs.starts[pair, side])
                whole.check(start, len(ids), vocab_size=self._vocab_size, name=self.name)
                end = at + len(ids)
                tokens[at:end] = ids
                labels[at : end - 1] = np.where(counted[1:], ids[1:], NO_LABEL)
                starts.append(at)
                at = end
        if at < self.seq_length:  # padding is a document of its own
            starts.append(at)
        values = np.zeros((2 * len(chosen), 0))
        if self._reference is not None:
            values = self._reference[chosen].reshape(-1, 1)
        return Sample(
            tokens=tokens, labels=labels, document_starts=starts, length=at, values=values
        )

    def epochs(self, num_samples: int) -> dict[str, float]:
        """Return the passes over the pairs that the first samples make."""
        return {self.label: num_samples / self.num_rows}


def load_pairs(
    config: ResolvedConfig, *, with_reference: bool = True, progress: Progress | None = None
) -> TrainingData:
    """Load the pairs of a run, with the log-probs of the reference if its loss needs them.

    Args:
        config: A resolved configuration with ``preference.loss``.
        with_reference: Whether to read the files of the reference.
        progress: Shows the tokenization of a source.

    Raises:
        DataError: If a file is missing, has no usable pair, or is that of other pairs.
    """
    data, preference = config.data, config.preference
    opened = {
        source.label: (source, _open_pairs(source, config, progress))
        for source in (*data.training_sources, *data.validation)
    }
    references: dict[str, NDArray[np.float64]] = {}
    if with_reference and preference.needs_reference:
        references = {
            label: read_reference(reference_path(source.path, preference), pairs, label=label)
            for label, (source, pairs) in opened.items()
        }

    def make(label: str, begin: int, end: int, *, reshuffle: bool) -> PairDataset:
        reference = references.get(label)
        return PairDataset(
            opened[label][1].part(begin, end),
            name=f"the {'training' if reshuffle else 'validation'} pairs of {label!r}",
            label=label,
            seq_length=config.model.seq_length,
            seed=config.train.seed,
            vocab_size=config.model.vocab_size,
            packed=data.packing == "best_fit",
            reshuffle=reshuffle,
            reference=None if reference is None else reference[begin:end],
        )

    first = data.training_sources[0].label
    count = len(opened[first][1])
    ends = [count] if data.validation else _ends_of_split(count, data.split_fractions)
    validation = {
        source.label: make(source.label, 0, len(opened[source.label][1]), reshuffle=False)
        for source in data.validation
    }
    if len(ends) > 1 and ends[1] > ends[0]:
        validation = {"validation": make(first, ends[0], ends[1], reshuffle=False)}
    if with_reference and config.train.eval_interval > 0 and not validation:
        raise DataError(
            f"data.split = {data.split!r} leaves no pair for validation, of {count:,}; use more "
            "pairs, or set train.eval_interval = 0"
        )
    weights = {source.label: source.weight or 1.0 for source in data.validation}
    sources = {label: pairs.source for label, (_, pairs) in opened.items()}
    return TrainingData(
        sources=sources,
        tokenizer=load_tokenizer(data.tokenizer),
        train=make(first, 0, ends[0], reshuffle=True),
        validation=dict(validation),
        validation_weights={name: weights.get(name, 1.0) for name in validation},
        unigram_entropy=None,
        default_normalization="token",
        notes=tuple(
            note for _, pairs in opened.values() for note in (*pairs.source.notes, *pairs.notes)
        ),
    )


def _ends_of_split(count: int, fractions: Sequence[float]) -> list[int]:
    first = max(1, round(fractions[0] * count))
    return [first, max(first, round((fractions[0] + fractions[1]) * count))]


def _open_pairs(source: SourceConfig, config: ResolvedConfig, progress: Progress | None) -> Pairs:
    data, path = config.data, Path(source.path)
    if not path.exists():
        raise DataError(missing_path("data source", path) + " (a file or folder of pairs)")
    found = find_files(path, file_kind(source.kind))
    options = PrepareOptions(
        tokenizer=data.tokenizer,
        kind=file_kind(source.kind),
        bos=data.bos,
        eod=data.eod,
        pairs=True,
    )
    opened = prepared_source(source, found.files, options, cache_folder(data.cache), progress)
    limit = config.preference.limit(config.model.seq_length)
    return Pairs.of(opened, label=source.label, max_length=limit)


# ---- the log-probs of the reference --------------------------------------------------------------


def reference_path(path: str, preference: PreferenceConfig) -> Path:
    """Return the file with the log-probs of the reference for the pairs of a path."""
    pairs = Path(path)
    folder = pairs.parent if preference.reference_dir is None else Path(preference.reference_dir)
    return folder / (pairs.name + REFERENCE_SUFFIX)


def reference_header(
    *, model: str, weights: Mapping[str, str], num_pairs: int, max_length: int
) -> str:
    """Return the first line of a file of reference log-probs.

    Args:
        model: Where the weights of the reference came from.
        weights: Their checksum in each number format.
        num_pairs: Number of pairs.
        max_length: Most tokens of an answer with its prompt.
    """
    return json.dumps(
        {
            "format": _FORMAT,
            "model": model,
            "weights": dict(weights),
            "num_pairs": num_pairs,
            "max_length": max_length,
        }
    )


def reference_line(pairs: Pairs, at: int, logps: tuple[float, float]) -> str:
    """Return the line of a pair."""
    return json.dumps(
        {
            "pair": int(pairs.numbers[at]),
            "tokens": f"{pairs.checksum(at):08x}",
            _CHOSEN: logps[0],
            _REJECTED: logps[1],
        }
    )


def read_header(path: Path) -> Mapping[str, Any]:
    """Return the first line of a file of reference log-probs.

    Raises:
        DataError: If it is missing or no such file.
    """
    return _lines(path, lambda lines: lines[0])  # type: ignore[no-any-return]


def read_reference(path: Path, pairs: Pairs, *, label: str) -> NDArray[np.float64]:
    """Read the log-probs of the reference, ``(N, 2)``.

    Raises:
        DataError: If the file is missing, or is that of other pairs, or of pairs cut elsewhere.
    """
    header, *rows = _lines(path, lambda lines: lines)
    advice = f"{_advice(path)} writes it again"
    by_number = {row["pair"]: row for row in rows}
    if len(by_number) != len(rows) or len(rows) != header["num_pairs"]:
        raise DataError(
            f"{path} must have {header['num_pairs']:,} pairs, got {len(by_number):,}; {advice}"
        )
    found = np.empty((len(pairs), 2))
    for at, number in enumerate(pairs.numbers.tolist()):
        row = by_number.get(number)
        if row is None or row["tokens"] != f"{pairs.checksum(at):08x}":
            how = "lacks" if row is None else "was made from other tokens of"
            raise DataError(
                f"{path} {how} pair {number:,} of {label} (it has max_length = "
                f"{header['max_length']:,}): data, tokenizer, chat template or "
                f"preference.max_length have changed; {advice}"
            )
        found[at] = row[_CHOSEN], row[_REJECTED]
    return found


def _advice(path: Path) -> str:
    return f"megacore eval MODEL --reference {path.name.removesuffix(REFERENCE_SUFFIX)}"


def _lines(path: Path, select: Callable[[list[Any]], Any]) -> Any:
    if not path.is_file():
        raise DataError(
            f"{path} does not exist: the log-probs of the reference are computed once, before the "
            f"training, with {_advice(path)}"
        )
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if lines[0]["format"] != _FORMAT:
            raise ValueError(lines[0]["format"])
        return select(lines)
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{path} is not a file of reference log-probs: {error}; {_advice(path)} writes one"
        ) from error
