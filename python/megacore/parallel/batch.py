"""Microbatch of tokens, made by the data code and consumed by the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megacore.ops.counter_random import StepKeys


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """The tokens of one forward pass on one data-parallel rank.

    Every rank of a pipeline and of a tensor-parallel group gets the same microbatch.

    Attributes:
        tokens: Token ids, ``(B, S)``, int64.
        labels: The next token of each token, ``(B, S)``, int64; below 0 where it does not count
            in the loss; ``None`` if no loss is computed.
        sample_ids: Global number of each sample, ``(B,)``, int64. Together with the step it
            identifies a sample in every layout, so that dropout masks do not depend on the rank of
            the sample.
        step: Optimizer step of the microbatch, from 0.
        loss_factor: Factor on its mean loss in the backward pass, such as the loss scale divided by
            the number of microbatches. Auxiliary losses (those of MoE routers) get the same factor.
        sample_factors: Factors on the auxiliary losses by sample, ``(B,)``, instead of
            ``loss_factor``: the mean over the samples of factor times mean loss counts. ``None`` if
            all samples have the same weight.
        number: Index of the microbatch in the step on this rank, which selects the graphs of
            captured layers; ``None`` runs them eagerly.
        keys: Keys of the step's random numbers on the device, for code that may be captured.

    Raises:
        ValueError: If the shapes disagree.

    Example:
        >>> import torch
        >>> rows = torch.arange(6).view(2, 3)
        >>> Microbatch(tokens=rows, labels=rows + 1, sample_ids=torch.arange(2), step=0).shape
        (2, 3)
    """

    tokens: Tensor
    labels: Tensor | None
    sample_ids: Tensor
    step: int
    loss_factor: float | Tensor = 1.0
    sample_factors: Tensor | None = None
    number: int | None = None
    keys: StepKeys | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.tokens.shape)
        if len(shape) != 2:
            raise ValueError(f"tokens have shape {shape}, expected (batch, sequence)")
        if self.labels is not None and tuple(self.labels.shape) != shape:
            raise ValueError(f"labels have shape {tuple(self.labels.shape)}, tokens have {shape}")
        if tuple(self.sample_ids.shape) != shape[:1]:
            raise ValueError(
                f"sample_ids have shape {tuple(self.sample_ids.shape)}, expected {shape[:1]}"
            )

    @property
    def router_factor(self) -> float | Tensor:
        """Factor on auxiliary losses: one number, or ``(B,)``."""
        return self.loss_factor if self.sample_factors is None else self.sample_factors

    @property
    def shape(self) -> tuple[int, int]:
        """``(B, S)``: samples and tokens per sample."""
        batch, sequence = self.tokens.shape
        return batch, sequence

    def to(self, device: torch.device | str) -> Microbatch:
        """Return a copy with its tensors on ``device``.

        Sync:
            Waits for copies between devices; otherwise returns at once.
        """
        return replace(
            self,
            tokens=self.tokens.to(device),
            labels=None if self.labels is None else self.labels.to(device),
            sample_ids=self.sample_ids.to(device),
        )
