"""Inputs for rounding to 8 bits, and a comparison of results to the bit."""

from __future__ import annotations

import torch
from torch import Tensor


def awkward(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return values of many magnitudes with zeros, subnormals, ties, infinities and NaN."""
    generator = torch.Generator().manual_seed(rows + width)
    x = torch.randn(rows, width, generator=generator) * torch.logspace(-12, 12, width)
    x[::7] = torch.round(x[::7] * 16) / 16
    x[1::9] = 0.0
    x[2::9] = -0.0
    x[3::9] *= 1e-40
    x[5::64, ::3] = torch.inf
    x[6::64, 1::50] = torch.nan
    return x.to(dtype)


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare values and scales to the bit, but for the sign and payload of a NaN."""
    for left, right in zip(found, expected, strict=True):
        left, right = left.cpu().float(), right.cpu().float()
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
        numbers = ~left.isnan()
        assert torch.equal(left[numbers].signbit(), right[numbers].signbit())
