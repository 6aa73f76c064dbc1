"""Text, tokenizers and samples of the training data, in a stateless order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megacore.data.indexed import IndexedTokens, read_indexed, write_indexed
from megacore.data.sample import Sample, Samples
from megacore.data.sources import load_tokens
from megacore.data.stream import TokenRange, TokenSource
from megacore.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from megacore.data.dataset import (
        Dataset,
        SampleOrder,
        microbatch,
        num_microbatches,
        unigram_entropy,
    )
    from megacore.data.loading import TrainingData, load_data

__all__ = [
    "ByteTokenizer",
    "Dataset",
    "IndexedTokens",
    "JsonTokenizer",
    "Sample",
    "SampleOrder",
    "Samples",
    "TokenRange",
    "TokenSource",
    "Tokenizer",
    "TrainingData",
    "load_data",
    "load_tokenizer",
    "load_tokens",
    "microbatch",
    "num_microbatches",
    "read_indexed",
    "unigram_entropy",
    "write_indexed",
]


def __getattr__(name: str) -> Any:
    # Processes that tokenize need no torch, which takes longer to import than a shard.
    if name in ("TrainingData", "load_data"):
        from megacore.data import loading

        return getattr(loading, name)
    if name in ("Dataset", "SampleOrder", "microbatch", "num_microbatches", "unigram_entropy"):
        from megacore.data import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
