"""Exponential moving average of the weights, sharded as the optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from megacore.optim.shard import ParamPiece
from megacore.optim.step_result import StepResult

# Kind of the tensors in pieces and checkpoints.
AVERAGE = "ema"


class WeightAverage:
    """Moving average ``a = decay * a + (1 - decay) * w`` of the fp32 weights of this rank's pieces.

    It starts as the weights. A skipped step does not change it.

    Args:
        pieces: Pieces of the optimizer, :meth:`DistributedOptimizer.pieces`.
        decay: Decay per step, in [0, 1).

    Raises:
        ValueError: If ``decay`` is out of range.

    Example:
        >>> from megacore.buffers import make_buffers
        >>> from megacore.optim import DistributedOptimizer
        >>> from megacore.parallel import ParamInfo, ProcessGroups
        >>> weight, groups = torch.nn.Parameter(torch.ones(1)), ProcessGroups.single()
        >>> info = ParamInfo(name="w", full_shape=(1,), tp_dim=None, weight_decay=False)
        >>> buffers = make_buffers([(info, weight)], groups=groups)
        >>> optimizer = DistributedOptimizer(buffers, groups=groups)
        >>> average = WeightAverage(optimizer.pieces(), decay=0.75)
        >>> weight.sum().backward()
        >>> average.update(optimizer.step(lr=0.5))
        >>> weight.item(), average.pieces()[0].tensors["ema"].item()
        (0.5, 0.875)
    """

    def __init__(self, pieces: Sequence[ParamPiece], *, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay}")
        self._decay = decay
        self._pieces: list[ParamPiece] = []
        self._runs: list[tuple[Tensor, Tensor]] = []  # average, weights
        for run in _adjacent(pieces):
            weights = [piece.tensors["main_param"] for piece in run]
            first, numel = weights[0], sum(weight.numel() for weight in weights)
            whole = first.as_strided((numel,), (1,))
            average = whole.clone()
            self._runs.append((average, whole))
            parts = torch.split(average, [weight.numel() for weight in weights])
            self._pieces += [
                replace(piece, tensors={AVERAGE: part})
                for piece, part in zip(run, parts, strict=True)
            ]

    @property
    def state_bytes(self) -> int:
        """Bytes of the average on this rank."""
        return sum(average.nbytes for average, _ in self._runs)

    @torch.no_grad()
    def update(self, result: StepResult) -> None:
        """Take in the weights of a step, unless it was skipped.

        Sync:
            None on CUDA.
        """
        weight = ((1.0 - self._decay) * (1.0 - result.numbers[1])).float()
        for average, weights in self._runs:
            average.lerp_(weights, weight)

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the weights."""
        for average, weights in self._runs:
            average.copy_(weights)

    def pieces(self) -> list[ParamPiece]:
        """Return the ranges of parameters with views of their average, ``"ema"``."""
        return list(self._pieces)


def _adjacent(pieces: Sequence[ParamPiece]) -> Iterator[list[ParamPiece]]:
    """Group pieces whose weights follow one another in memory, so that a step has few kernels."""
    run = list(pieces[:1])
    for before, piece in pairwise(pieces):
        last, own = before.tensors["main_param"], piece.tensors["main_param"]
        # Fake tensors of dry runs have storages, but no addresses.
        is_next = own.storage_offset() == last.storage_offset() + last.numel()
        if not is_next or own.untyped_storage()._cdata != last.untyped_storage()._cdata:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
