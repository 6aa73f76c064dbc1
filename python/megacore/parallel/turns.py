"""Two functions that take turns: one computes while what the other has sent is under way.

A function hands its turn over where it would wait, by calling :func:`give_turn`. Which one runs is
decided by the code alone, never by time: ranks that run the same pair of functions start their
collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from threading import Semaphore
from typing import TypeVar

_First = TypeVar("_First")
_Second = TypeVar("_Second")


class Turns:
    """Runs pairs of functions. The second one has a thread of its own, which is kept.

    Example:
        >>> heard = []
        >>> def speaker(name):
        ...     def speak():
        ...         for number in range(2):
        ...             heard.append(f"{name}{number}")
        ...             give_turn()
        ...     return speak
        >>> _ = Turns().run(speaker("a"), speaker("b"))
        >>> heard
        ['a0', 'b0', 'a1', 'b1']
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megacore-turns")

    def run(
        self, first: Callable[[], _First], second: Callable[[], _Second]
    ) -> tuple[_First, _Second]:
        """Run both to their ends, ``first`` before ``second``, and return both results.

        An error in one is raised, and ends the other at its next turn.
        """
        pair = _Pair()
        future = self._threads.submit(pair.run, 1, second)
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
    """Who of two has the turn."""

    def __init__(self) -> None:
        self._turns = (Semaphore(1), Semaphore(0))
        self._ended = [False, False]
        self._failed = False

    def run(self, place: int, function: Callable[[], _First]) -> _First:
        token = _PLACE.set((self, place))
        try:
            self._wait(place)
            return function()
        except BaseException:
            self._failed = True
            raise
        finally:
            _PLACE.reset(token)
            self._ended[place] = True
            self._turns[1 - place].release()

    def give(self, place: int) -> None:
        if not self._ended[1 - place]:
            self._turns[1 - place].release()
            self._wait(place)

    def _wait(self, place: int) -> None:
        self._turns[place].acquire()
        if self._failed:
            raise _AbandonedError


# The pair that the running thread belongs to, and its place there.
_PLACE: ContextVar[tuple[_Pair, int] | None] = ContextVar("place", default=None)


def give_turn() -> None:
    """Let the other function of a pair run until it gives the turn back; nothing without a pair."""
    place = _PLACE.get()
    if place is not None:
        place[0].give(place[1])
