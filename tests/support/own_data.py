"""Datasets with masked labels, for ``data.factory``, and losses for ``train.loss``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megacore.api import LossContext, Microbatch, Sample, reduce_from_group, token_loss

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
