"""Search for the first non-finite value of a step, for the message of a diverged run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacore.optim import DistributedOptimizer
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.process_groups import Group
from megatrain.models.stage import Stage


@dataclass(frozen=True, kw_only=True, order=True)
class NonFinite:
    """First non-finite value on one rank; the smallest of all ranks occurred first.

    Attributes:
        phase: 0 for weights, 1 for outputs of the forward pass, 2 for gradients.
        order: Order in the phase: by layer in the forward pass, reversed for gradients.
        rank: Global rank.
        name: Name of the parameter or module.
    """

    phase: int
    order: int
    rank: int
    name: str

    def __str__(self) -> str:
        kind = ("weight", "output of", "gradient of")[self.phase]
        return f"rank {self.rank}, {kind} {self.name}"


class NonFiniteSearch:
    """Search in the passes of one step on one rank.

    Args:
        chunks: Model chunks of this rank.
        optimizer: Optimizer over their parameters.
        rank: Global rank.

    Attributes:
        found: The first non-finite value so far.
    """

    def __init__(
        self, chunks: Sequence[Stage], optimizer: DistributedOptimizer, *, rank: int
    ) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._rank = rank
        self.found: NonFinite | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context of the passes: checks weights before, outputs in, and gradients after them.

        Sync:
            Waits for the device many times.
        """
        for chunk in self._chunks:
            for info, param in chunk.param_infos():
                self._check(param, phase=0, order=0, name=info.name)
        handles = [
            module.register_forward_hook(self._hook(order, name))
            for chunk in self._chunks
            for order, name, module in chunk.ordered_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for buffer in self._optimizer.buffers:
            for index, (info, _) in reversed(list(enumerate(buffer.params))):
                order = -_layer(info.name)
                self._check(buffer.main_grad(index), phase=2, order=order, name=info.name)

    def _hook(self, order: int, name: str) -> Any:
        def check(_module: nn.Module, _inputs: Any, output: Any) -> None:
            for value in output if isinstance(output, tuple | list) else [output]:
                if isinstance(value, Tensor) and value.is_floating_point():
                    self._check(value, phase=1, order=order, name=name)

        return check

    @torch.no_grad()
    def _check(self, value: Tensor, *, phase: int, order: int, name: str) -> None:
        if self.found is not None and (self.found.phase, self.found.order) <= (phase, order):
            return
        if not torch.isfinite(value).all():
            self.found = NonFinite(phase=phase, order=order, rank=self._rank, name=name)


def first_of_all(found: NonFinite | None, world: Group) -> str:
    """Describe the first non-finite value of all ranks. Collective."""
    ranks = [each for each in all_gather_objects(found, world) if each is not None]
    if not ranks:
        return "no rank had a non-finite weight, output or gradient"
    return f"the first non-finite value: {min(ranks)}"


def _layer(name: str) -> int:
    """Return the layer of a parameter; the head counts as the last one."""
    parts = name.split(".")
    if parts[0] == "layers" and len(parts) > 1 and parts[1].isdecimal():
        return int(parts[1])
    return -1 if "embedding" in parts[0] else 1 << 30
