"""Reduction of gradients that starts during the backward pass."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megacore._core import BucketTracker
from megacore.buffers.param_grad_buffer import ParamGradBuffer
from megacore.parallel.async_collectives import PendingCollective
from megacore.parallel.param_info import ParamInfo

# Limit in finish(), where no compute is left to overlap with, so that few transfers in flight hold
# their staging memory.
_MAX_IN_FLIGHT = 2


class GradReducer:
    """Starts the reduce-scatter of each bucket as soon as its gradients are complete.

    A gradient is complete when its parameter has received as many gradients in the last backward
    passes of its model chunks as in an earlier step, so the first step overlaps nothing. All ranks
    launch all buckets in one order, that of the backward pass, regardless of the order of
    gradients (see ``cpp/include/megacore/buffer/bucket_tracker.h``). No call between
    :meth:`start` and :meth:`finish` waits for another rank.

    Calls of a step: :meth:`start`, before each backward pass :meth:`before_backward`,
    :meth:`finish`.

    Attributes:
        polls_transfers: Whether to poll transfers, to free their memory early. Must be off in a
            CUDA graph capture, which must not depend on the progress of transfers.

    Args:
        buffers: The buffers of all parameters of this rank.
        waits: Returns whether a parameter needs another sum before its bucket may be reduced. Such
            buckets launch in :meth:`finish`.
    """

    def __init__(
        self, buffers: Sequence[ParamGradBuffer], *, waits: Callable[[ParamInfo], bool]
    ) -> None:
        self._buffers = tuple(buffers)
        self._buckets = buckets_in_backward_order(buffers)
        self._infos: list[ParamInfo] = []
        offsets: dict[int, int] = {}
        for buffer in buffers:
            offset = offsets[id(buffer)] = len(self._infos)
            self._infos += [info for info, _ in buffer.params]
            buffer.on_grad(forward_grads(self, offset))
        members = [
            [offsets[id(buffer)] + index for index in buffer.plan.buckets[bucket].param_indices]
            for buffer, bucket in self._buckets
        ]
        flags = [any(waits(self._infos[param]) for param in bucket) for bucket in members]
        self._tracker = BucketTracker(members, flags)
        # The launch order of every rank, regardless of the order of completion.
        self._order = sorted(range(len(flags)), key=lambda bucket: flags[bucket])
        self._counting = self._is_open = False
        self._launched: set[int] = set()
        self._pending: deque[tuple[int, PendingCollective]] = deque()
        self.polls_transfers = True
        self._transferred: list[int] = []

    def start(self) -> None:
        """Start a step.

        If the previous step was not finished after its last backward passes, because it is
        repeated, its transfers are completed and dropped: ranks may have started different numbers
        of them.
        """
        if self._is_open:
            self._reduce(bucket for bucket in self._order if bucket not in self._launched)
        self._transferred.clear()
        self._launched.clear()
        for buffer in self._buffers:
            buffer.wait_until_grads_free()
        self._tracker.start()
        self._counting = self._is_open = False

    def before_backward(self, *, is_last: bool) -> None:
        """Announce a backward pass; ``is_last`` of its model chunk in this step."""
        self._counting = is_last
        self._is_open = self._is_open or is_last

    def finish(self) -> None:
        """Reduce the remaining buckets and make all reduced gradients valid. Collective.

        Sync:
            Waits for the transfers on gloo; on NCCL only the stream waits.
        """
        self._reduce(self._tracker.finish())
        for bucket in self._transferred:
            buffer, index = self._buckets[bucket]
            buffer.finish_reduce(index)
        for buffer in self._buffers:
            buffer.wait_until_grads_free()
        self._transferred.clear()
        self._counting = self._is_open = False

    def forget(self) -> None:
        """Discard the transfers in flight; continue with :meth:`start`."""
        self._pending.clear()
        self._counting = self._is_open = False

    def _on_grad(self, param: int) -> None:
        """Record a gradient that was just added to the buffer, and launch complete buckets."""
        if self._tracker.is_launched(param):
            raise RuntimeError(
                f"{self._infos[param].name} receives a gradient after its bucket was reduced: it "
                f"has had {self._tracker.count(param)} in this step, as in steps before; call "
                'zero_grads() before a new step, or set overlap to "params" or "none" if '
                "the model changes from step to step"
            )
        if self._counting:
            for bucket in self._tracker.mark(param):
                self._launch(bucket)

    def _reduce(self, buckets: Iterable[int]) -> None:
        """Launch the remaining buckets and wait for all transfers."""
        for bucket in buckets:
            self._launch(bucket)
            while len(self._pending) > _MAX_IN_FLIGHT and self._pending[0][1].staging_bytes > 0:
                self._complete_oldest()
        while self._pending:
            self._complete_oldest()

    def _launch(self, bucket: int) -> None:
        buffer, index = self._buckets[bucket]
        self._launched.add(bucket)
        self._pending.append((bucket, buffer.start_reduce(index)))
        # Adding arrived slices frees their staging memory; transfers in flight are only polled.
        while self.polls_transfers and self._pending and self._pending[0][1].is_transferred():
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        bucket, pending = self._pending.popleft()
        pending.wait()
        self._transferred.append(bucket)


def buckets_in_backward_order(
    buffers: Sequence[ParamGradBuffer],
) -> list[tuple[ParamGradBuffer, int]]:
    """Return all buckets in the order of completion in a backward pass, equal on every rank.

    A bucket is complete with the parameter that was registered first. The forward pass needs the
    buckets in the opposite order.
    """
    keyed = [
        (-min(buffer.positions[i] for i in bucket.param_indices), number, index)
        for number, buffer in enumerate(buffers)
        for index, bucket in enumerate(buffer.plan.buckets)
    ]
    return [(buffers[number], index) for _, number, index in sorted(keyed)]


def forward_grads(receiver: Any, offset: int) -> Callable[[int], None]:
    """Return a callback that calls ``receiver._on_grad`` with its index + ``offset``.

    The reference is weak: a strong one would make a cycle of parameters and buffers.
    """
    reference = weakref.ref(receiver)

    def on_grad(index: int) -> None:
        target = reference()
        if target is not None:
            target._on_grad(offset + index)

    return on_grad
