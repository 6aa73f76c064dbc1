"""Cooperative scheduling of two functions, and idle work, during waits.

A function calls :func:`yield_turn` where it would wait. This call runs deferred work
(:func:`idle_work`) and then gives the turn to the other function of its pair. The order is
determined by the code, never by time, so ranks that run the same pair of functions start their
collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from threading import Semaphore
from typing import TypeVar

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_First = TypeVar("_First")
_Second = TypeVar("_Second")


class InterleavedPair:
    """Runs pairs of functions. The second one runs on a separate, persistent thread.

    Example:
        >>> heard = []
        >>> def speaker(name):
        ...     def speak():
        ...         for number in range(2):
        ...             heard.append(f"{name}{number}")
        ...             yield_turn()
        ...     return speak
        >>> _ = InterleavedPair().run(speaker("a"), speaker("b"))
        >>> heard
        ['a0', 'b0', 'a1', 'b1']
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megacore-turns")

    def run(
        self, first: Callable[[], _First], second: Callable[[], _Second]
    ) -> tuple[_First, _Second]:
        """Run both to their ends, ``first`` before ``second``, and return both results.

        An error in one function is raised, and ends the other at its next turn.
        """
        pair = _Pair()
        # Context variables and dispatch modes of the caller hold in both threads.
        modes = _get_current_dispatch_mode_stack()

        def second_in_modes() -> _Second:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return second()

        future = self._threads.submit(copy_context().run, pair.run, 1, second_in_modes)
        try:
            result = pair.run(0, first)
        except _AbandonedError:
            future.result()
            raise
        except BaseException:
            future.exception()
            raise
        return result, future.result()


class _AbandonedError(Exception):
    """The other function of the pair has failed."""


class _Pair:
    """Turn state of a pair of functions."""

    def __init__(self) -> None:
        self._turns = (Semaphore(1), Semaphore(0))
        self._ended = [False, False]
        self.num_given = [0, 0]
        self._failed = False

    def run(self, index: int, function: Callable[[], _First]) -> _First:
        token = _TURN.set((self, index))
        try:
            self._wait(index)
            return function()
        except BaseException:
            self._failed = True
            raise
        finally:
            _TURN.reset(token)
            self._ended[index] = True
            self._turns[1 - index].release()

    def give(self, index: int) -> None:
        self.num_given[index] += 1
        if not self._ended[1 - index]:
            self._turns[1 - index].release()
            self._wait(index)

    def _wait(self, index: int) -> None:
        self._turns[index].acquire()
        if self._failed:
            raise _AbandonedError


# The pair of the running thread, and its index in the pair.
_TURN: ContextVar[tuple[_Pair, int] | None] = ContextVar("turn", default=None)


# Deferred work of the running thread.
_IDLE_WORK: ContextVar[Callable[[], None] | None] = ContextVar("idle_work", default=None)


@contextmanager
def idle_work(work: Callable[[], None]) -> Iterator[None]:
    """Call ``work`` wherever the code inside ``with`` would wait.

    Example:
        >>> with idle_work(lambda: print("something else")):
        ...     yield_turn()
        something else
        >>> yield_turn()
    """
    token = _IDLE_WORK.set(work)
    try:
        yield
    finally:
        _IDLE_WORK.reset(token)


def yield_turn() -> None:
    """Run idle work, then the other function of the pair until it gives the turn back."""
    work = _IDLE_WORK.get()
    if work is not None:
        work()
    turn = _TURN.get()
    if turn is not None:
        turn[0].give(turn[1])


def turn_index() -> int:
    """Return the index of the running function in its pair, 0 or 1; 0 without a pair.

    State that lives across turns and must not be shared is selected by this index.

    Example:
        >>> InterleavedPair().run(turn_index, turn_index), turn_index()
        ((0, 1), 0)
    """
    turn = _TURN.get()
    return 0 if turn is None else turn[1]


def num_turns_given() -> int:
    """Return the number of turns given by the running function of a pair; 0 without a pair.

    A changed number shows that the other function has run since some start.
    """
    turn = _TURN.get()
    return 0 if turn is None else turn[0].num_given[turn[1]]
