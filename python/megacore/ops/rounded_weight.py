"""A weight in 8 bits that stays from one product to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from megacore.ops.quantize import block_buffers, quantize_blocks


class RoundedWeight:
    """One weight in 8 bits, as it is and transposed, in memory that does not move.

    `megacore.optim.RoundedWeights` has those of a model and says when they expire.

    Args:
        weight: The parameter.
        sizes: Its shape as ``(E, N, K)``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> rounded = RoundedWeight(weight, (1, 2, 3))
        >>> before = rounded.blocks()[1].clone()
        >>> _ = weight.data.mul_(2)
        >>> torch.equal(rounded.blocks()[1], before)
        True
        >>> rounded.expire()
        >>> torch.equal(rounded.blocks()[1], before)
        False
    """

    def __init__(self, weight: Tensor, sizes: tuple[int, int, int]) -> None:
        self._weight, self._sizes = weight, sizes
        shaped = self._shaped()
        self._rounded = tuple(block_buffers(shaped, transposed=turned) for turned in (False, True))
        self._is_current = [False, False]

    @property
    def num_bytes(self) -> int:
        """Bytes of values and scales."""
        return sum(each.nbytes for pair in self._rounded for each in pair)

    @torch.no_grad()
    def blocks(self, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
        """Return the result of `quantize_blocks`, computed if the last one has expired.

        Sync:
            None.
        """
        pair = self._rounded[transposed]
        if not self._is_current[transposed]:
            quantize_blocks(self._shaped(), transposed=transposed, out=pair)
            self._is_current[transposed] = True
        return pair

    def expire(self) -> None:
        """Round again before the next use."""
        self._is_current[:] = False, False

    def _shaped(self) -> Tensor:
        return self._weight.detach().view(self._sizes)


def rounded_of(weight: Tensor) -> RoundedWeight | None:
    """Return the rounded copy that a parameter has for :mod:`megacore.ops.fp8`, or ``None``.

    Example:
        >>> rounded_of(torch.nn.Parameter(torch.ones(1))) is None
        True
    """
    reference = getattr(weight, "rounded", None)
    return None if reference is None else reference()
