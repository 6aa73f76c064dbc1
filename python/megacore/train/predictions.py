"""Losses of multi-token prediction, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.models.gpt import GPTChunk
from megacore.parallel.process_groups import ProcessGroups


class PredictionWatch:
    """Adds up the losses of all depths over a step.

    Args:
        chunks: Model chunks of this rank.
        num_depths: Layers for multi-token prediction of the whole model.
        groups: Process groups of this rank.
        device: Where this rank computes.
    """

    def __init__(
        self,
        chunks: Sequence[GPTChunk],
        *,
        num_depths: int,
        groups: ProcessGroups,
        device: torch.device,
    ) -> None:
        # The ranks of a tp group compute the same losses.
        counts = groups.tp.position == 0
        self._sums = [chunk.mtp_sums for chunk in chunks if chunk.head is not None and counts]
        self._zeros = torch.zeros(2, num_depths, dtype=torch.float64, device=device)

    def reset(self) -> None:
        """Zero the sums."""
        for sums in self._sums:
            sums.zero_()

    def extra(self) -> Tensor:
        """This rank's part, to be summed over the world: 1-D, fp64; empty without such layers."""
        total = self._zeros.clone()
        for sums in self._sums:
            total += sums
        return total.flatten()

    def losses(self, sums: Tensor) -> tuple[float, ...]:
        """Of the summed :meth:`extra` the mean loss of each depth, nats per predicted token."""
        totals, counts = sums.view(2, -1)
        return tuple((totals / counts.clamp(min=1)).tolist())
