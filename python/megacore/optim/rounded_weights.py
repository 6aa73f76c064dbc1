"""Weights of 8-bit products, rounded once per optimizer step instead of in every microbatch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import nn

from megacore.ops.fp8 import fp8_products
from megacore.ops.rounded_weight import RoundedWeight
from megacore.parallel.params import before_use


class RoundedWeights:
    """The rounded weights of all 8-bit products of a model.

    After :meth:`expire`, a forward pre-hook of the module that owns a weight rounds it before the
    next use, so after the gather of an optimizer that was made earlier. Both layouts have fixed
    addresses. A graph of a module contains no rounding, since pre-hooks run outside of it; a graph
    of passes that begin with :meth:`expire` rounds once per replay.

    Dropping this object frees the memory; products then round in each pass.

    Args:
        modules: The model.

    Source:
        ``skip_fp8_weight_update`` of Transformer Engine.

    Example:
        >>> import torch
        >>> from megacore.ops.fp8 import fp8_linear
        >>> class Layer(nn.Linear):
        ...     linear = staticmethod(fp8_linear)
        >>> RoundedWeights([Layer(4, 8)]).num_bytes  # twice 32 values and a float32 scale
        72
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._weights: list[RoundedWeight] = []
        for module in modules:
            of_owner: dict[nn.Module, list[RoundedWeight]] = {}
            for product in fp8_products(module):
                rounded = RoundedWeight(product.weight, product.sizes)
                # Weak: without this object, nothing would make the copy expire.
                product.weight.rounded = weakref.ref(rounded)  # type: ignore[attr-defined]
                of_owner.setdefault(product.module, []).append(rounded)
            for owner, weights in of_owner.items():
                before_use(owner, _round_before_use(owner, weights))
                self._weights += weights

    @property
    def num_bytes(self) -> int:
        """Bytes of all rounded weights of this rank."""
        return sum(weight.num_bytes for weight in self._weights)

    def expire(self) -> None:
        """Round again before the next use: weights have changed, or may have."""
        for weight in self._weights:
            weight.expire()

    def refresh(self) -> None:
        """Round all weights that have expired, before a capture that must not record it."""
        for weight in self._weights:
            _refresh(weight, is_training=True)


def _round_before_use(owner: nn.Module, weights: list[RoundedWeight]) -> Callable[[], None]:
    of_module = weakref.ref(owner)
    references = [weakref.ref(weight) for weight in weights]

    def round_() -> None:
        module = of_module()
        for reference in references:
            weight = reference()
            if weight is not None and module is not None:
                _refresh(weight, is_training=module.training)

    return round_


def _refresh(weight: RoundedWeight, *, is_training: bool) -> None:
    """Round if expired; a backward pass takes the transposed weight too."""
    weight.blocks()
    if is_training:
        weight.blocks(transposed=True)
