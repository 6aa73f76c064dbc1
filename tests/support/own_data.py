"""Datasets with masked labels, for ``data.factory``, and losses for ``train.loss``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatrain.api import (
    AnswerLogprobs,
    LossContext,
    Microbatch,
    Sample,
    reduce_from_group,
    token_loss,
)

SEQUENCE = 16


class Masked:
    """Samples of which few labels count, at positions by ``kind``."""

    num_samples = 64

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def sample(self, number: int) -> Sample:
        random = np.random.RandomState(number)
        tokens = random.randint(0, 256, size=SEQUENCE + 1).astype(np.int64)
        labels = tokens[1:].copy()
        if self.kind == "uneven":  # one label of even samples, five of odd ones
            labels[5:] = -1
            if number % 2 == 0:
                labels[:4] = -1
        elif self.kind == "second half":  # all of the second cp rank
            labels[: SEQUENCE // 2] = -1
        elif self.kind == "answers":  # spans of few different tokens, none in some samples
            tokens %= 8
            begin, end = np.sort(random.randint(0, SEQUENCE + 1, size=2))
            labels = tokens[1:].copy()
            labels[:begin] = -1
            labels[end:] = -1
        elif self.kind == "first":
            labels[1:] = -1
        elif self.kind == "one":  # at a token whose prediction further is on the first cp rank
            labels[: SEQUENCE // 4] = -1
            labels[SEQUENCE // 4 + 1 :] = -1
        elif (
            self.kind == "empty"
            or (self.kind == "gaps" and number // 8 % 2 == 1)
            or (self.kind == "rims" and number // 8 % 2 == 0)
        ):
            labels[:] = -1
        return Sample(tokens=tokens[:-1], labels=labels)


def uneven(_config: Any) -> Any:
    return Masked("uneven"), {"held out": Masked("uneven")}


def second_half(_config: Any) -> Any:
    return Masked("second half"), {"held out": Masked("second half")}


def one(_config: Any) -> Any:
    return Masked("one"), {"held out": Masked("one")}


def first(_config: Any) -> Any:
    return Masked("first"), {"held out": Masked("uneven")}


def gaps(_config: Any) -> Any:
    return Masked("gaps"), {"held out": Masked("uneven"), "nothing": Masked("empty")}


def answers(_config: Any) -> Any:
    return Masked("answers"), {"held out": Masked("answers")}


def rims(_config: Any) -> Any:
    return Masked("rims"), {"nothing": Masked("empty")}


def spread(logits: torch.Tensor, batch: Microbatch, context: LossContext) -> torch.Tensor:
    """The loss of docs/own-model.md, with a heavy penalty."""
    squares = reduce_from_group(logits.float().square().sum(-1), context.region.group)
    counts = context.labels(batch) >= 0
    penalty = (squares * counts).sum() / (counts.sum().clamp(min=1) * context.vocab)
    return token_loss(logits, batch, context) + 10.0 * penalty


def per_token(logits: torch.Tensor, batch: Microbatch, context: LossContext) -> torch.Tensor:
    del batch, context
    return logits.float().mean(-1)


def detached(logits: torch.Tensor, batch: Microbatch, context: LossContext) -> torch.Tensor:
    return token_loss(logits, batch, context).detach()


def not_finite(logits: torch.Tensor, batch: Microbatch, context: LossContext) -> torch.Tensor:
    return token_loss(logits, batch, context) * float("inf")


def own_columns(logits: torch.Tensor, batch: Microbatch, context: LossContext) -> torch.Tensor:
    penalty = logits.float().logsumexp(-1).square().mean()
    return token_loss(logits, batch, context) + 1e-2 * penalty


class Ranking:
    """The first of three answers against the others, less a number of each."""

    group_size = 3
    metrics = ("accuracy", "length")

    def __call__(self, answers: AnswerLogprobs) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (answers.logprobs - answers.values[:, 0]).view(-1, 3)
        is_right = (scores.argmax(1) == 0).float()
        length = answers.num_tokens.view(-1, 3).mean(1)
        return -scores.log_softmax(1)[:, 0], torch.stack((is_right, length)).detach()


ranking = Ranking()


class GroupSamples:
    """Samples of one or two groups of three answers each, of other lengths."""

    num_samples = 63

    def __init__(self, seq_length: int) -> None:
        self._size = seq_length

    def sample(self, number: int) -> Sample:
        """Return a sample; its answers begin behind two tokens of a prompt."""
        generator = np.random.default_rng(number)
        count = 3 * int(generator.integers(1, 3))
        lengths = generator.integers(3, self._size // 7, count)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        tokens = generator.integers(0, 256, self._size)
        labels = np.roll(tokens, -1)
        end = int(starts[-1])
        labels[end:] = -1
        for start, length in zip(starts, lengths, strict=False):
            labels[start : start + 2] = -1
            labels[start + length - 1] = (start * 7) % 256
        return Sample(
            tokens=tokens,
            labels=labels,
            document_starts=starts.tolist(),
            length=end,
            values=generator.normal(size=(count, 1)),
        )


def group_data(config: Any) -> tuple[GroupSamples, dict[str, GroupSamples]]:
    """Make the data of a run with a loss of groups."""
    samples = GroupSamples(config.model.seq_length)
    return samples, {"held out": samples}
