"""Training and validation datasets of the ``[data]`` section."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megacore.errors import DataError
from megatrain.config import DataConfig, ResolvedConfig, SourceConfig
from megatrain.data.blend import Blend
from megatrain.data.cache import cache_folder
from megatrain.data.custom import own_datasets
from megatrain.data.dataset import Dataset, mixed_seed, unigram_entropy
from megatrain.data.file_kinds import FileKind, is_compressed, kind_of_file
from megatrain.data.files import find_files, token_prefix
from megatrain.data.frame import frame_of
from megatrain.data.indexed import IndexedTokens, indexed_prefix
from megatrain.data.megatron import megatron_samples, split_borders
from megatrain.data.packing import PackedDataset
from megatrain.data.pairs import load_pairs
from megatrain.data.prepare import (
    PrepareOptions,
    Progress,
)
from megatrain.data.prepared import file_kind, prepared_source
from megatrain.data.sample import Samples
from megatrain.data.sources import (
    BUILT_IN,
    factory_source,
    indexed_source,
    load_tokens,
)
from megatrain.data.special_tokens import BYTES
from megatrain.data.stream import TokenRange, TokenSource
from megatrain.data.tokenizer import Tokenizer, load_tokenizer
from megatrain.data.training_data import TrainingData

# Tokens checked before training starts, in all sources and at least in each; the others are checked
# when they are read.
CHECKED_TOKENS = 1 << 24
CHECKED_OF_EACH = 1 << 12
# Samples of a factory whose tokens give the unigram entropy.
ENTROPY_SAMPLES = 64
# Larger text is prepared in the cache instead of being tokenized in the memory of every rank.
IN_MEMORY_BYTES = 64 << 20


def load_data(
    config: DataConfig,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int | None = None,
    need_validation: bool = False,
    num_samples: int = 1,
    num_validation_samples: int = 1,
    num_read: int = 0,
    num_validation_read: int = 0,
    progress: Progress | None = None,
) -> TrainingData:
    """Open, tokenize and split the sources of the ``[data]`` section.

    Every rank calls this function separately; equal arguments give equal data, without
    communication.

    Args:
        config: The ``[data]`` section.
        seq_length: Number of predicted tokens per sample (``model.seq_length``).
        seed: Seed of the sample order (``train.seed``).
        vocab_size: Size of the vocabulary. Default: that of the tokenizer.
        need_validation: Raise an error, instead of leaving it out, for a validation set too short
            for one sample.
        num_samples: Training samples that Megatron's order is built for: those of the whole run.
        num_validation_samples: Validation samples, likewise.
        num_read: Training samples of a run that has changed since; Megatron's order continues
            after its end.
        num_validation_read: Validation samples, likewise.
        progress: Shows the preparation of a source, see :func:`~megatrain.data.prepare.prepare`.

    Raises:
        DataError: See :func:`load_tokens`; or a split is too short for one sample.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    size = tokenizer.vocab_size if vocab_size is None else vocab_size
    opened = functools.partial(
        open_source,
        tokenizer=tokenizer,
        data=config,
        vocab_size=size,
        num_sources=len(config.training_sources) + len(config.validation),
        progress=progress,
    )
    sources = {source.label: opened(source) for source in config.training_sources}
    held_out = {source.label: opened(source) for source in config.validation}
    make = _Maker(
        config=config,
        sources=sources,
        held_out=held_out,
        seq_length=seq_length,
        seed=seed,
        vocab_size=size,
    )
    order_sizes: dict[str, int] = {}
    if config.order == "megatron":
        order_sizes = {"train": num_samples, "validation": num_validation_samples}
        train = make.megatron_train(num_samples, num_read)
        validation = make.megatron_validation(
            num_validation_samples, num_validation_read, needed=need_validation
        )
    else:
        train = make.train()
        validation = make.validation(needed=need_validation)
    is_packed = config.packing != "stream"
    ignores_tokens = (
        is_packed
        or config.document_mask
        or any(source.loss_mask is not None for source in (*sources.values(), *held_out.values()))
    )
    weights = _weights(config.validation or config.training_sources)
    first = make.range_of(next(iter(sources)), 0)
    return TrainingData(
        sources=sources,
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        validation_weights={name: weights.get(name, 1.0) for name in validation},
        unigram_entropy=unigram_entropy(first.tokens),
        default_normalization="token" if ignores_tokens else "microbatch",
        notes=_notes((*sources.values(), *held_out.values())),
        order_sizes=order_sizes,
    )


def load_run_data(
    config: ResolvedConfig,
    *,
    order_sizes: Mapping[str, int] | None = None,
    num_read: int = 0,
    progress: Progress | None = None,
) -> TrainingData:
    """Load the data of a run from its resolved configuration; see :func:`load_data`.

    Args:
        config: Resolved configuration.
        order_sizes: ``TrainingData.order_sizes`` of the run that this one continues; default: those
            of the configuration.
        num_read: Training samples that the run reads from its first step to its last.
        progress: Shows the preparation of a source.

    Raises:
        DataError: As `load_data`.
    """
    if config.data.factory is not None:
        return _own_data(config)
    if config.preference.loss is not None:
        return load_pairs(config, progress=progress)
    train, sizes = config.train, run_order_sizes(dict(config.train)) | dict(order_sizes or {})
    return load_data(
        config.data,
        seq_length=config.model.seq_length,
        seed=train.seed,
        vocab_size=config.model.vocab_size,
        need_validation=train.eval_interval > 0,
        num_samples=sizes["train"],
        num_validation_samples=sizes["validation"],
        num_read=num_read,
        num_validation_read=train.eval_steps * train.global_batch_size,
        progress=progress,
    )


def run_order_sizes(train: Mapping[str, Any]) -> dict[str, int]:
    """Return the samples of a whole run from the plain values of its ``[train]`` section."""
    steps, interval, batch_size = (
        train[key] for key in ("steps", "eval_interval", "global_batch_size")
    )
    validations = steps // interval + 1 if interval else 1
    return {
        "train": steps * batch_size,
        "validation": validations * train["eval_steps"] * batch_size,
    }


def _own_data(config: ResolvedConfig) -> TrainingData:
    """Make the data of ``data.factory``."""
    train, validation = own_datasets(config)
    if config.train.eval_interval > 0 and not validation:
        raise DataError(
            f'data.factory = "{config.data.factory}" returned no validation set; return one, or '
            "set train.eval_interval = 0"
        )
    name = str(config.data.factory)
    first = np.concatenate([train.sample(number).tokens for number in range(ENTROPY_SAMPLES)])
    return TrainingData(
        sources={name: TokenSource(name=name, description="first samples", tokens=first)},
        tokenizer=load_tokenizer(config.data.tokenizer),
        train=train,
        validation=validation,
        validation_weights=dict.fromkeys(validation, 1.0),
        unigram_entropy=unigram_entropy(first),
        default_normalization="token",  # any of its labels may be masked
    )


def open_source(
    source: SourceConfig,
    *,
    tokenizer: Tokenizer,
    data: DataConfig,
    vocab_size: int,
    num_sources: int = 1,
    progress: Progress | None = None,
) -> TokenSource:
    """Open one source of several.

    Records, compressed text and text above ``IN_MEMORY_BYTES`` are tokenized into ``data.cache`` by
    the first process that needs them; others wait and map the result.

    Raises:
        DataError: See :func:`load_tokens` and :func:`~megatrain.data.prepare.prepare`.
    """
    if source.kind == "factory":
        opened = factory_source(source.path, tokenizer)
    else:
        opened = _open_text(source, tokenizer, data, progress)
    count = min(max(CHECKED_TOKENS // num_sources, CHECKED_OF_EACH), opened.num_tokens)
    opened.range().check(0, count, vocab_size=vocab_size)
    used = opened.tokenizer
    if used is not None and used.name == BYTES and vocab_size > used.vocab_size:
        note = (
            f"{source.label}: text is read as bytes, {used.vocab_size} of the {vocab_size:,} ids "
            "of model.vocab_size; if the model has a tokenizer, set data.tokenizer"
        )
        return replace(opened, notes=(*opened.notes, note))
    return opened


def _open_text(
    source: SourceConfig, tokenizer: Tokenizer, data: DataConfig, progress: Progress | None
) -> TokenSource:
    """Open token files, or tokenize text: little of it in memory, records in the cache."""
    kind = file_kind(source.kind)
    frame = frame_of(tokenizer, bos=data.bos, eod=data.eod)
    prefix = None
    if source.kind == "indexed":
        prefix = indexed_prefix(source.path) or Path(source.path)
    elif kind is None and source.path not in BUILT_IN:
        prefix = token_prefix(source.path)
    if prefix is not None:
        opened = indexed_source(source.path, prefix)
        return replace(opened, notes=frame.notes_on_files(opened.tokens, source.path))
    if source.path in BUILT_IN or not Path(source.path).exists():
        return load_tokens(source.path, tokenizer, frame=frame)
    found = find_files(Path(source.path), kind)
    size = sum(path.stat().st_size for path in found.files)
    if size <= IN_MEMORY_BYTES and data.order == "megacore" and _is_plain(found.files, kind):
        return load_tokens(source.path, tokenizer, kind=kind, frame=frame)
    options = PrepareOptions(
        tokenizer=data.tokenizer,
        field=data.field,
        separator=data.separator,
        kind=kind,
        bos=data.bos,
        eod=data.eod,
    )
    opened = prepared_source(source, found.files, options, cache_folder(data.cache), progress)
    return replace(opened, notes=found.notes(Path(source.path)) + opened.notes)


def _is_plain(files: Sequence[Path], kind: FileKind | None) -> bool:
    return all(kind_of_file(path, kind) == "text" and not is_compressed(path) for path in files)


def _notes(sources: Iterable[TokenSource]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for source in sources for note in source.notes))


def _weights(sources: Sequence[SourceConfig]) -> dict[str, float]:
    return {source.label: source.weight for source in sources if source.weight is not None}


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Datasets of the splits of opened sources."""

    config: DataConfig
    sources: Mapping[str, TokenSource]
    held_out: Mapping[str, TokenSource]
    seq_length: int
    seed: int
    vocab_size: int

    def range_of(self, label: str, split: int) -> TokenRange:
        """Return the training (0) or validation (1) split of a source."""
        source = self.sources[label]
        if self.config.validation:
            return source.range()
        return split_range(source.range(), self.config.split_fractions)[split]

    def train(self) -> Samples:
        """Return the training samples: of the only source, or a blend."""
        datasets = [
            self._dataset(
                self.range_of(label, 0),
                name=self._split_name("training", label),
                label=label,
                seed=self.seed if number == 0 else mixed_seed(self.seed + number),
            )
            for number, label in enumerate(self.sources)
        ]
        if len(datasets) == 1:
            return datasets[0]
        given = _weights(self.config.sources)
        weights = [given.get(dataset.label, dataset.num_tokens) for dataset in datasets]
        return Blend(datasets, weights, name="the training data")

    def validation(self, *, needed: bool) -> dict[str, Samples]:
        """Return the validation sets: as configured, else the held out split of every source."""
        ranges = {label: source.range() for label, source in self.held_out.items()} or {
            label: self.range_of(label, 1) for label in self.sources
        }
        sets: dict[str, Samples] = {}
        for label, tokens in ranges.items():
            name = self._split_name("validation", label)
            shortest = 2 if self.config.packing == "best_fit" else self.seq_length + 1
            if len(tokens) < shortest:
                if needed:
                    self._raise_too_short(label, len(tokens))
                continue
            sets[label] = self._dataset(
                tokens, name=name, label=label, seed=self.seed, reshuffle=False
            )
        return sets

    def megatron_train(self, num_samples: int, num_read: int) -> Samples:
        """Return the training samples in Megatron's order."""
        weights = _weights(self.config.sources)
        name = "the training data"
        return self._megatron(self._sequences(0), weights, num_samples, num_read, name=name)

    def megatron_validation(
        self, num_samples: int, num_read: int, *, needed: bool
    ) -> dict[str, Samples]:
        """Return the validation sets in Megatron's order: the blend of the split, or each."""
        sizes = num_samples, num_read
        if self.held_out:
            return {
                label: self._megatron({label: _whole(source)}, {}, *sizes, name=label)
                for label, source in self.held_out.items()
            }
        sequences = self._sequences(1)
        if not needed and any(end <= begin for _, begin, end in sequences.values()):
            return {}
        weights = _weights(self.config.sources)
        name = "validation"
        return {name: self._megatron(sequences, weights, *sizes, name=name)}

    def _sequences(self, split: int) -> dict[str, tuple[IndexedTokens, int, int]]:
        """Return the files of each source, and the first and last sequence of a split."""
        found = {}
        for label, source in self.sources.items():
            indexed, begin, end = _whole(source)
            if not self.config.validation:
                begin, end = split_borders(self.config.split, end)[split]
            found[label] = (indexed, begin, end)
        return found

    def _megatron(
        self,
        sequences: Mapping[str, tuple[IndexedTokens, int, int]],
        weights: Mapping[str, float],
        num_samples: int,
        num_read: int,
        *,
        name: str,
    ) -> Samples:
        return megatron_samples(
            list(sequences.values()),
            labels=list(sequences),
            weights=[weights[label] for label in sequences] if weights else None,
            num_samples=num_samples,
            num_read=num_read,
            seq_length=self.seq_length,
            seed=self.seed,
            vocab_size=self.vocab_size,
            cache=self._cache,
            name=name,
            alone=bool(self.held_out),
            document_mask=self.config.document_mask,
        )

    @functools.cached_property
    def _cache(self) -> Path:
        return cache_folder(self.config.cache)

    def _dataset(
        self, tokens: TokenRange, *, name: str, label: str, seed: int, reshuffle: bool = True
    ) -> Dataset | PackedDataset:
        make: Callable[..., Dataset | PackedDataset] = Dataset
        if self.config.packing == "best_fit":
            cache = self._cache if tokens.source.indexed is not None else None
            make = functools.partial(PackedDataset, cache=cache)
        return make(
            tokens,
            name=name,
            label=label,
            seq_length=self.seq_length,
            seed=seed,
            vocab_size=self.vocab_size,
            reshuffle=reshuffle,
            document_mask=self.config.document_mask,
        )

    def _split_name(self, split: str, label: str) -> str:
        if self.config.validation:
            return f"the {split} data {label!r}"
        return f"the {split} split of {label!r} (data.split = {self.config.split!r})"

    def _raise_too_short(self, label: str, num_tokens: int) -> None:
        share = (
            f"give it a larger share than data.split = {self.config.split!r}, "
            if not self.config.validation
            else ""
        )
        kind = "data" if self.config.validation else "split of"
        raise DataError(
            f"the validation {kind} {label!r} has {num_tokens:,} tokens, but one sample takes "
            f"model.seq_length + 1 = {self.seq_length + 1:,}; {share}use more text, or set "
            f"train.eval_interval = 0"
        )


def _whole(source: TokenSource) -> tuple[IndexedTokens, int, int]:
    """Return the files of a source and all of its sequences."""
    if source.indexed is None:
        raise DataError(
            f'data.order = "megatron" reads token files, but {source.name} is text in memory; '
            f"write it with megacore data prepare"
        )
    return source.indexed, 0, len(source.indexed.lengths)


def split_range(tokens: TokenRange, fractions: Sequence[float]) -> tuple[TokenRange, TokenRange]:
    """Split a stream by position: training, then validation; a third share is unused.

    Args:
        tokens: The stream.
        fractions: Two or three shares that sum to 1.

    Returns:
        Training and validation tokens.
    """
    first = round(fractions[0] * len(tokens))
    second = round((fractions[0] + fractions[1]) * len(tokens))
    return tokens.part(0, first), tokens.part(first, second)
