"""Tables of the rotary embedding, with the scaling rules for long sequences.

Shapes: S sequence, R rotated elements of a head.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from megatrain.config import ModelConfig, RopeScalingConfig
from megatrain.models.mappings import Region


def frequencies(
    num_rotated: int, *, base: float, scaling: RopeScalingConfig, sequence: int = 0
) -> tuple[Tensor, float]:
    """Return the angle per position of each pair of elements, and the factor on the result.

    Args:
        num_rotated: R, even.
        base: Pair i rotates by ``base ** (-2 i / R)`` per position, before scaling.
        scaling: The rule.
        sequence: Tokens per sequence; used by ``dynamic`` and ``longrope`` only.

    Returns:
        ``(R/2,)``, float64; the factor on sines and cosines.

    Source:
        ``linear``: Chen et al., arXiv:2306.15595. ``llama3``: Grattafiori et al., arXiv:2407.21783.
        ``yarn`` and ``dynamic``: Peng et al., arXiv:2309.00071. ``longrope``: Ding et al.,
        arXiv:2402.13753.
    """
    pair = torch.arange(0, num_rotated, 2, dtype=torch.float64) / num_rotated
    plain = base**-pair
    factor, original = scaling.factor, scaling.original_seq_length or 0
    if scaling.type == "linear":
        return plain / factor, 1.0
    if scaling.type == "dynamic":
        growth = factor * max(sequence, original) / original - (factor - 1)
        return (base * growth ** (num_rotated / (num_rotated - 2))) ** -pair, 1.0
    if scaling.type == "llama3":
        turns = original * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return torch.lerp(plain / factor, plain, kept), 1.0
    if scaling.type == "yarn":
        kept = _kept_by_yarn(num_rotated, base, scaling)
        return torch.lerp(plain / factor, plain, kept), yarn_factor(scaling)
    if scaling.type == "longrope":
        divisors = scaling.long_factors if sequence > original else scaling.short_factors
        magnified = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        own = scaling.attention_factor
        return plain / torch.tensor(divisors, dtype=plain.dtype), magnified if own is None else own
    return plain, 1.0


def yarn_factor(scaling: RopeScalingConfig) -> float:
    """Return the factor of ``yarn`` on rotated queries and keys.

    Example:
        >>> round(yarn_factor(RopeScalingConfig(type="yarn", factor=4, original_seq_length=8)), 6)
        1.138629
    """
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.factor, scaling.mscale) / magnitude(
            scaling.factor, scaling.mscale_all_dim
        )
    return magnitude(scaling.factor, 1.0)


def magnitude(factor: float, scale: float) -> float:
    """Return ``0.1 * scale * ln(factor) + 1``."""
    return 0.1 * scale * math.log(factor) + 1.0


def _kept_by_yarn(num_rotated: int, base: float, scaling: RopeScalingConfig) -> Tensor:
    """Return the weight of the plain frequency of each pair: 1 at the start, 0 at the end."""
    original = scaling.original_seq_length or 0

    def pair_with(turns: float) -> float:
        return num_rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_rotated - 1)
    if low == high:
        high += 0.001
    index = torch.arange(num_rotated // 2, dtype=torch.float64)
    return 1.0 - ((index - low) / (high - low)).clamp(0.0, 1.0)


class RotaryTables(nn.Module):
    """Cosines and sines of the rotary angles, ``(S, R/2)`` each, float32, computed in float64.

    Args:
        config: The ``[model]`` section.
        num_rotated: R.
        device: Device of the tables.
        kind: Rotation of the layers, see ``ModelConfig.rotation_of``; ``"none"`` turns by nothing.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        num_rotated: int,
        *,
        device: torch.device,
        kind: Literal["main", "window", "none"] = "main",
    ) -> None:
        super().__init__()
        self._kind = kind
        self._depends = kind == "main" and config.rope_scaling.type in ("dynamic", "longrope")
        self._config = config
        self._num_rotated = num_rotated
        self._length = config.seq_length
        cos, sin = self._compute(device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Return the tables for a sequence of this many tokens; they may be longer.

        Only ``dynamic`` and ``longrope`` depend on the length; their tables are computed when it
        changes.
        """
        if self._depends and sequence != self._length:
            self._length = sequence
            # Generation must not leave tables that training cannot save for backward.
            with torch.inference_mode(False):
                cos, sin = self._compute(self.cos.device)
                self.cos, self.sin = cos.to(self.cos.dtype), sin.to(self.sin.dtype)
        return self.cos, self.sin

    def switches(self, before: int, after: int) -> bool:
        """Return whether ``longrope`` rotates a sequence in another way once it has grown."""
        scaling = self._config.rope_scaling
        original = scaling.original_seq_length or 0
        return scaling.type == "longrope" and before <= original < after

    def share(self, sequence: int, region: Region) -> tuple[Tensor, Tensor]:
        """Return the tables at the positions of this cp rank's tokens of a sequence."""
        cos, sin = self(sequence)
        if region.cp.size == 1:
            return cos, sin
        positions = region.share_positions(sequence, device=cos.device)
        return cos[positions], sin[positions]

    def _compute(self, device: torch.device) -> tuple[Tensor, Tensor]:
        config, is_main = self._config, self._kind == "main"
        angle, factor = frequencies(
            self._num_rotated,
            base=config.rope_base if is_main else config.window_rope_base or config.rope_base,
            scaling=config.rope_scaling if is_main else RopeScalingConfig(),
            sequence=self._length,
        )
        if self._kind == "none":
            angle = torch.zeros_like(angle)
        angles = torch.outer(torch.arange(config.seq_length, dtype=torch.float64), angle)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return cos.float().to(device), sin.float().to(device)
