"""Counter-based dropout: masks depend on the element, not on the place or time of the computation.

One process, or any split over tp, pp, dp or the sequence, drops the same elements. There is no
generator state to save in a checkpoint.

The key of an element of the residual stream is (seed, step, layer, site, global sample id, position
in the sequence, feature); see :mod:`megacore.ops.counter_random` for its random number, and
:mod:`megacore.ops.dropout` for the rule and the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from megacore.ops.counter_random import key_of


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
