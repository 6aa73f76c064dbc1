"""AdamW with moments in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from megacore.optim.rules.adamw import AdamW
from megacore.optim.update_rule import StateDtype, StateTensor, UpdateRule
from megacore.options import check_options, check_values

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megacore.optim.update_piece import UpdatePiece
    from megacore.parallel.param_info import ParamInfo

# Moments, and whether they have a sign. Of the second one the root is stored, which spans less.
_SIGNED: Mapping[str, bool] = {"exp_avg": True, "exp_avg_sq": False}
# Powers of ten of the 8-bit numbers, below 1.
_DECADES = 7


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(UpdateRule):
    """AdamW whose moments are 8-bit numbers times the largest magnitude of their block.

    A block is ``block`` consecutive elements of the last dimension, so blocks are those of the
    whole parameter in every layout, and state is saved and resharded bit for bit. Parameters of
    one dimension, or whose last dimension is not a multiple of ``block``, keep the moments of
    ``others``.

    Attributes:
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        block: Elements of a block; a power of two.
        others: Rule of the other parameters.

    Raises:
        ValueError: If a value is not valid.

    Source:
        Dettmers et al., arXiv:2110.02861: the dynamic 8-bit numbers.

    Example:
        >>> AdamW8bit().state_bytes
        Fraction(9, 4)
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    block: int = 32
    others: UpdateRule = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        check_options(self.others, UpdateRule, "others")
        least = {"beta1": 0, "beta2": 0, "eps": 0, "block": 1}
        check_values(self, least=least, below={"beta1": 1, "beta2": 1})
        if self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block}")

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """Codes of both moments, and the largest magnitude of each block."""
        return tuple(
            StateTensor(name=name + suffix, dtype=dtype, elements=elements)
            for name in _SIGNED
            for suffix, dtype, elements in _parts(self.block)
        )

    @property
    def decays(self) -> tuple[float, float]:
        """Decays of both moments."""
        return self.beta1, self.beta2

    @property
    def unit(self) -> int:
        """Elements of a block."""
        return self.block

    def rules_by_kind(self) -> dict[str, UpdateRule]:
        """Return this rule and that of the other parameters."""
        return {"in blocks": self, "others": self.others}

    def rule_for(self, info: ParamInfo) -> tuple[UpdateRule, float]:
        """Return this rule for parameters that consist of whole blocks."""
        has_blocks = len(info.full_shape) > 1 and info.full_shape[-1] % self.block == 0
        return (self, 1.0) if has_blocks else self.others.rule_for(info)

    def update(self, piece: UpdatePiece, control: Tensor) -> None:
        """Update a piece: decode its moments, step by the kernel of AdamW, encode them."""
        adamw = AdamW(beta1=self.beta1, beta2=self.beta2, eps=self.eps)
        for part in piece.blocks():
            moments = {
                name: decode(part.state[name], part.state[f"{name}_scale"], is_signed=is_signed)
                for name, is_signed in _SIGNED.items()
            }
            moments["exp_avg_sq"].square_()
            adamw.update(replace(part, state=moments), control)
            moments["exp_avg_sq"].sqrt_()
            for name, is_signed in _SIGNED.items():
                codes, scales = encode(moments[name], block=self.block, is_signed=is_signed)
                part.keep(part.state[name], codes, control)
                part.keep(part.state[f"{name}_scale"], scales, control)


def _parts(block: int) -> tuple[tuple[str, StateDtype, int], ...]:
    return ("", "uint8", 1), ("_scale", "float32", block)


@cache
def numbers(*, is_signed: bool) -> tuple[float, ...]:
    """Return the 256 numbers in [-1, 1] or [0, 1], rising.

    Each power of ten below 1 has twice as many numbers as the one below it, evenly spread; beside
    them there are 0 and 1.

    Example:
        >>> values = numbers(is_signed=False)
        >>> len(values), values[0], round(values[1], 9), values[-1]
        (256, 0.0, 3.25e-07, 1.0)
    """
    found = [0.0, 1.0]
    for power in range(_DECADES):
        count = 2**power if is_signed else 2 ** (power + 1)
        unit = 10.0 ** (power + 1 - _DECADES)
        values = [(0.1 + 0.9 * (index + 0.5) / count) * unit for index in range(count)]
        found += values + [-value for value in values if is_signed]
    return tuple(sorted(found))


def _table(device: torch.device, *, is_signed: bool) -> Tensor:
    """Return :func:`numbers` on a device, ``(256,)``, fp32."""
    import torch

    from megacore.ops.cuda_module import is_assumed

    if device.type == "cuda" and not is_assumed():
        return _table_on_gpu(device, is_signed=is_signed)
    return torch.tensor(numbers(is_signed=is_signed), device=device)


@cache
def _table_on_gpu(device: torch.device, *, is_signed: bool) -> Tensor:
    """Return the table that stays on a GPU: a CUDA graph cannot record a copy from the host."""
    import torch

    return torch.tensor(numbers(is_signed=is_signed), device=device)


def encode(values: Tensor, *, block: int, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Round values to 8-bit numbers times the largest magnitude of their block.

    A value is rounded up or down with the probability that keeps its mean, for which its lowest
    bits are the random number: a moment that decays by less than half of the distance to the next
    number would never change otherwise. So equal values have equal codes, in any layout. Positive
    values without a sign are not rounded to 0, as they divide.

    Args:
        values: ``(n,)``, fp32; n is a multiple of ``block``.
        block: Elements of a block.
        is_signed: Whether values can be negative.

    Returns:
        Codes ``(n,)``, uint8, and scales ``(n / block,)``, fp32.
    """
    import torch

    known = _table(values.device, is_signed=is_signed)
    blocks = values.view(-1, block)
    scales = blocks.abs().amax(dim=1)
    relative = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    lower = torch.bucketize(relative, known, out_int32=True, right=True).sub_(1).clamp_(0, 254)
    below = known[lower]
    share = (relative - below) / (known[lower + 1] - below)
    random = (blocks.view(torch.int32) & 0xFF).float() / 256.0
    codes = lower + (share > random)
    if not is_signed:
        codes = torch.maximum(codes, (relative > 0.0).int())
    return codes.to(torch.uint8).view(-1), scales


def decode(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """Return the values of codes, ``(n,)``, fp32; a block of scale 0 is zero."""
    known = _table(codes.device, is_signed=is_signed)
    block = codes.numel() // scales.numel()
    return (known[codes.int()].view(-1, block) * scales.unsqueeze(1)).view(-1)
