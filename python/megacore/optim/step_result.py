"""Results of one step of an optimizer."""

from __future__ import annotations

import math
from functools import cached_property

from torch import Tensor

from megacore import host_values


class StepResult:
    """Results of one optimizer step, equal on every rank.

    The numbers stay on the device until one of them is read, so a step needs no host sync.

    Args:
        numbers: ``[gradient norm, skipped or not (1 or 0), steps skipped so far, *extra]``, fp64.

    Example:
        >>> import torch
        >>> StepResult(torch.tensor([5.0, 0.0, 2.0, 7.0], dtype=torch.float64)).num_skipped
        2
    """

    def __init__(self, numbers: Tensor) -> None:
        self._on_device = numbers

    def __repr__(self) -> str:
        """Show the results that were read already; a repr must not wait for the device."""
        if "_numbers" not in self.__dict__:
            return "<StepResult: not read from the device>"
        skipped = ", skipped" if self.skipped else ""
        return (
            f"<StepResult: grad_norm {self.grad_norm:.6g}{skipped}, {self.num_skipped} skipped in "
            "all>"
        )

    @property
    def numbers(self) -> Tensor:
        """All numbers as one device tensor: ``[grad_norm, skipped, num_skipped, *extra]``."""
        return self._on_device

    @cached_property
    def _numbers(self) -> Tensor:
        numbers = self._on_device
        return host_values.to_host(
            numbers,
            "results of the step",
            # An applied step whose sums are all 0.
            assumed=lambda: [math.nan, *(0.0,) * (numbers.numel() - 1)],
        )

    @property
    def grad_norm(self) -> float:
        """Norm of the averaged gradient of the whole model before clipping; NaN if skipped.

        Sync:
            Waits for the device when the first of the numbers is read.
        """
        return float(self._numbers[0])

    @property
    def skipped(self) -> bool:
        """True if no rank changed anything: a gradient was not finite, or there was a veto."""
        return bool(self._numbers[1])

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped so far because of a non-finite gradient."""
        return int(self._numbers[2])

    @property
    def extra(self) -> Tensor:
        """Additional numbers of the caller, summed over the world, 1-D, fp64, on the CPU."""
        return self._numbers[3:]
