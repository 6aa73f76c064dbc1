"""Activation recomputation in the backward pass.

:func:`recompute` runs a function and saves its input only. When the backward pass unpacks the first
saved tensor, the function runs again. The tensors it saves are then stored like other activations:
each one is freed when autograd releases it. A backward pass in two halves therefore runs the
function once for both halves.

The second run stops after the last tensor that is needed. A matrix product at the end of a region
is not recomputed, as its gradient does not need its result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_T = TypeVar("_T")


class RecomputeCache:
    """Values that the second run of a function reuses from the first, such as decisions.

    Attributes:
        is_replay: Whether this is the second run, in which counters must not count again.
    """

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._position = 0
        self.is_replay = False

    def once(self, make: Callable[[], _T]) -> _T:
        """Return ``make()``; in the second run, the value of the same call in the first run.

        The value must not depend on tensors that need a gradient.

        Example:
            >>> cache, numbers = RecomputeCache(), iter(range(9))
            >>> first = cache.once(lambda: next(numbers))
            >>> cache.replay()
            >>> first, cache.once(lambda: next(numbers))
            (0, 0)
        """
        if not self.is_replay:
            self._values.append(make())
        value: _T = self._values[self._position]
        self._position += 1
        return value

    def replay(self) -> None:
        """Begin the second run."""
        self.is_replay, self._position = True, 0


def recompute(
    function: Callable[[Tensor], Tensor], x: Tensor, *, cache: RecomputeCache | None = None
) -> Tensor:
    """Compute ``function(x)``, and recompute it in the backward pass.

    Args:
        function: Must compute the same when it runs again, apart from values in ``cache``. Tensors
            other than ``x`` that it uses must be parameters or need no gradient. It may run
            collectives: they run again, up to the last one before the last saved tensor. It must
            not use ``recompute`` itself.
        x: Its input.
        cache: Cache shared with the function, for values that must not be decided or counted twice.

    Returns:
        The result; result and gradients are bitwise equal to those without recomputation.

    Raises:
        RuntimeError: In the backward pass, if the second run saves other tensors than the first.

    Source:
        Chen et al., arXiv:1604.06174.

    Example:
        >>> x, w = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.tensor([0.0, 1.0]))
        >>> recompute(lambda x: (x * w).exp(), x).sum().backward()
        >>> [round(number, 4) for number in w.grad.tolist()]
        [1.0, 2.7183]
    """
    if not torch.is_grad_enabled():
        return function(x)
    region = _Region(function, x, cache)
    with _marked(), saved_tensors_hooks(region.pack, _unpack):
        return function(x)


_IS_RECOMPUTED: ContextVar[bool] = ContextVar("is_recomputed", default=False)


def is_recomputed() -> bool:
    """Return whether the caller runs inside of :func:`recompute`, in the first or second run.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> recompute(lambda x: x * is_recomputed(), x).item(), is_recomputed()
        (1.0, False)
    """
    return _IS_RECOMPUTED.get()


@contextmanager
def _marked() -> Iterator[None]:
    token = _IS_RECOMPUTED.set(True)
    try:
        yield
    finally:
        _IS_RECOMPUTED.reset(token)


class _Kept:
    """Placeholder in the autograd graph for a tensor that the first run did not save."""

    __slots__ = ("__weakref__", "about", "region", "tensor")

    def __init__(self, region: _Region, tensor: Tensor) -> None:
        self.region: _Region | None = region
        self.tensor: Tensor | None = None
        self.about = (tensor.shape, tensor.dtype)

    def fill(self, tensor: Tensor) -> None:
        if (tensor.shape, tensor.dtype) != self.about:
            raise RuntimeError(
                f"a recomputed function kept {list(tensor.shape)} {tensor.dtype} where it kept "
                f"{list(self.about[0])} {self.about[1]} before; it must compute the same both times"
            )
        self.region, self.tensor = None, tensor.detach()


class _Region:
    """One call of a recomputed function, with the placeholders of its saved tensors."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], x: Tensor, cache: RecomputeCache | None
    ) -> None:
        self._function = function
        self._x, self._needs_grad = x.detach(), x.requires_grad
        self._cache = cache
        # Weak references: autograd alone decides the lifetime of a tensor.
        self._kept: list[weakref.ref[_Kept]] = []

    def pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(self, tensor)
        self._kept.append(weakref.ref(kept))
        return kept

    def run_again(self) -> None:
        if self._cache is not None:
            self._cache.replay()
        waiting = iter(self._kept)
        num_left = len(self._kept)

        def fill(tensor: Tensor) -> None:
            nonlocal num_left
            kept = next(waiting)()
            if kept is not None:
                kept.fill(tensor)
            num_left -= 1
            if num_left == 0:
                raise _Done

        x = self._x.detach().requires_grad_(self._needs_grad)
        try:
            with _marked(), torch.enable_grad(), saved_tensors_hooks(fill, _unpack):
                self._function(x)
        except _Done:
            return
        raise RuntimeError(
            f"a recomputed function kept {len(self._kept) - num_left} tensors where it kept "
            f"{len(self._kept)} before; it must compute the same both times"
        )


def _unpack(kept: _Kept) -> Tensor:
    if kept.region is not None:
        kept.region.run_again()
    assert kept.tensor is not None
    return kept.tensor


class _Done(Exception):
    """Stops a second run after its last needed tensor."""
