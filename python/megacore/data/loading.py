"""Training and validation datasets of the ``[data]`` section."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megacore.config import DataConfig
from megacore.data.dataset import Dataset, unigram_entropy
from megacore.data.sources import TokenSource, check_token_range, load_tokens
from megacore.data.tokenizer import TokenArray, Tokenizer, load_tokenizer
from megacore.errors import DataError

# Tokens checked before training starts; the others are checked when they are read.
CHECKED_TOKENS = 1 << 26


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Data of a run.

    Attributes:
        source: The whole token stream.
        tokenizer: Its tokenizer; ``vocab_size`` is the model's vocabulary by default.
        train: Samples for training, reshuffled every epoch.
        validation: Samples for validation in one fixed order; ``None`` without a validation part.
        unigram_entropy: Entropy of the training tokens, in nats per token. A loss below it proves
            that the model uses context.
    """

    source: TokenSource
    tokenizer: Tokenizer
    train: Dataset
    validation: Dataset | None
    unigram_entropy: float


def load_data(
    config: DataConfig,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int | None = None,
    need_validation: bool = False,
) -> TrainingData:
    """Load, tokenize and split the source of the ``[data]`` section.

    Every rank calls this function separately; equal arguments give equal data, without
    communication.

    Args:
        config: The ``[data]`` section.
        seq_length: Number of predicted tokens per sample (``model.seq_length``).
        seed: Seed of the sample order (``train.seed``).
        vocab_size: Size of the vocabulary. Default: that of the tokenizer.
        need_validation: Raise an error, instead of ``None``, for a validation part too short for
            one sample.

    Raises:
        DataError: See :func:`load_tokens`; or a part is too short for one sample.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    size = tokenizer.vocab_size if vocab_size is None else vocab_size
    source = load_tokens(config.source, tokenizer)
    check_token_range(source.tokens[:CHECKED_TOKENS], vocab_size=size, name=config.source)
    train, validation = split_tokens(source.tokens, config.split_fractions)
    enough = len(validation) > seq_length
    if need_validation and not enough:
        raise DataError(
            f"the validation part of {config.source!r} has {len(validation):,} tokens, but one "
            f"sample takes model.seq_length + 1 = {seq_length + 1:,}; give it a larger share than "
            f"data.split = {config.split!r}, use more text, or set train.eval_interval = 0"
        )
    make = functools.partial(Dataset, seq_length=seq_length, seed=seed, vocab_size=size)
    where = f"part of {config.source!r} (data.split = {config.split!r})"
    return TrainingData(
        source=source,
        tokenizer=tokenizer,
        train=make(train, name=f"the training {where}"),
        validation=make(validation, name=f"the validation {where}", reshuffle=False)
        if enough
        else None,
        unigram_entropy=unigram_entropy(train),
    )


def split_tokens(tokens: TokenArray, fractions: Sequence[float]) -> tuple[TokenArray, TokenArray]:
    """Split a stream by position: training, then validation; a third part is unused.

    Args:
        tokens: The stream, 1-D.
        fractions: Two or three shares that sum to 1.

    Returns:
        Training and validation tokens, views of ``tokens``.

    Example:
        >>> import numpy as np
        >>> [len(part) for part in split_tokens(np.arange(10), (0.8, 0.2))]
        [8, 2]
    """
    first = round(fractions[0] * len(tokens))
    second = round((fractions[0] + fractions[1]) * len(tokens))
    return tokens[:first], tokens[first:second]
