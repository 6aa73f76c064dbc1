"""Samples in a random order that is a pure function of the sample counter.

A token stream of ``T`` tokens is cut into windows of ``seq_length + 1`` tokens. Consecutive windows
overlap by one token, so that every label is used once per epoch. The window of a sample is a
function of the sample counter and the seed:

    epoch, index = divmod(sample, windows per epoch)
    start        = phase(seed, epoch) + seq_length * permutation(seed, epoch)(index)

Nothing is stored: to resume, only the counter is needed, and no rank needs to know the reads of
others. The phase shifts the cuts from epoch to epoch; the permutation is a small keyed bijection,
so an order of a billion windows needs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megacore.errors import ConfigError, DataError
from megacore.parallel.batch import Answers, Documents, Microbatch
from megatrain.data.sample import Sample, Samples, sample_of_window
from megatrain.data.stream import TokenRange
from megatrain.data.tokenizer import TokenArray

_MASK = (1 << 64) - 1
_ROUNDS = 8


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Start positions of samples in a token stream, in an endless random order.

    Attributes:
        num_tokens: Length of the stream.
        seq_length: Number of predicted tokens per sample; a sample spans one more.
        seed: Seed of the order.
        reshuffle: A new order with new cuts in every epoch (training). ``False`` repeats one order
            with cuts that start at 0 (validation).

    Raises:
        ValueError: If the stream is too short for one sample, or a number is out of range.

    Example:
        >>> order = SampleOrder(num_tokens=41, seq_length=10, seed=1, reshuffle=False)
        >>> order.num_windows, sorted(order.start(sample) for sample in range(4))
        (4, [0, 10, 20, 30])
    """

    num_tokens: int
    seq_length: int
    seed: int
    reshuffle: bool = True

    def __post_init__(self) -> None:
        if self.seq_length < 1 or self.seed < 0:
            raise ValueError(
                f"seq_length must be at least 1 and seed at least 0; "
                f"got seq_length = {self.seq_length}, seed = {self.seed}"
            )
        if self.num_tokens < self.seq_length + 1:
            raise ValueError(
                f"{self.num_tokens} tokens are too few for one sample of "
                f"{self.seq_length} + 1 tokens; use seq_length <= {self.num_tokens - 1}"
            )

    @property
    def num_windows(self) -> int:
        """Samples per epoch."""
        whole = (self.num_tokens - 1) // self.seq_length
        if not self.reshuffle:
            return whole
        # Leaves room for any phase below seq_length, unless there would be no window.
        return max(1, (self.num_tokens - self.seq_length) // self.seq_length)

    def start(self, sample: int) -> int:
        """Return the position of the first token of sample ``sample`` (from 0, unbounded).

        Raises:
            ValueError: If ``sample`` is negative.
        """
        if sample < 0:
            raise ValueError(f"sample = {sample} must be at least 0")
        epoch, index = divmod(sample, self.num_windows)
        key = _mix(_mix(self.seed) ^ (epoch if self.reshuffle else 0))
        window = permute(index, self.num_windows, key)
        return self._phase(key) + window * self.seq_length

    def _phase(self, key: int) -> int:
        if not self.reshuffle:
            return 0
        spare = self.num_tokens - 1 - self.num_windows * self.seq_length
        return _mix(key ^ _MASK) % (min(spare, self.seq_length - 1) + 1)


class Dataset:
    """Windows of a token stream, by number.

    Args:
        tokens: The stream.
        name: Name of the data in messages.
        label: Name of the source in metrics.
        seq_length: Number of predicted tokens per sample.
        seed: Seed of the order.
        vocab_size: Every token read must be in ``[0, vocab_size)``.
        reshuffle: See :class:`SampleOrder`.
        document_mask: No document predicts the first token of the next one.

    Raises:
        DataError: If there are too few tokens for one sample.
    """

    def __init__(
        self,
        tokens: TokenRange,
        *,
        name: str,
        label: str = "data",
        seq_length: int,
        seed: int,
        vocab_size: int,
        reshuffle: bool = True,
        document_mask: bool = False,
    ) -> None:
        if len(tokens) < seq_length + 1:
            shorter = (
                f", or set model.seq_length to at most {len(tokens) - 1}" if len(tokens) > 1 else ""
            )
            raise DataError(
                f"{name} has {len(tokens):,} tokens, but one sample takes model.seq_length + 1 = "
                f"{seq_length + 1:,}; use more text{shorter}"
            )
        self.name = name
        self.label = label
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.document_mask = document_mask
        self.order = SampleOrder(
            num_tokens=len(tokens), seq_length=seq_length, seed=seed, reshuffle=reshuffle
        )

    @property
    def seq_length(self) -> int:
        """Number of predicted tokens per sample."""
        return self.order.seq_length

    @property
    def num_windows(self) -> int:
        """Samples per epoch."""
        return self.order.num_windows

    @property
    def num_tokens(self) -> int:
        """Tokens per epoch."""
        return len(self.tokens)

    def sample(self, number: int) -> Sample:
        """Return sample ``number`` >= 0.

        Raises:
            DataError: If a token is not in the vocabulary.
        """
        start, count = self.order.start(number), self.seq_length + 1
        self.tokens.check(start, count, vocab_size=self.vocab_size, name=self.name)
        return sample_of_window(self.tokens.window(start, count), document_mask=self.document_mask)

    def epochs(self, num_samples: int) -> dict[str, float]:
        """Return the passes over the stream that the first samples make."""
        return {self.label: num_samples / self.num_windows}


def microbatch(
    dataset: Samples,
    *,
    step: int,
    microbatch: int,
    dp_position: int,
    dp_size: int,
    microbatch_size: int,
    global_batch_size: int,
    sample_offset: int = 0,
    document_mask: bool = False,
    with_tokens: bool = True,
) -> Microbatch:
    """Return the samples of one microbatch of one step on one data-parallel rank.

    Step ``s`` consumes the samples ``[s * G, (s + 1) * G)`` in every layout, cut into the same
    groups of ``microbatch_size``: microbatch ``m`` of rank ``d`` is group ``m * dp_size + d``. So a
    run on one rank with ``2 m`` microbatches computes the same groups as two ranks with ``m``.

    Args:
        dataset: The dataset.
        step: Step number, from 0.
        microbatch: Number of the microbatch on this rank, from 0.
        dp_position: Position of this rank on the data-parallel axis.
        dp_size: Data-parallel size.
        microbatch_size: B, samples per microbatch.
        global_batch_size: G, samples per step over all ranks.
        sample_offset: Offset of all sample numbers, for a run resumed with another G: samples
            consumed so far, minus those that the previous steps would consume with this G.
        document_mask: Attention stays inside the documents of the samples.
        with_tokens: ``False`` for a stage in the middle of a pipeline: reads nothing.

    Returns:
        ``tokens`` and ``labels`` ``(B, seq_length)``, ``sample_ids`` ``(B,)``; int64, CPU. Without
        tokens, these are zeros and there are no labels.

    Raises:
        ConfigError: If ``global_batch_size`` is not a multiple of ``microbatch_size * dp_size``.
        ValueError: If ``microbatch`` or ``dp_position`` is out of range.
    """
    count = num_microbatches(global_batch_size, microbatch_size=microbatch_size, dp_size=dp_size)
    if not 0 <= microbatch < count or not 0 <= dp_position < dp_size:
        raise ValueError(
            f"microbatch {microbatch} of dp rank {dp_position}: "
            f"there are {count} microbatches on each of {dp_size} dp ranks"
        )
    group = microbatch * dp_size + dp_position
    first = step * global_batch_size + sample_offset + group * microbatch_size
    numbers = range(first, first + microbatch_size)
    sample_ids = torch.arange(numbers.start, numbers.stop)
    if not with_tokens:
        tokens = torch.zeros((), dtype=torch.int64).expand(microbatch_size, dataset.seq_length)
        return Microbatch(tokens=tokens, labels=None, sample_ids=sample_ids, step=step)
    samples = [dataset.sample(number) for number in numbers]
    lengths = [sample.length for sample in samples if sample.length is not None]
    return Microbatch(
        tokens=_stack([sample.tokens for sample in samples]),
        labels=_stack([sample.labels for sample in samples]),
        sample_ids=sample_ids,
        step=step,
        documents=Documents.of([sample.document_starts for sample in samples], dataset.seq_length)
        if document_mask
        else None,
        lengths=torch.tensor(lengths) if len(lengths) == len(samples) else None,
        answers=_answers([sample.values for sample in samples]),
    )


def _answers(values: Sequence[NDArray[np.float64] | None]) -> Answers | None:
    given = [one for one in values if one is not None]
    if len(given) < len(values):
        return None
    joined = torch.from_numpy(np.concatenate(given)).float()
    return Answers(counts=tuple(len(one) for one in given), values=joined)


def _stack(rows: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.stack(rows))


def num_microbatches(global_batch_size: int, *, microbatch_size: int, dp_size: int) -> int:
    """Return the number of microbatches per data-parallel rank and step.

    Raises:
        ConfigError: If the sizes do not divide, with the nearest legal batch sizes.

    Example:
        >>> num_microbatches(32, microbatch_size=4, dp_size=2)
        4
    """
    unit = microbatch_size * dp_size
    if unit < 1 or global_batch_size < 1 or global_batch_size % unit:
        below = global_batch_size // unit * unit if unit > 0 else 0
        nearest = f"{below} or {below + unit}" if below else f"{unit}"
        raise ConfigError(
            f"train.global_batch_size = {global_batch_size} is no multiple of "
            f"train.microbatch_size * dp = {microbatch_size} * {dp_size} = {unit}; "
            f"nearest legal values: {nearest}"
        )
    return global_batch_size // unit


def unigram_entropy(tokens: TokenArray, *, max_tokens: int = 1 << 24) -> float:
    """Return the entropy of single tokens in nats: the loss of an ideal unigram model.

    Args:
        tokens: Token ids, 1-D, not negative.
        max_tokens: Number of tokens to count, from the start.

    Example:
        >>> round(unigram_entropy(np.array([0, 1, 0, 1])), 4)
        0.6931
    """
    counts = np.zeros(0, dtype=np.int64)
    # In parts, because bincount makes a copy of 8 bytes per token.
    for begin in range(0, min(len(tokens), max_tokens), 1 << 20):
        part = np.bincount(tokens[begin : min(begin + (1 << 20), max_tokens)])
        counts, part = (counts, part) if len(counts) >= len(part) else (part, counts)
        counts[: len(part)] += part
    shares = counts[counts > 0] / max(1, counts.sum())
    return math.fsum(float(-share * np.log(share)) for share in shares)


def mixed_seed(seed: int) -> int:
    """Return another seed, for one of several independent orders."""
    return _mix(seed)


def _mix(value: int) -> int:
    """Mix 64 bits; a bijection of ``[0, 2**64)``.

    Source: splitmix64, Steele, Lea and Flood, OOPSLA 2014.
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Apply a pseudorandom permutation of ``[0, size)``, keyed by ``key``, to ``index``.

    A Feistel network on pairs (left, right) with ``left < rows``, ``right < columns``: each round
    adds a keyed hash of one half to the other, which is invertible, so the whole is a bijection of
    ``[0, rows * columns)``. Results outside ``[0, size)`` are permuted again (cycle walking).

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
    """
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    value = index
    while True:
        left, right = divmod(value, columns)
        for number in range(0, _ROUNDS, 2):
            left = (left + _mix(_mix(key + number) ^ right)) % rows
            right = (right + _mix(_mix(key + number + 1) ^ left)) % columns
        value = left * columns + right
        if value < size:
            return value
