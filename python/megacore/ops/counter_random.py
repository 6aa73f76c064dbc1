"""Counter-based random numbers: a function of their use, not of the place or time of the draw.

One process, or any split over tp, cp, pp, dp or the sequence, draws the same numbers. There is no
generator state to save in a checkpoint.

A use is named by a text, whose SHA-256 gives a 64-bit key. The key, the global sample id and the
position in the sequence are mixed by SplitMix64 into a starting point for each token. The f-th
number of the SplitMix64 stream from this starting point belongs to feature f of the token.

Source:
    SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014
    (doi:10.1145/2660193.2660195); the mixer's constants are Stafford's variant 13. torch has no
    fast unsigned 64-bit arithmetic, so int64 wraps around and logical shifts are masked.

Shapes: S sequence (or this rank's slice of it), B batch, H features.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megacore import _core


def key_of(text: str) -> int:
    """Return the key of a use as a signed 64-bit integer.

    Example:
        >>> key_of("dropout|1|0|0|2") == key_of("dropout|1|0|0|3")
        False
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


class StepKeys:
    """Keys of all uses in a step, in device memory.

    Code captured by a CUDA graph reads its keys here: a host number would be frozen at the capture.

    Args:
        uses: Texts of the uses, each with ``{step}`` in it.
        device: Device of the keys.

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
            Copies the keys to the device, in stream order after all work launched before.
        """
        keys = [key_of(use.format(step=step)) for use in self._uses]
        self._keys.copy_(torch.tensor(keys, dtype=torch.int64))

    def of(self, use: str) -> Tensor:
        """Return the key of a use, 0-d int64: a view at a fixed address."""
        return self._keys[self._places[use]]


def token_numbers(
    key: int | Tensor,
    *,
    sample_ids_B: Tensor,
    positions_S: Tensor,
    num_features: int,
    first_feature: int = 0,
) -> Tensor:
    """Draw one number per feature of each token.

    Args:
        key: From :func:`key_of`, or from :class:`StepKeys`.
        sample_ids_B: Global sample ids, ``(B,)``, int64.
        positions_S: Positions in the whole sequence, ``(S,)``, int64.
        num_features: H.
        first_feature: Number of the first of them.

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
    # Wrapped manually: torch rejects a Python scalar outside of int64.
    start_B = _mix(sample_ids_B * _GOLDEN + key)
    start_SB = _mix(start_B + positions_S[:, None] * _GOLDEN)
    first, end = first_feature + 1, first_feature + num_features + 1
    counter_H = torch.arange(first, end, device=sample_ids_B.device) * _GOLDEN
    return _mix(start_SB[:, :, None] + counter_H)


def uniform(numbers: Tensor) -> Tensor:
    """Turn numbers into fp32 in ``[0, 1)``, multiples of ``2**-24``: their upper 24 bits.

    Example:
        >>> uniform(torch.tensor([0, 2**62, -1])).tolist()
        [0.0, 0.25, 0.9999999403953552]
    """
    return _shift_right(numbers, 40).float() * 2.0**-24


def fill_normal(out_RN: Tensor, *, key: int, first: int, stride: int, std: float) -> None:
    """Fill rows with normally distributed numbers of mean 0, given by their index in a stream.

    Numbers 2p and 2p + 1 are the results of a Box-Muller transform of the p-th SplitMix64 number:
    24 bits for the radius, which is at most 5.77 ``std``, and 32 for the angle. Computed with
    torch's number of threads; the bits are the same on every processor.

    Args:
        out_RN: Rows of N numbers, ``(R, N)``, float32, contiguous, on the CPU.
        key: Key of the stream, of at least 0 and below 2**64.
        first: Index of the first number of row 0.
        stride: Difference of this index from row to row.
        std: Standard deviation.

    Raises:
        TypeError: For another dtype or a tensor that is not contiguous.
        ValueError: For another number of dimensions, or a negative ``first`` or ``stride``.

    Source:
        Box, Muller, "A note on the generation of random normal deviates", 1958
        (doi:10.1214/aoms/1177706645).

    Example:
        >>> whole, columns = torch.empty(1, 8), torch.empty(2, 2)
        >>> fill_normal(whole, key=1, first=0, stride=0, std=0.02)
        >>> fill_normal(columns, key=1, first=2, stride=4, std=0.02)  # of a matrix (2, 4)
        >>> torch.equal(whole.view(2, 4)[:, 2:], columns)
        True
    """
    _core.fill_normal(
        out_RN.numpy(),
        key=key,
        first=first,
        stride=stride,
        standard_deviation=std,
        num_threads=torch.get_num_threads(),
    )


def fill_uniform(out_RN: Tensor, *, key: int, first: int, stride: int, std: float) -> None:
    """Fill rows as `fill_normal` does, with uniformly distributed numbers of mean 0.

    Number i is made of the upper 24 bits of the i-th SplitMix64 number; all are below
    ``sqrt(3) std`` in magnitude. Key, first and stride are below 2**63.
    """
    rows, columns = out_RN.shape
    index_RN = torch.arange(columns) + (first + stride * torch.arange(rows))[:, None]
    numbers_RN = _mix((index_RN + 1) * _GOLDEN + _mix(torch.tensor(key)))
    out_RN.copy_((uniform(numbers_RN) - (0.5 - 2.0**-25)) * (2.0 * math.sqrt(3.0) * std))


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _mix(z: Tensor) -> Tensor:
    """Return the SplitMix64 finalizer on int64; changes ``z`` in place."""
    z.bitwise_xor_(_shift_right(z, 30)).mul_(_MULTIPLIER_1)
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_MULTIPLIER_2)
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's operator copies the sign bit."""
    return (z >> bits).bitwise_and_(2 ** (64 - bits) - 1)
