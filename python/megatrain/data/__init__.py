"""Text, tokenizers and samples of the training data, in a stateless order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import lazy_names
from megatrain.data.indexed import IndexedTokens, read_indexed, write_indexed
from megatrain.data.sample import Sample, Samples
from megatrain.data.sources import load_tokens
from megatrain.data.stream import TokenRange, TokenSource
from megatrain.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from megatrain.data.dataset import (
        Dataset,
        SampleOrder,
        microbatch,
        num_microbatches,
        unigram_entropy,
    )
    from megatrain.data.loading import load_data
    from megatrain.data.training_data import TrainingData

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

# Processes that tokenize need no torch, which takes longer to import than a shard.
_HOMES = {
    "Dataset": "dataset",
    "SampleOrder": "dataset",
    "TrainingData": "training_data",
    "load_data": "loading",
    "microbatch": "dataset",
    "num_microbatches": "dataset",
    "unigram_entropy": "dataset",
}

__getattr__ = lazy_names(__name__, _HOMES)
