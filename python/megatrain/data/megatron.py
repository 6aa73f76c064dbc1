"""The order of samples of Megatron-Core's ``GPTDataset`` and ``BlendedDataset``.

The sequences of a split, repeated for as many epochs as the samples need, are shuffled and read as
one stream; sample ``j`` of the stream is its tokens ``[j * L, j * L + L]``; the samples are
shuffled in turn. Both shuffles draw from one legacy numpy generator. A blend takes each sample from
the dataset that is furthest behind its weight.

Source:
    Formats and rules as in megacore's docs/data.md; results compared with megatron-core 0.19.2.

Shapes: E epochs, L predicted tokens per sample.
"""

from __future__ import annotations

import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megacore import _core
from megacore.errors import DataError
from megatrain.data.cache import built_once, file_facts
from megatrain.data.indexed import IndexedTokens, out_of_range
from megatrain.data.sample import Sample, Window, sample_of_window
from megatrain.data.stream import vocab_text

# Samples built per dataset of a blend beyond its share, as Megatron's default surplus.
SURPLUS = 0.005
# The last epoch is shuffled alone if fewer than this share of its samples is needed.
_LAST_EPOCH_SHARE = 0.80
_MAX_DATASETS = 32_766


@dataclass(frozen=True, kw_only=True)
class SampleIndex:
    """Indices of one split of one dataset.

    Attributes:
        documents: Sequence numbers in shuffled order, ``(E * sequences of the split,)``, int32.
        ends: Tokens of the stream up to each sequence, a prefix sum from 0, int64.
        shuffle: Number of each sample in the stream, ``(num_samples,)``, uint32 or int64.
    """

    documents: NDArray[np.int32]
    ends: NDArray[np.int64]
    shuffle: NDArray[np.integer]


def build_sample_index(
    lengths: NDArray[np.int32],
    *,
    begin: int,
    end: int,
    num_samples: int | None,
    seq_length: int,
    seed: int,
) -> SampleIndex:
    """Build the indices of the sequences ``[begin, end)``.

    Args:
        lengths: Tokens of every sequence of the dataset.
        begin: First sequence of the split.
        end: One after its last sequence.
        num_samples: Samples wanted; ``None`` for one epoch.
        seq_length: L.
        seed: Seed of both shuffles.

    Raises:
        ValueError: If one epoch has too few tokens for one sample.
    """
    per_epoch = int(lengths[begin:end].sum(dtype=np.int64))
    if per_epoch < seq_length + 1:
        raise ValueError(f"{per_epoch:,} tokens are too few for {seq_length} + 1")
    wanted = 1 if num_samples is None else num_samples * seq_length + 1
    epochs = 1 if num_samples is None else max(1, -(-wanted // per_epoch))
    total = (epochs * per_epoch - 1) // seq_length
    before_last = ((epochs - 1) * per_epoch - 1) // seq_length
    separate = (
        epochs > 1
        and num_samples is not None
        and num_samples - before_last < int(_LAST_EPOCH_SHARE * ((per_epoch - 1) // seq_length))
    )
    random = np.random.RandomState(seed)
    own = np.arange(begin, end, dtype=np.int32)
    documents = [np.tile(own, count) for count in ([epochs - 1, 1] if separate else [epochs])]
    for order in documents:
        random.shuffle(order)
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    borders = [0, before_last, total] if separate else [0, total]
    shuffle = [np.arange(first, last, dtype=dtype) for first, last in itertools.pairwise(borders)]
    for numbers in shuffle:
        random.shuffle(numbers)
    joined = np.concatenate(documents)
    ends = np.zeros(len(joined) + 1, dtype=np.int64)
    np.cumsum(lengths[joined], dtype=np.int64, out=ends[1:])
    return SampleIndex(documents=joined, ends=ends, shuffle=np.concatenate(shuffle))


# Samples of a blend per call of the core, which cannot be interrupted.
_SAMPLES_AT_A_TIME = 1 << 20


def fill_blend_index(
    weights: Sequence[float], datasets: NDArray[np.int16], numbers: NDArray[np.int64]
) -> list[int]:
    """Write the dataset of each sample of a blend and the sample's number in that dataset.

    Args:
        weights: Shares that sum to 1.
        datasets: Output, one element per sample of the blend; may be mapped.
        numbers: Output of the same size.

    Returns:
        Samples of each dataset.

    Example:
        >>> datasets, numbers = np.empty(12, dtype=np.int16), np.empty(12, dtype=np.int64)
        >>> fill_blend_index([0.5, 0.25, 0.25], datasets, numbers)
        [6, 3, 3]
        >>> "".join(map(str, datasets))
        '012001200120'
    """
    order = _core.BlendOrder(weights)
    for begin in range(0, len(datasets), _SAMPLES_AT_A_TIME):
        part = slice(begin, begin + _SAMPLES_AT_A_TIME)
        order.take(datasets[part], numbers[part])
    return order.counts


def _mapped_array(path: Path, dtype: type[np.integer], size: int) -> NDArray[Any]:
    """Create an ``.npy`` file with room on the disk, and map it for writing.

    Raises:
        OSError: If the disk is full: a write to a mapped file would end the process by a signal.
    """
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(size,))
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def normalized(weights: Sequence[float]) -> list[float]:
    """Divide weights by their sum, in float64."""
    values = np.array(weights, dtype=np.float64)
    shares: list[float] = (values / np.sum(values)).tolist()
    return shares


def split_borders(split: str, num_sequences: int) -> list[tuple[int, int]]:
    """Return the sequences ``[begin, end)`` of the training, validation and test split.

    Example:
        >>> split_borders("969,30,1", 1000)
        [(0, 969), (969, 999), (999, 1000)]
    """
    shares = [float(part) for part in split.split(",")]
    shares = normalized(shares + [0.0] * (3 - len(shares)))
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share)
    borders = [round(end * float(num_sequences)) for end in ends]
    return list(itertools.pairwise(borders))


class MegatronDataset:
    """Samples of one split of an indexed dataset, in the order of ``GPTDataset``.

    The order has a last sample. A run that reads more continues with :meth:`extend`.

    Args:
        indexed: The dataset.
        begin: First sequence of the split.
        end: One after its last sequence.
        num_samples: Samples wanted; ``None`` for one epoch.
        seq_length: Number of predicted tokens per sample.
        seed: Seed of the shuffles.
        vocab_size: Every token read must be in ``[0, vocab_size)``.
        label: Name of the source in metrics.
        cache: Folder of the indices, which the first process builds and all map.
        document_mask: No sequence predicts the first token of the next one.

    Raises:
        DataError: If the split has too few tokens for one sample.
    """

    def __init__(
        self,
        indexed: IndexedTokens,
        *,
        begin: int,
        end: int,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocab_size: int,
        label: str,
        cache: Path,
        document_mask: bool = False,
    ) -> None:
        self.name = f"{label} (sequences {begin:,} to {end:,} of {indexed.prefix})"
        self.label = label
        self.vocab_size = vocab_size
        self._document_mask = document_mask
        self._indexed = indexed
        self._seq_length = seq_length
        self._num_tokens = int(indexed.lengths[begin:end].sum(dtype=np.int64))
        self._split = begin, end
        self._seed = seed
        self._cache = cache
        # One after the other; where each ends, in samples.
        self._indices = [self._build(num_samples, seed)]
        self._ends = [len(self._indices[0].shuffle)]

    def extend(self, num_samples: int) -> None:
        """Continue after the last sample until there are ``num_samples``, if there are fewer.

        The order ends with an epoch. Further epochs are shuffled one by one, with seeds of their
        own, so they do not depend on the number of samples.
        """
        while len(self) < num_samples:
            seed = (self._seed + len(self._indices)) % (1 << 32)
            self._indices.append(self._build(None, seed))
            self._ends.append(len(self) + len(self._indices[-1].shuffle))

    def _build(self, num_samples: int | None, seed: int) -> SampleIndex:
        """Map the indices for a number of samples, or one epoch, after building them if needed."""
        indexed, (begin, end) = self._indexed, self._split
        facts = {
            "index": file_facts(indexed.prefix.with_name(indexed.prefix.name + ".idx")),
            "split": [begin, end],
            "num_samples": num_samples,
            "seq_length": self._seq_length,
            "seed": seed,
        }

        def build(folder: Path) -> None:
            try:
                index = build_sample_index(
                    indexed.lengths,
                    begin=begin,
                    end=end,
                    num_samples=num_samples,
                    seq_length=self._seq_length,
                    seed=seed,
                )
            except ValueError as error:
                raise DataError(
                    f"{self.name} cannot fill one sample of model.seq_length + 1 tokens: {error}; "
                    f"give it a larger share in data.split, or use more text"
                ) from error
            for name in SampleIndex.__dataclass_fields__:
                np.save(folder / f"{name}.npy", getattr(index, name))

        folder = built_once(self._cache, "samples", facts, build)
        return SampleIndex(
            **{
                name: np.load(folder / f"{name}.npy", mmap_mode="r")
                for name in SampleIndex.__dataclass_fields__
            }
        )

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def seq_length(self) -> int:
        """Number of predicted tokens per sample."""
        return self._seq_length

    @property
    def num_tokens(self) -> int:
        """Tokens per epoch."""
        return self._num_tokens

    def sample(self, number: int) -> Sample:
        """Return sample ``number`` in ``[0, len)``.

        Raises:
            DataError: If a token is not in the vocabulary, or ``number`` is past the end.
        """
        check_not_ended(self.name, number, len(self))
        which = bisect_right(self._ends, number)
        index = self._indices[which]
        ends = index.ends
        self._indexed.note_read(ends, index.documents, index.shuffle)
        inside = number - (self._ends[which - 1] if which > 0 else 0)
        start = int(index.shuffle[inside]) * self._seq_length
        stop = start + self._seq_length + 1
        at = int(np.searchsorted(ends, start, side="right")) - 1
        parts, masks, starts, position = [], [], [], start
        while position < stop:
            sequence, first = int(index.documents[at]), int(ends[at])
            tokens = self._indexed.sequence(sequence, position - first, stop - first)
            if position == first and len(tokens) > 0:
                starts.append(position - start)
            wrong = out_of_range(tokens, self.vocab_size)
            if wrong is not None:
                raise DataError(
                    f"{self.name} holds token id {int(tokens[wrong])} in sequence {sequence:,} of "
                    f"{self._indexed.prefix}.bin, but {vocab_text(self.vocab_size)}"
                )
            parts.append(tokens)
            if self._indexed.stored_mask is not None:
                masks.append(self._indexed.mask_of(sequence, position - first, stop - first))
            position += len(tokens)
            at += 1
        window = Window(
            tokens=np.concatenate(parts).astype(np.int64),
            starts=starts,
            counted=np.concatenate(masks) != 0 if masks else None,
        )
        return sample_of_window(window, document_mask=self._document_mask)

    def epochs(self, num_samples: int) -> dict[str, float]:
        """Return the passes over the split that the first samples make."""
        return {self.label: num_samples * self._seq_length / max(1, self._num_tokens)}


class MegatronBlend:
    """Samples of several datasets in the order of ``BlendedDataset``.

    The dataset of a sample does not depend on the size of the blend.

    Args:
        datasets: The datasets; extended to the samples of the blend.
        weights: Shares, normalized once more.
        size: Samples of the blend.
        cache: Folder of the index.
        name: Name in messages.

    Raises:
        DataError: If there are too many datasets.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        *,
        size: int,
        cache: Path,
        name: str,
    ) -> None:
        if len(datasets) > _MAX_DATASETS:
            raise DataError(
                f'data.order = "megatron" blends at most {_MAX_DATASETS:,} sources, got '
                f"{len(datasets):,}"
            )
        self.name = name
        self.datasets = list(datasets)
        shares = normalized(weights)
        self._shares = shares

        def build(folder: Path) -> None:
            datasets = _mapped_array(folder / "datasets.npy", np.int16, size)
            samples = _mapped_array(folder / "samples.npy", np.int64, size)
            np.save(folder / "counts.npy", fill_blend_index(shares, datasets, samples))

        folder = built_once(cache, "blend", {"weights": shares, "size": size}, build)
        self._datasets = np.load(folder / "datasets.npy", mmap_mode="r")
        self._samples = np.load(folder / "samples.npy", mmap_mode="r")
        for dataset, count in zip(self.datasets, np.load(folder / "counts.npy"), strict=True):
            dataset.extend(int(count))

    def __len__(self) -> int:
        return len(self._datasets)

    @property
    def seq_length(self) -> int:
        """Number of predicted tokens per sample."""
        return self.datasets[0].seq_length

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch of every dataset."""
        return sum(dataset.num_tokens for dataset in self.datasets)

    def sample(self, number: int) -> Sample:
        """Return sample ``number`` in ``[0, len)``.

        Raises:
            DataError: As for :meth:`MegatronDataset.sample`.
        """
        check_not_ended(self.name, number, len(self))
        return self.datasets[int(self._datasets[number])].sample(int(self._samples[number]))

    def epochs(self, num_samples: int) -> dict[str, float]:
        """Return the passes over each dataset that the first samples make, by their shares."""
        passes: dict[str, float] = {}
        for dataset, share in zip(self.datasets, self._shares, strict=True):
            passes |= {name: share * n for name, n in dataset.epochs(num_samples).items()}
        return passes


def check_not_ended(name: str, number: int, size: int) -> None:
    """Check that a sample exists.

    Raises:
        DataError: If ``number`` is not below ``size``.
    """
    if number >= size:
        raise DataError(
            f"{name} has {size:,} samples in Megatron's order, but sample {number:,} is wanted; "
            f"give every source a weight, so that it is repeated, or lower train.steps"
        )


def megatron_samples(
    sequences: Sequence[tuple[IndexedTokens, int, int]],
    *,
    labels: Sequence[str],
    weights: Sequence[float] | None,
    num_samples: int,
    seq_length: int,
    seed: int,
    vocab_size: int,
    cache: Path,
    name: str,
    num_read: int = 0,
    alone: bool = False,
    document_mask: bool = False,
) -> MegatronDataset | MegatronBlend:
    """Return the samples of one split of a blend, as ``BlendedMegatronDatasetBuilder`` builds it.

    Args:
        sequences: Dataset, first and one after the last sequence of the split, per source.
        labels: Names of the sources.
        weights: Weights of the sources; ``None`` takes one epoch of each.
        num_samples: Samples that the order is built for: those that the run needed of the split
            when it started.
        seq_length: Number of predicted tokens per sample.
        seed: Seed of all shuffles.
        vocab_size: Every token read must be in ``[0, vocab_size)``.
        cache: Folder of the indices.
        name: Name of the blend in messages.
        num_read: Samples that the run needs now. The order continues after its end.
        alone: Ignore the weight of a single source, as Megatron does for paths per split.
        document_mask: No sequence predicts the first token of the next one.
    """

    def dataset(index: int, size: int | None) -> MegatronDataset:
        indexed, begin, end = sequences[index]
        return MegatronDataset(
            indexed,
            begin=begin,
            end=end,
            num_samples=size,
            seq_length=seq_length,
            seed=seed,
            vocab_size=vocab_size,
            label=labels[index],
            cache=cache,
            document_mask=document_mask,
        )

    if len(sequences) == 1 and (weights is None or alone):
        only = dataset(0, num_samples)
        only.extend(num_read)
        return only
    if weights is None:
        datasets = [dataset(index, None) for index in range(len(sequences))]
        sizes = [len(one) for one in datasets]
        size = min(max(num_samples, num_read), sum(sizes))
        return MegatronBlend(datasets, sizes, size=size, cache=cache, name=name)
    shares = normalized(weights)
    targets = [math.ceil(num_samples * share) for share in shares]
    datasets = [
        dataset(index, math.ceil(target * (1 + SURPLUS))) for index, target in enumerate(targets)
    ]
    size = max(sum(targets), num_read)
    return MegatronBlend(datasets, shares, size=size, cache=cache, name=name)
