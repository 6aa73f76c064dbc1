"""What a training with graphs shows of itself: numbers, static tensors, poison, transfers.

Tests that compare losses would pass as well if nothing were poisoned, sharded or overlapped. This
reads from the very trainer that gave the losses that it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megacore.buffers.grad_reducer import GradReducer
from megacore.buffers.param_gatherer import ParamGatherer
from megacore.graphs.layer import LayerSite
from megacore.graphs.observe import Recording
from megatrain.models.captured import transformer_layers
from megatrain.train.trainer import Trainer

REDUCED, GATHERED = "reductions in backward passes", "weights awaited in forward passes"


@dataclass(frozen=True, kw_only=True)
class StaticTensors:
    """Static tensors of one rank, each memory counted once.

    Attributes:
        graphs: Recorded graphs.
        inputs: What calls copy their arguments into; for a whole step, the step's inputs.
        output_grads: Gradients given to backward passes.
        results: Results of captured forward passes.
        peak: Microbatches of a chunk that are alive at once; 0 for whole steps.
    """

    graphs: int
    inputs: int
    output_grads: int = 0
    results: int = 0
    peak: int = 0


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank has of a training.

    Attributes:
        numbers: Losses, norms of gradients and losses of validations, by their names.
        static: Its static tensors; ``None`` without graphs.
        num_poisoned: Static tensors that were found poisoned after the last step.
        transfers: What was started and awaited during passes.
    """

    numbers: dict[str, float]
    static: StaticTensors | None = None
    num_poisoned: int = 0
    transfers: Counter[str]

    def difference(self, expected: Trained) -> str:
        """The first number that is not the expected one, to the last bit; empty if there is none.

        What is not a number differs from itself.
        """
        for name, other in expected.numbers.items():
            if (number := self.numbers[name]) != other:
                return f"{name}: {number!r}, without graphs {other!r}"
        assert self.numbers.keys() == expected.numbers.keys()
        return ""


def static_tensors(trainer: Trainer) -> StaticTensors:
    """Count the static tensors of a trainer that has captured."""
    graphs = trainer.graphs
    assert graphs is not None
    if graphs.partial is None:
        full = graphs._full
        return StaticTensors(
            graphs=len(full), inputs=_num_memories(t for g in full.values() for t in g._inputs)
        )
    sites = _sites(trainer)
    return StaticTensors(
        graphs=len({id(graph) for site in sites for graph in site.graphs()}),
        inputs=_num_memories(t for site in sites for t in site.inputs),
        output_grads=_num_memories(t for site in sites for t in site.output_grads),
        results=_num_memories(t for s in sites if s.forward for t in s.forward.results),
        peak=max(graphs.partial.plan.peak_per_chunk, default=0),
    )


def run_steps(trainer: Trainer, steps: int, *, compare_every: int = 1) -> dict[str, float]:
    """The numbers of some steps, and those of a validation in the middle.

    Replays compare their operations with those of the capture, which takes more than half of the
    time: after ten steps only in those that ``compare_every`` divides.
    """
    numbers = {}
    for step in range(steps):
        is_compared = step < 10 or step % compare_every == 0
        with nullcontext() if is_compared else patch.object(Recording, "replay", nullcontext):
            metrics = trainer.train_step(step)
        numbers[f"loss of step {step + 1}"] = metrics.loss
        numbers[f"gradient norm of step {step + 1}"] = metrics.grad_norm
        if step == steps // 2:
            numbers[f"validation after step {step + 1}"] = trainer.mean_validation_loss(
                trainer.evaluate()
            )
    return numbers


def check_poison(trainer: Trainer) -> int:
    """After a training step, all that it has released is poisoned.

    Returns:
        How many tensors; 0 where the settings leave this rank nothing to capture.
    """
    graphs = trainer.graphs
    assert graphs is not None
    if graphs.partial is None:
        training = graphs._full.get("training")
        tensors = [] if training is None else list(training._inputs)
    else:
        released = [tensor for site in _sites(trainer) for tensor in site.static_tensors()]
        tensors = [t for t in released if t is not None and t.is_floating_point()]
    for tensor in tensors:
        if tensor.is_floating_point():
            assert bool(tensor.isnan().all()), "a static tensor was released without poison"
        else:
            assert bool((tensor == torch.iinfo(tensor.dtype).min).all())
    return len(tensors)


def check_sharding(trainer: Trainer) -> None:
    """ZeRO-1 is on: each rank with the same weights updates a part of them."""
    topology, buffers = trainer.groups.topology, trainer.optimizer.buffers
    assert all(buffer.distributed for buffer in buffers)
    assert max(buffer.dp_group.size for buffer in buffers) == topology.dp * topology.cp
    for buffer in buffers:
        owned = sum(piece.numel for piece in buffer.owned_pieces())
        assert owned < buffer.param_data.numel() or buffer.dp_group.size == 1


@contextmanager
def counted_transfers() -> Iterator[Counter[str]]:
    """Count reductions that begin in backward passes, and weights that forward passes wait for."""
    counts: Counter[str] = Counter()
    on_grad, before_forward = GradReducer._on_grad, ParamGatherer.before_forward

    def counted_on_grad(self: GradReducer, param: int) -> None:
        before = len(self._launched)
        on_grad(self, param)
        counts[REDUCED] += len(self._launched) - before

    def counted_before_forward(self: ParamGatherer, params: Any) -> None:
        # Not those that this very call starts: nothing overlaps with them.
        under_way = [self._pending[bucket] for bucket in {self._bucket_of[p] for p in params}]
        counts[GATHERED] += sum(pending is not None for pending in under_way)
        before_forward(self, params)

    with (
        patch.object(GradReducer, "_on_grad", counted_on_grad),
        patch.object(ParamGatherer, "before_forward", counted_before_forward),
    ):
        yield counts


def _sites(trainer: Trainer) -> list[LayerSite]:
    """What lies behind the graphs that the layers call, each once."""
    found = {}
    for chunk in trainer.chunks:
        for layer in transformer_layers(chunk):
            for call in layer.captured.calls.values() if layer.captured is not None else ():
                found[id(call._site)] = call._site
    return list(found.values())


def _num_memories(tensors: Iterable[Tensor | None]) -> int:
    return len({tensor.data_ptr() for tensor in tensors if tensor is not None})
