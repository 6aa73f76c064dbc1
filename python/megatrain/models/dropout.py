"""Counter-based dropout: masks depend on the element, not on the place or time of the computation.

One process, or any split over tp, pp, dp or the sequence, drops the same elements. There is no
generator state to save in a checkpoint.

The key of an element of the residual stream is (seed, step, layer, site, global sample id, position
in the sequence, feature); see :mod:`megacore.ops.counter_random` for its random number, and
:mod:`megacore.ops.dropout` for the rule and the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum

from megacore.ops.counter_random import key_of
from megacore.parallel.batch import Microbatch

# Batch whose tokens the running layer computes, for modules that get the activations alone.
_BATCH: ContextVar[Microbatch | None] = ContextVar("batch_of_layer", default=None)


@contextmanager
def batch_in_use(batch: Microbatch) -> Iterator[None]:
    """Context of computations on the tokens of a batch."""
    token = _BATCH.set(batch)
    try:
        yield
    finally:
        _BATCH.reset(token)


def current_batch() -> Microbatch:
    """Return the batch of the innermost `batch_in_use`.

    Raises:
        RuntimeError: Without one.
    """
    batch = _BATCH.get()
    if batch is None:
        raise RuntimeError("dropout of adapters needs the tokens: run it inside of batch_in_use")
    return batch


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
