"""Requests to stop a run after its current step, made by a signal to one of its processes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

# SIGUSR1 is what job schedulers are usually configured to send some minutes before the time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# Exit code of a run that stopped early on request and has saved its state: EX_TEMPFAIL of
# sysexits.h, which means that the command should be tried again.
STOPPED_EARLY = 75


class StopRequest:
    """State of the signals that one rank has received.

    Outside of `deferred`, a signal ends the rank at once: the main thread gets `SystemExit`.

    Args:
        ignores_interrupt: Ignore SIGINT outside of `deferred`, because the launcher, which the
            terminal interrupts as well, handles it.

    Attributes:
        signal: Number of the first signal inside `deferred`; 0 without one.
    """

    def __init__(self, *, ignores_interrupt: bool = False) -> None:
        self.signal = 0
        self._ignores_interrupt = ignores_interrupt
        self._is_deferred = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Context in which signals only set `signal`, so that the current step can be finished."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def ends_now(self, number: int) -> bool:
        """Check if a signal ends the rank at once."""
        if self._is_deferred or number not in STOP_SIGNALS:
            return False
        return not (number == signal.SIGINT and self._ignores_interrupt)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal, as a handler for `signal.signal`."""
        if self._is_deferred:
            self.signal = self.signal or number
        elif self.ends_now(number):
            for each in STOP_SIGNALS:
                signal.signal(each, signal.SIG_IGN)
            raise SystemExit(128 + number)


@contextlib.contextmanager
def stop_signals_to(
    handler: Callable[[int, FrameType | None], object], wake_fd: int
) -> Iterator[None]:
    """Context in which the stop signals call a handler and wake a file descriptor.

    Only the main thread can set signal handlers; elsewhere signals keep their usual effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    old_fd = signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, old in old_handlers.items():
            signal.signal(number, old or signal.SIG_DFL)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Context in which the stop signals wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
