"""A watch over the other ranks: whoever goes away first is named by every survivor.

Each rank runs a daemon thread with its own connection to the store. The thread writes a heartbeat
and watches a few neighbours on a ring of ranks, so the load per rank does not grow with the world.
Three signs say that a rank is lost: its process on this machine has ended; it was silent for too
long; or it reported its own error. The first sign that reaches the store wins (``compare_set``), so
all ranks tell the same story.

A survivor usually learns of the loss by an error of a collective operation;
`FailureMonitor.culprit` then says who caused it. A survivor that stays blocked is ended by the
thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import Literal, NoReturn, TypeVar

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from megacore.errors import ConfigError, PeerLostError
from megacore.launch.context import RankContext
from megacore.launch.peers import Identity, is_dead, local_state

T = TypeVar("T")

NUM_WATCHED = 8  # ranks that each rank watches
STORE_HOST = -1  # the "rank" of a lost store
GRACE_S = 2.0  # time for a blocked main thread to end by itself
FAILURE_KEY = "health/failure"
STOPPED = "it was stopped by a signal"
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first loss of a run: who, and why."""

    rank: int
    who: str
    reason: str

    def __str__(self) -> str:
        return f"{self.who} went away: {self.reason}"

    def to_error(self) -> PeerLostError:
        """The error that survivors end with."""
        return PeerLostError(str(self))


def record_failure(store: Store, failure: Failure) -> Failure:
    """Put ``failure`` into the store unless there is one already; returns the one that counts."""
    text = json.dumps(asdict(failure))
    return Failure(**json.loads(store.compare_set(FAILURE_KEY, "", text)))


class FailureMonitor:
    """Heartbeat and watch of one rank. Use it through `failure_monitor`.

    Args:
        context: The rank.
        peer_timeout_s: Seconds of silence after which a rank counts as lost.
        on_end: Called from the thread just before it ends the process, with the sentence to show
            (empty if there is nothing to say) and the exit code.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        peer_timeout_s: float,
        on_end: Callable[[str, int], None],
    ) -> None:
        self._context = context
        self._peer_timeout_s = peer_timeout_s
        self._interval_s = min(2.0, peer_timeout_s / 4)
        self._on_end = on_end
        self._lock = threading.Lock()  # one request at a time on the connection
        self._store = self._connect(timeout_s=30.0)
        self._identity = Identity.mine(context.rank)
        self._known: dict[int, Identity] = {}
        self._finished: set[int] = set()
        self._beats: dict[int, tuple[bytes, float]] = {}  # rank -> last beat, when it changed
        self._cpu_ticks: dict[int, int] = {}
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megacore-monitor", daemon=True)

    # ---- main thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Announce this rank and begin to watch."""
        self._ask(lambda store: store.set(self._key("who"), self._identity.to_json()))
        self._beat(0)
        self._thread.start()

    def announce_end(self, how: Literal["done", "stopped"]) -> None:
        """Tell the others why this rank will fall silent: work done, or stopped by a signal."""
        with contextlib.suppress(RuntimeError):
            self._ask(lambda store: store.set(self._key("end"), how))

    def stop(self) -> None:
        """End the watch."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")
        self._thread.join(timeout=self._peer_timeout_s)
        self._wake_receiver.close()
        self._wake_sender.close()

    def report(self, reason: str) -> Failure:
        """Record that this rank itself fails; returns the first failure of the run."""
        mine = Failure(rank=self._context.rank, who=str(self._identity), reason=reason)
        try:
            return self._ask(lambda store: record_failure(store, mine))
        except RuntimeError:
            return mine

    def culprit(self, *, patience_s: float, blame_stopped: bool = True) -> Failure | None:
        """Who went away first, as soon as it is known; ``None`` if nobody did for ``patience_s``.

        A survivor calls this when a collective operation failed.

        Args:
            patience_s: How long to wait for an answer, seconds.
            blame_stopped: Whether a rank that ended because of a signal counts. It does not for one
                that was asked to end itself: somebody is stopping the whole run.
        """
        start = time.monotonic()
        # A launcher of ours sees the death of its child and knows the signal: let it speak first.
        look_after = start + (1.0 if self._context.launched_by == "megacore" else 0.0)
        while True:
            try:
                found = self._recorded()
                if found is None and time.monotonic() >= look_after:
                    found = self._find_dead(self._local_ranks(), blame_stopped=blame_stopped)
            except RuntimeError as error:
                return self._store_lost(error)
            if found is not None or time.monotonic() > start + patience_s:
                return found
            time.sleep(0.1)

    @property
    def wake_fd(self) -> int:
        """File descriptor for `signal.set_wakeup_fd`: a signal wakes the thread at once."""
        return self._wake_sender.fileno()

    # ---- thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        for count in itertools.count(1):
            signal_number = self._sleep(self._interval_s)
            if self._stopped.is_set():
                return
            if signal_number:
                self._end(None, 128 + signal_number)
            now = time.monotonic()
            if now - last > self._interval_s + self._peer_timeout_s / 2:
                self._forgive(now)  # We were suspended ourselves: silence of others proves nothing.
            last = now
            try:
                self._beat(count)
                failure = self._recorded() or self._find_dead(self._watched())
                failure = failure or self._find_silent(now)
            except RuntimeError as error:
                failure = self._store_lost(error)
            if failure is not None:
                self._end(failure, 1)

    def _sleep(self, seconds: float) -> int:
        """Wait; returns early, with the number of a signal that asks to end, or 0."""
        ready, _, _ = select.select([self._wake_receiver], [], [], seconds)
        received = self._wake_receiver.recv(64) if ready else b""
        return next((number for number in received if number in ENDING_SIGNALS), 0)

    def _end(self, failure: Failure | None, exit_code: int) -> None:
        """Let the main thread end by itself for a while, then end the process."""
        if self._stopped.wait(GRACE_S):
            return
        failure = failure or self.culprit(patience_s=0.0)
        self._on_end(str(failure) if failure else "", 1 if failure else exit_code)
        os._exit(1 if failure else exit_code)

    def _beat(self, count: int) -> None:
        self._ask(lambda store: store.set(self._key("beat"), str(count)))

    def _find_silent(self, now: float) -> Failure | None:
        for rank in self._watched():
            beat = self._get(f"health/beat/{rank}")
            if beat is None or rank in self._finished:
                continue
            last, since = self._beats.get(rank, (None, now))
            if beat != last:
                self._beats[rank] = (beat, now)
            elif now - since > self._peer_timeout_s and not self._is_busy(rank):
                reason = self._reason(rank, self._silence(rank, now - since))
                if reason is not None:
                    return self._record(rank, reason)
        return None

    def _find_dead(self, ranks: list[int], *, blame_stopped: bool = True) -> Failure | None:
        for rank in ranks:
            identity = self._who(rank)
            if identity is None or rank in self._finished or not is_dead(identity):
                continue
            reason = self._reason(rank, "its process has ended")
            if reason is not None and (blame_stopped or reason != STOPPED):
                return self._record(rank, reason)
        return None

    def _reason(self, rank: int, otherwise: str) -> str | None:
        """Why a rank is gone; ``None`` if its work was done."""
        end = self._get(f"health/end/{rank}")
        if end == b"done":
            self._finished.add(rank)
            return None
        return STOPPED if end == b"stopped" else otherwise

    def _silence(self, rank: int, seconds: float) -> str:
        identity = self._who(rank)
        state = local_state(identity) if identity else None
        stopped = "; its process is stopped" if state is not None and state.code in "Tt" else ""
        return f"silent for {seconds:.1f} s{stopped}"

    def _is_busy(self, rank: int) -> bool:
        """Whether a silent rank of this machine computes: native code can hold up its thread."""
        identity = self._who(rank)
        state = local_state(identity) if identity else None
        if state is None:
            return False
        before = self._cpu_ticks.get(rank)
        self._cpu_ticks[rank] = state.cpu_ticks
        return before is None or state.cpu_ticks > before

    def _forgive(self, now: float) -> None:
        self._beats = {rank: (beat, now) for rank, (beat, _) in self._beats.items()}

    # ---- store ---------------------------------------------------------------------------------

    def _recorded(self) -> Failure | None:
        text = self._get(FAILURE_KEY)
        return Failure(**json.loads(text)) if text is not None else None

    def _record(self, rank: int, reason: str) -> Failure:
        failure = Failure(rank=rank, who=str(self._who(rank) or f"rank {rank}"), reason=reason)
        return self._ask(lambda store: record_failure(store, failure))

    def _store_lost(self, error: RuntimeError) -> Failure:
        address = self._context.address
        return Failure(
            rank=STORE_HOST,
            who=f"the launcher that holds the store at {address.host}:{address.port}",
            reason=f"no answer ({type(error).__name__})",
        )

    def _who(self, rank: int) -> Identity | None:
        if rank not in self._known:
            text = self._get(f"health/who/{rank}")
            if text is None:
                return None
            self._known[rank] = Identity.from_json(text.decode())
        return self._known[rank]

    def _watched(self) -> list[int]:
        world = self._context.world_size
        count = min(NUM_WATCHED, world - 1)
        return [(self._context.rank + offset) % world for offset in range(1, count + 1)]

    def _local_ranks(self) -> list[int]:
        first = self._context.rank - self._context.local_rank
        last = min(first + self._context.local_world_size, self._context.world_size)
        ranks = {*range(first, last), *self._watched()}
        return sorted(ranks - {self._context.rank})

    def _key(self, kind: str) -> str:
        return f"health/{kind}/{self._context.rank}"

    def _get(self, key: str) -> bytes | None:
        return self._ask(lambda store: store.get(key) if store.check([key]) else None)

    def _ask(self, request: Callable[[Store], T]) -> T:
        """One request to the store; a broken connection is replaced once.

        A request that timed out may only mean that this process was suspended, and its connection
        cannot be used again, since the late answer would be taken for the next one.
        """
        with self._lock:
            try:
                return request(self._store)
            except DistError:
                self._store = self._connect(timeout_s=2.0)
                return request(self._store)

    def _connect(self, *, timeout_s: float) -> Store:
        try:
            store = self._context.address.connect(timeout_s=timeout_s)
        except ConfigError as error:
            raise RuntimeError(str(error)) from error
        prefixed = PrefixStore(self._context.address.prefix, store)
        prefixed.set_timeout(timedelta(seconds=max(5.0, self._peer_timeout_s)))
        return prefixed


@contextlib.contextmanager
def failure_monitor(
    context: RankContext, *, peer_timeout_s: float, on_end: Callable[[str, int], None]
) -> Iterator[FailureMonitor]:
    """Watch the other ranks while the block runs.

    In the main thread, SIGTERM and SIGINT also wake the watch: the main thread gets `SystemExit` or
    `KeyboardInterrupt`, and if it stays blocked in a collective operation, the process is ended.
    """
    monitor = FailureMonitor(context, peer_timeout_s=peer_timeout_s, on_end=on_end)
    monitor.start()
    try:
        with _signals_to(monitor):
            yield monitor
    finally:
        monitor.stop()


@contextlib.contextmanager
def _signals_to(monitor: FailureMonitor) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handler = signal.signal(signal.SIGTERM, _terminate)
    old_fd = signal.set_wakeup_fd(monitor.wake_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        signal.signal(signal.SIGTERM, old_handler or signal.SIG_DFL)


def _terminate(signal_number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal_number, signal.SIG_IGN)
    raise SystemExit(128 + signal_number)
