"""Random numbers that are a function of *what* they are for, not of where or when they are drawn.

One process, or any split over tp, cp, pp, dp or the sequence, draws the same numbers. There is no
generator state to save in a checkpoint.

The scheme: a use is named by a text, which gives a 64-bit key through SHA-256. Key, global sample
id and position in the sequence give each token a starting point through the SplitMix64 mixer. The
starting point begins a SplitMix64 stream, whose f-th number belongs to feature f of the token.

Source:
    SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014
    (doi:10.1145/2660193.2660195); the mixer's constants are Stafford's variant 13. torch has no
    fast unsigned 64-bit arithmetic, so int64 wraps around and logical shifts are masked.

Shapes: S sequence (or this rank's slice of it), B batch, H features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def key_of(text: str) -> int:
    """The key of a use as a signed 64-bit integer.

    Example:
        >>> key_of("dropout|1|0|0|2") == key_of("dropout|1|0|0|3")
        False
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


class StepKeys:
    """The keys of all uses in a step, on the device.

    Code that a CUDA graph has captured takes its keys from here: a number of the host would be
    frozen at that of the capture.

    Args:
        uses: Texts of the uses, each with ``{step}`` in it.
        device: Where the keys live.

    Example:
        >>> keys = StepKeys(["dropout|1|{step}|0|2"], device="cpu")
        >>> keys.set_step(7)
        >>> keys.of("dropout|1|{step}|0|2").item() == key_of("dropout|1|7|0|2")
        True
    """

    def __init__(self, uses: Iterable[str], *, device: torch.device | str) -> None:
        self._uses = tuple(dict.fromkeys(uses))
        self._places = {use: place for place, use in enumerate(self._uses)}
        self._keys = torch.zeros(len(self._uses), dtype=torch.int64, device=device)

    def set_step(self, step: int) -> None:
        """Compute the keys of a step.

        Sync:
            Copies them to the device, behind all that was launched before.
        """
        keys = [key_of(use.format(step=step)) for use in self._uses]
        self._keys.copy_(torch.tensor(keys, dtype=torch.int64))

    def of(self, use: str) -> Tensor:
        """The key of a use, 0-d int64: a view of memory that never moves."""
        return self._keys[self._places[use]]


def token_numbers(
    key: int | Tensor, *, sample_ids_B: Tensor, positions_S: Tensor, num_features: int
) -> Tensor:
    """Draw one number per feature of each token.

    Args:
        key: From :func:`key_of`, or from :class:`StepKeys`.
        sample_ids_B: Global sample ids, ``(B,)``, int64.
        positions_S: Positions in the whole sequence, ``(S,)``, int64.
        num_features: H.

    Returns:
        ``(S, B, H)``, int64, every bit random.

    Example:
        >>> ids, positions = torch.tensor([7, 8]), torch.arange(4)
        >>> whole = token_numbers(1, sample_ids_B=ids, positions_S=positions, num_features=3)
        >>> part = token_numbers(
        ...     1, sample_ids_B=ids[1:], positions_S=positions[2:], num_features=3
        ... )
        >>> torch.equal(whole[2:, 1:], part)
        True
    """
    # Wrapped by hand: torch refuses a Python scalar outside of int64.
    start_B = _mix(sample_ids_B * _GOLDEN + key)
    start_SB = _mix(start_B + positions_S[:, None] * _GOLDEN)
    counter_H = torch.arange(1, num_features + 1, device=sample_ids_B.device) * _GOLDEN
    return _mix(start_SB[:, :, None] + counter_H)


def uniform(numbers: Tensor) -> Tensor:
    """Turn numbers into fp32 in ``[0, 1)``, multiples of ``2**-24``: their upper 24 bits.

    Example:
        >>> uniform(torch.tensor([0, 2**62, -1])).tolist()
        [0.0, 0.25, 0.9999999403953552]
    """
    return _shift_right(numbers, 40).float() * 2.0**-24


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
