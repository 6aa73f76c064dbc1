"""Dropout whose mask is a function of *what* is dropped, not of where or when it is computed.

One process, or any split over tp, pp, dp or the sequence, drops the same elements. There is no
generator state to save in a checkpoint.

The scheme: an element of the residual stream is named by (seed, step, layer, site, global sample
id, position in the sequence, feature). Seed, step, layer and site give a 64-bit key through
SHA-256. Key, sample and position give each token a starting point through the SplitMix64 mixer.
The starting point begins a SplitMix64 stream, and its f-th number decides about feature f: the
element is kept if the number, as a signed 64-bit integer, is at least ``p * 2**64 - 2**63``.

Source:
    SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014
    (doi:10.1145/2660193.2660195); the mixer's constants are Stafford's variant 13. torch has no
    fast unsigned 64-bit arithmetic, so int64 wraps around and logical shifts are masked.

Shapes: S sequence (or this rank's slice of it), B batch, H hidden.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Site(IntEnum):
    """Where in the model an element is dropped; there is no dropout on attention probabilities."""

    EMBEDDING = 0
    ATTENTION = 1
    MLP = 2


@dataclass(frozen=True, kw_only=True)
class DropoutKey:
    """Names one use of dropout in a run.

    Attributes:
        seed: Seed of the run.
        step: Optimizer step.
        layer: Global index of the layer; 0 for the embedding.
        site: Place in the layer.
    """

    seed: int
    step: int
    layer: int
    site: Site

    def as_int64(self) -> int:
        """The key as a signed 64-bit integer."""
        text = f"dropout|{self.seed}|{self.step}|{self.layer}|{int(self.site)}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def keep_mask(
    key: DropoutKey, *, p: float, sample_ids_B: Tensor, positions_S: Tensor, num_features: int
) -> Tensor:
    """Decide for every element whether it is kept.

    Args:
        key: Which use of dropout.
        p: Probability that an element is dropped, in ``[0, 1)``.
        sample_ids_B: Global sample ids, ``(B,)``, int64.
        positions_S: Positions in the whole sequence, ``(S,)``, int64.
        num_features: H.

    Returns:
        ``(S, B, H)``, bool, true with probability ``1 - p``.

    Example:
        >>> key = DropoutKey(seed=1, step=0, layer=0, site=Site.MLP)
        >>> mask = keep_mask(
        ...     key, p=0.25, sample_ids_B=torch.tensor([7]), positions_S=torch.arange(100),
        ...     num_features=100,
        ... )
        >>> mask.shape, abs(mask.float().mean().item() - 0.75) < 0.02
        (torch.Size([100, 1, 100]), True)
    """
    # Wrapped by hand: torch refuses a Python scalar outside of int64.
    start_B = _mix(sample_ids_B * _GOLDEN + key.as_int64())
    start_SB = _mix(start_B + positions_S[:, None] * _GOLDEN)
    counter_H = torch.arange(1, num_features + 1, device=sample_ids_B.device) * _GOLDEN
    number_SBH = _mix(start_SB[:, :, None] + counter_H)
    return number_SBH >= round(p * 2**64) - 2**63


def dropout(x_SBH: Tensor, keep_SBH: Tensor, p: float) -> Tensor:
    """Zero the elements that are not kept and scale the others by ``1 / (1 - p)``."""
    return x_SBH * (keep_SBH * (1.0 / (1.0 - p))).to(x_SBH.dtype)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _mix(z: Tensor) -> Tensor:
    """The SplitMix64 finalizer on int64; changes ``z`` in place."""
    z.bitwise_xor_(_shift_right(z, 30)).mul_(_MULTIPLIER_1)
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_MULTIPLIER_2)
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own copies the sign."""
    return (z >> bits).bitwise_and_(2 ** (64 - bits) - 1)
