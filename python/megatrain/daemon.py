"""Work in a daemon thread, with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, action: Callable[[], T]) -> T:
    """Run ``action`` in a thread that is abandoned after ``seconds``.

    Raises:
        TimeoutError: If it did not end.
    """
    try:
        return in_daemon(action, name="megacore-daemon").result(timeout=seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def in_daemon(action: Callable[[], T], *, name: str) -> Future[T]:
    """Run ``action`` in a daemon thread, which does not keep the process from its end."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:  # raised in the thread that waits
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
