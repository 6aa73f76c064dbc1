"""One microbatch of tokens, as the data code makes it and the model takes it."""

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
        labels: The token that follows each one, ``(B, S)``, int64; below 0 where it does not count
            in the loss; ``None`` if no loss is wanted.
        sample_ids: Global number of each sample, ``(B,)``, int64. Together with the step it
            identifies a sample in every layout, so that dropout hits the same elements wherever
            the sample is computed.
        step: Optimizer step the microbatch belongs to, from 0.
        loss_factor: What its mean loss is multiplied by on the way into the backward pass, such as
            the loss scale divided by the number of microbatches. Losses in the middle of the model
            (those of MoE routers) get the same factor.
        sample_factors: One factor for each sample, ``(B,)``, to be used for losses in the middle in
            place of the one of the microbatch: the mean over its samples of factor times mean loss
            counts. ``None`` where samples count alike.
        number: Which microbatch of the step it is on this rank, so that captured layers know which
            of their graphs to replay; ``None`` runs them without.
        keys: The keys of the step's random numbers on the device, for code that may be captured.

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
        """What losses in the middle of the model are multiplied by: one number, or ``(B,)``."""
        return self.loss_factor if self.sample_factors is None else self.sample_factors

    @property
    def shape(self) -> tuple[int, int]:
        """``(B, S)``: samples and tokens per sample."""
        batch, sequence = self.tokens.shape
        return batch, sequence

    def to(self, device: torch.device | str) -> Microbatch:
        """Return the same microbatch with its tensors on ``device``.

        Sync:
            Waits for the copy when it crosses devices; returns at once otherwise.
        """
        return replace(
            self,
            tokens=self.tokens.to(device),
            labels=None if self.labels is None else self.labels.to(device),
            sample_ids=self.sample_ids.to(device),
        )
