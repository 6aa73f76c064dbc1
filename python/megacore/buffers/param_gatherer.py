"""Gather of updated parameters, overlapped with the forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import nn

from megacore.buffers.grad_reducer import buckets_in_backward_order, forward_grads
from megacore.buffers.param_grad_buffer import ParamGradBuffer
from megacore.errors import MegacoreError
from megacore.parallel.async_collectives import PendingCollective
from megacore.parallel.params import before_use


class StaleWeightsError(MegacoreError, RuntimeError):
    """A forward pass used weights before the updates of other ranks had arrived."""


class ParamGatherer:
    """Gathers the buckets of updated parameters one ahead of the forward pass.

    Before a module computes with its own parameters, a forward pre-hook waits for their buckets and
    starts the gather of the next one. All ranks start all gathers in the order of the forward pass.

    Every update starts a new *generation* of weights. Each bucket has the generation that it holds,
    and each parameter that of the last call of its module. If a gradient arrives for a parameter
    whose module was not called since the update, some code read its weights without waiting: a
    :class:`StaleWeightsError` names the parameter.

    Args:
        buffers: The buffers of all parameters of this rank.
        modules: The model; must contain every parameter.

    Raises:
        ValueError: If a parameter is in none of the modules.
    """

    def __init__(self, buffers: Sequence[ParamGradBuffer], modules: Sequence[nn.Module]) -> None:
        self._buckets = buckets_in_backward_order(buffers)[::-1]
        self._generation = 0
        self._held = [0] * len(self._buckets)
        self._pending: list[PendingCollective | None] = [None] * len(self._buckets)
        self._num_started = len(self._buckets)
        self._names: list[str] = []
        self._bucket_of: list[int] = []
        params: dict[int, int] = {}
        places = {(id(buffer), index): at for at, (buffer, index) in enumerate(self._buckets)}
        for buffer in buffers:
            offset = len(self._names)
            self._names += [info.name for info, _ in buffer.params]
            self._bucket_of += [0] * len(buffer.params)
            for bucket_index, bucket in enumerate(buffer.plan.buckets):
                for index in bucket.param_indices:
                    self._bucket_of[offset + index] = places[id(buffer), bucket_index]
            for index, (_, param) in enumerate(buffer.params):
                params[id(param)] = offset + index
            buffer.on_grad(forward_grads(self, offset))
        self._called = [0] * len(self._names)
        self._hook(modules, params)

    def start(self, *, at_once: bool = True) -> None:
        """Start the gather of parameters that an optimizer has just updated. Collective.

        Args:
            at_once: Start the first transfers now instead of in the next forward pass. Must be off
                for a CUDA graph, which can only wait for transfers that it started.
        """
        self.finish()
        self._generation += 1
        self._num_started = 0
        if not at_once:
            return
        starts_are_free = all(buffer.starts_are_free for buffer, _ in self._buckets)
        self._start_until(len(self._buckets) if starts_are_free else 1)

    def finish(self) -> None:
        """Gather all remaining buckets, so that every weight is current. Collective."""
        self._start_until(len(self._buckets))
        for bucket in range(len(self._buckets)):
            self._wait(bucket)
        for buffer, _ in self._buckets:
            buffer.wait_until_params_free()
        self._called = [self._generation] * len(self._called)

    @property
    def is_finished(self) -> bool:
        """True if every weight is current."""
        return self._num_started == len(self._buckets) and not any(self._pending)

    def restart(self) -> None:
        """Gather all weights in the next passes, including current ones, as a CUDA graph must.

        No transfer may be in flight.
        """
        self._num_started = 0
        self._held = [-1] * len(self._held)
        self._called = [-1] * len(self._called)

    def forget(self) -> None:
        """Discard the transfers in flight, as if no gather of the last update had started."""
        self._pending = [None] * len(self._buckets)
        self.restart()

    def note_replay(self, *, updated: bool) -> None:
        """Update the generations after a replayed CUDA graph, which ran no Python code.

        Args:
            updated: Whether the graph updated the weights after gathering them.
        """
        self._generation += updated
        self._num_started = 0 if updated else len(self._buckets)
        if not updated:
            self._held = [self._generation] * len(self._held)
            self._called = [self._generation] * len(self._called)

    def before_forward(self, params: Sequence[int]) -> None:
        """Make the weights of these parameters current and start the next bucket."""
        buckets = sorted({self._bucket_of[param] for param in params})
        self._start_until(buckets[-1] + 2)
        for bucket in buckets:
            self._wait(bucket)
        for param in params:
            self._called[param] = self._generation
            held = self._held[self._bucket_of[param]]
            if held != self._generation:
                raise StaleWeightsError(
                    f"{self._names[param]} holds the weights of update {held}, but this forward "
                    f"pass needs those of update {self._generation}: an earlier gather failed"
                )

    def _start_until(self, end: int) -> None:
        while self._num_started < min(end, len(self._buckets)):
            buffer, index = self._buckets[self._num_started]
            self._pending[self._num_started] = buffer.start_gather(index)
            self._num_started += 1

    def _wait(self, bucket: int) -> None:
        pending = self._pending[bucket]
        if pending is not None:
            pending.wait()
            self._pending[bucket] = None
            self._held[bucket] = self._generation

    def _on_grad(self, param: int) -> None:
        called = self._called[param]
        if called != self._generation:
            raise StaleWeightsError(
                f"{self._names[param]} has a gradient of a forward pass with stale weights: the "
                f"module that owns it was last called with the weights of update {called}, and "
                f"update {self._generation} has happened since; call the owning module itself "
                "(only then are its weights waited for), or set overlap to "
                '"grads" or "none"'
            )

    def _hook(self, modules: Sequence[nn.Module], params: dict[int, int]) -> None:
        owned: set[int] = set()
        seen: set[int] = set()
        for module in (part for whole in modules for part in whole.modules()):
            mine = [params[id(p)] for p in module.parameters(recurse=False) if id(p) in params]
            if not mine or id(module) in seen:
                continue
            seen.add(id(module))
            owned.update(mine)
            before_use(module, _before(weakref.ref(self), mine))
        for param, name in enumerate(self._names):
            if param not in owned:
                raise ValueError(
                    f"{name} belongs to no module of the model, so nothing tells when its weights "
                    "are needed; give the optimizer all modules, or set overlap to "
                    '"grads" or "none"'
                )


def _before(gatherer: weakref.ref[ParamGatherer], params: list[int]) -> Callable[[], None]:
    def before_forward() -> None:
        target = gatherer()
        if target is not None:
            target.before_forward(params)

    return before_forward
