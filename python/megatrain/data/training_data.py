"""The data of a run: samples, and what is known about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatrain.data.sample import Samples
from megatrain.data.stream import TokenSource
from megatrain.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Data of a run.

    Attributes:
        sources: Training sources by name; of `data.factory`, its first samples.
        tokenizer: Their tokenizer; ``vocab_size`` is the model's vocabulary by default.
        train: Samples for training.
        validation: Validation sets by name, each in one fixed order; empty without validation data.
        validation_weights: Weight of each set in the mean validation loss.
        unigram_entropy: Entropy of the training tokens of the first source, in nats per token. A
            loss below it proves that the model uses context. ``None`` if the loss is not of tokens.
        default_normalization: Default of ``train.loss_normalization``.
        notes: Sentences about the tokens for the start of a run.
        order_sizes: Samples that Megatron's order was built for, of ``"train"`` and
            ``"validation"``; empty for the other orders.
    """

    sources: Mapping[str, TokenSource]
    tokenizer: Tokenizer
    train: Samples
    validation: Mapping[str, Samples]
    validation_weights: Mapping[str, float]
    unigram_entropy: float | None
    default_normalization: Literal["microbatch", "token"] = "microbatch"
    notes: tuple[str, ...] = ()
    order_sizes: Mapping[str, int] = field(default_factory=dict)
