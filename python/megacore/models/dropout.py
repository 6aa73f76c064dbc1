"""Counter-based dropout: masks depend on the element, not on the place or time of the computation.

One process, or any split over tp, pp, dp or the sequence, drops the same elements. There is no
generator state to save in a checkpoint.

The key of an element of the residual stream is (seed, step, layer, site, global sample id, position
in the sequence, feature); see :mod:`megacore.ops.counter_random` for its random number. The element
is kept if the number, as a signed 64-bit integer, is at least ``p * 2**64 - 2**63``.

Shapes: S sequence (or this rank's slice of it), B batch, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from megacore.ops.counter_random import key_of, token_numbers


class Site(IntEnum):
    """Site of dropout in the model; attention probabilities have no dropout."""

    EMBEDDING = 0
    ATTENTION = 1
    MLP = 2


@dataclass(frozen=True, kw_only=True)
class DropoutKey:
    """Key of one use of dropout in a run.

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
        """Return the key as a signed 64-bit integer."""
        use = dropout_use(seed=self.seed, layer=self.layer, site=self.site)
        return key_of(use.format(step=self.step))


def dropout_use(*, seed: int, layer: int, site: Site) -> str:
    """Return the name of a use of dropout in all steps, as in `StepKeys`."""
    return f"dropout|{seed}|{{step}}|{layer}|{int(site)}"


def keep_mask(
    key: DropoutKey | Tensor,
    *,
    p: float,
    sample_ids_B: Tensor,
    positions_S: Tensor,
    num_features: int,
) -> Tensor:
    """Compute the dropout mask.

    Args:
        key: The use of dropout, or its key on the device.
        p: Dropout probability of an element, in ``[0, 1)``.
        sample_ids_B: Global sample ids, ``(B,)``, int64.
        positions_S: Positions in the whole sequence, ``(S,)``, int64.
        num_features: H.

    Returns:
        ``(S, B, H)``, bool, true with probability ``1 - p``.

    Example:
        >>> import torch
        >>> key = DropoutKey(seed=1, step=0, layer=0, site=Site.MLP)
        >>> mask = keep_mask(
        ...     key, p=0.25, sample_ids_B=torch.tensor([7]), positions_S=torch.arange(100),
        ...     num_features=100,
        ... )
        >>> mask.shape, abs(mask.float().mean().item() - 0.75) < 0.02
        (torch.Size([100, 1, 100]), True)
    """
    number_SBH = token_numbers(
        key.as_int64() if isinstance(key, DropoutKey) else key,
        sample_ids_B=sample_ids_B,
        positions_S=positions_S,
        num_features=num_features,
    )
    return number_SBH >= round(p * 2**64) - 2**63


def dropout(x_SBH: Tensor, keep_SBH: Tensor, p: float) -> Tensor:
    """Zero the dropped elements and scale the others by ``1 / (1 - p)``."""
    return x_SBH * (keep_SBH * (1.0 / (1.0 - p))).to(x_SBH.dtype)
