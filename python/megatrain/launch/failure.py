"""Health monitoring of ranks: every survivor reports the rank that failed first.

Each rank runs a daemon thread with its own connection to the store. The thread writes a heartbeat
and polls a few neighbours on a ring of the ranks that have arrived, in the order of their arrival,
so a rank is monitored while others are still missing. It sends two requests per interval, which
grows with the world (`watch_times`), so that the store has room for other requests. A rank is lost
if its process on this machine has ended, if its heartbeat has stopped for too long, or if it has
reported its own error. The first failure recorded in the store wins (``compare_set``), so all ranks
report the same failure.

A survivor usually detects the loss through an error of a collective; `FailureMonitor.culprit` then
identifies the rank that caused it. The thread ends a survivor that stays blocked.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megacore.calls.processes import Identity, is_dead, local_state
from megacore.calls.ring import CallRing
from megacore.errors import PeerLostError, printable
from megatrain.launch.context import RankContext
from megatrain.launch.stopping import STOP_SIGNALS, stop_signals_to
from megatrain.launch.store import StoreConnection, first_line

T = TypeVar("T")

NUM_WATCHED = 8  # ranks that each rank watches
# Requests of all monitors together; a store answers some 36,000 in a second.
REQUESTS_PER_S = 5_000
REQUESTS_PER_INTERVAL = 2
STORE_HOST = -1  # the "rank" of a lost store
GRACE_S = 2.0  # time for a blocked main thread to exit on its own
FAILURE_KEY = "health/failure"
ARRIVED_KEY = "health/arrived"
STOPPED = "it was stopped by a signal"
NETWORK_ADVICE = "; its host may be down, or the network between the hosts may have failed"


@dataclass(frozen=True, kw_only=True)
class WatchTimes:
    """Times of a monitor, seconds.

    Attributes:
        interval_s: From one look at the other ranks to the next.
        timeout_s: Silence after which a rank counts as lost.
    """

    interval_s: float
    timeout_s: float


def watch_times(world_size: int, *, peer_timeout_s: float) -> WatchTimes:
    """Compute the times of monitors that send at most `REQUESTS_PER_S` requests together.

    Example:
        >>> watch_times(64, peer_timeout_s=20.0)
        WatchTimes(interval_s=2.0, timeout_s=20.0)
        >>> watch_times(100_000, peer_timeout_s=20.0)
        WatchTimes(interval_s=40.0, timeout_s=120.0)
    """
    least = world_size * REQUESTS_PER_INTERVAL / REQUESTS_PER_S
    interval_s = max(min(2.0, peer_timeout_s / 4), least)
    return WatchTimes(interval_s=interval_s, timeout_s=max(peer_timeout_s, 3 * interval_s))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """First loss of a rank in a run, with its reason.

    Attributes:
        rank: Global rank.
        who: Rank, process and host, for messages.
        reason: Why it was lost.
        is_mistake: Whether the reason is a user error, which that rank prints itself.
    """

    rank: int
    who: str
    reason: str
    is_mistake: bool = False

    def __str__(self) -> str:
        return f"{self.who} went away: {self.reason}"

    @staticmethod
    def from_json(text: str | bytes) -> Failure:
        """Parse a record of the store, which other processes of the network may have written.

        Raises:
            RuntimeError: If it is not the record of a failure.
        """
        try:
            data = json.loads(text)
            who, reason = (
                printable(str(data[key])).replace("\n", " ") for key in ("who", "reason")
            )
            is_mistake = data.get("is_mistake") is True
            return Failure(rank=int(data["rank"]), who=who, reason=reason, is_mistake=is_mistake)
        except (ValueError, TypeError, KeyError) as error:
            raise RuntimeError(f"invalid record of a failure in the store ({error!r})") from error


def record_failure(store: Store, failure: Failure) -> Failure:
    """Store ``failure`` unless a failure is already stored; returns the stored failure."""
    text = json.dumps(asdict(failure))
    return Failure.from_json(store.compare_set(FAILURE_KEY, "", text))


class FailureMonitor:
    """Heartbeat and peer monitoring of one rank. Use it through `failure_monitor`.

    Args:
        context: The rank.
        peer_timeout_s: Seconds without heartbeat after which a rank counts as lost, at least; see
            `watch_times`.
        on_end: Called from the thread just before it ends the process, with the message to show
            (may be empty) and the exit code.

    Attributes:
        calls: Ring in which the position of the main thread is noted, once it exists.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        peer_timeout_s: float,
        on_end: Callable[[str, int], None],
    ) -> None:
        self.calls: CallRing | None = None
        self._context = context
        self._peer_timeout_s = peer_timeout_s
        self._times = watch_times(context.world_size, peer_timeout_s=peer_timeout_s)
        self._on_end = on_end
        self._store = StoreConnection(self._connect, deadline_s=max(5.0, peer_timeout_s))
        self._identity = Identity.mine(context.rank)
        self._known: dict[int, Identity] = {}
        self._number = 0  # in the order of arrival
        self._num_arrived = 1
        self._arrivals: dict[int, int] = {}  # number -> rank
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
        """Publish this rank's identity and start monitoring.

        Raises:
            PeerLostError: If the store does not answer.
        """
        rank = self._context.rank
        try:
            self._ask(lambda store: store.set(self._key("who"), self._identity.to_json()))
            # From now on there is a record, so one request reads it together with heartbeats.
            self._ask(lambda store: store.compare_set(FAILURE_KEY, "", ""))
            self._beat(0)
            # Sent twice, it would count a rank that never comes.
            arrive = self._store.ask(lambda store: store.add(ARRIVED_KEY, 1), repeat=False)
            self._number = arrive - 1
            self._ask(lambda store: store.set(f"health/arrival/{self._number}", str(rank)))
        except RuntimeError as error:
            raise PeerLostError(str(self._store_lost(error))) from error
        self._thread.start()

    def wait_for_all(self, *, timeout_s: float) -> None:
        """Wait until all ranks of the world have arrived; those that have are monitored.

        Raises:
            PeerLostError: If some have not started within ``timeout_s``.
        """
        world = self._context.world_size
        deadline = time.monotonic() + timeout_s
        pause_s, longest_s = 0.01, max(1.0, world / REQUESTS_PER_S)
        while self._ask(lambda store: store.add(ARRIVED_KEY, 0)) < world:
            if time.monotonic() > deadline:
                raise PeerLostError(self._late(world, timeout_s))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        self._learn(self._watched())  # for messages when the store cannot be asked any more

    def _late(self, world: int, timeout_s: float) -> str:
        if self._number > 0:  # the rank that arrived first asks for all
            missing = world - self._ask(lambda store: store.add(ARRIVED_KEY, 0))
            first = self._get("health/arrival/0")
            shown = "the first rank" if first is None else f"rank {first.decode()}"
            shown += " names them"
        else:
            late = [rank for rank in range(world) if self._who(rank) is None]
            missing = len(late)
            shown = ", ".join(map(str, late[:8])) + (", ..." if late[8:] else "")
        return (
            f"{missing} of {world} ranks did not start within {timeout_s:g} s "
            f"(run.timeout_s): {shown}{NETWORK_ADVICE}"
        )

    def announce_end(self, how: Literal["done", "stopped"]) -> None:
        """Publish why this rank's heartbeat will stop: work done, or stopped by a signal."""
        with contextlib.suppress(RuntimeError):
            self._ask(lambda store: store.set(self._key("end"), how))

    def stop(self) -> None:
        """Stop monitoring."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")
        self._thread.join(timeout=self._peer_timeout_s)
        self._store.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def report(self, reason: str, *, is_mistake: bool = False) -> Failure:
        """Record that this rank itself fails; returns the first failure of the run."""
        mine = Failure(
            rank=self._context.rank,
            who=str(self._identity),
            reason=reason,
            is_mistake=is_mistake,
        )
        try:
            return self._ask(lambda store: record_failure(store, mine))
        except RuntimeError:
            return mine

    def culprit(self, *, patience_s: float, blame_stopped: bool = True) -> Failure | None:
        """Find the rank that failed first; ``None`` if no failure is found within ``patience_s``.

        A survivor calls this when a collective operation failed.

        Args:
            patience_s: Time to wait for a failure, seconds.
            blame_stopped: Whether a rank that ended because of a signal counts. Not set by a rank
                that itself received a signal, because the whole run is then being stopped.
        """
        start = time.monotonic()
        # The megacore launcher knows the exit signal of a dead child, so its record is preferred.
        pause_s = max(0.1, self._context.world_size / REQUESTS_PER_S)
        look_after = start + (1.0 if self._context.launched_by == "megacore" else 0.0)
        while True:
            try:
                found = self._recorded()
                if found is None and time.monotonic() >= look_after:
                    ranks = {*self._context.local_ranks, *self._watched()} - {self._context.rank}
                    found = self._find_dead(sorted(ranks), blame_stopped=blame_stopped)
            except RuntimeError as error:
                return self._store_lost(error)
            if found is not None or time.monotonic() > start + patience_s:
                return found
            time.sleep(min(pause_s, max(0.1, start + patience_s - time.monotonic())))

    @property
    def wake_fd(self) -> int:
        """File descriptor for `signal.set_wakeup_fd`, through which signals wake the thread."""
        return self._wake_sender.fileno()

    # ---- thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        for count in itertools.count(1):
            signal_number = self._sleep(self._times.interval_s)
            if self._stopped.is_set():
                return
            if signal_number and self._context.stop.ends_now(signal_number):
                self._end(None, 128 + signal_number)
            now = time.monotonic()
            # Heartbeats that were missing while this process was suspended or waited for the store
            # prove nothing: this time does not count, but that before it does.
            self._postpone(now - last - self._times.interval_s)
            last = now
            if self.calls is not None:
                self.calls.note_position()
            try:
                self._beat(count)
                watched = self._watched()
                failure, beats = self._look(watched)
                failure = failure or self._find_dead(watched) or self._find_silent(beats, now)
            except RuntimeError as error:
                failure = self._store_lost(error)
            if failure is not None:
                self._end(failure, 1)

    def _sleep(self, seconds: float) -> int:
        """Wait, interrupted by signals; returns the number of a termination signal, or 0."""
        ready, _, _ = select.select([self._wake_receiver], [], [], seconds)
        received = self._wake_receiver.recv(64) if ready else b""
        return next((number for number in received if number in STOP_SIGNALS), 0)

    def _end(self, failure: Failure | None, exit_code: int) -> None:
        """Give the main thread time to exit on its own, then end the process."""
        if self._stopped.wait(GRACE_S):
            return
        failure = failure or self.culprit(patience_s=0.0)
        self._on_end(str(failure) if failure else "", 1 if failure else exit_code)
        os._exit(1 if failure else exit_code)

    def _beat(self, count: int) -> None:
        self._ask(lambda store: store.set(self._key("beat"), str(count)))

    def _postpone(self, seconds: float) -> None:
        if seconds > 0.0:
            self._beats = {
                rank: (beat, since + seconds) for rank, (beat, since) in self._beats.items()
            }

    def _look(self, watched: list[int]) -> tuple[Failure | None, dict[int, bytes]]:
        """Read the record of a failure and the heartbeats of ranks that have arrived."""
        keys = [FAILURE_KEY, *(f"health/beat/{rank}" for rank in watched)]
        record, *beats = self._ask(lambda store: store.multi_get(keys))
        failure = Failure.from_json(record) if record else None
        return failure, dict(zip(watched, beats, strict=True))

    def _find_silent(self, beats: dict[int, bytes], now: float) -> Failure | None:
        for rank, beat in beats.items():
            if rank in self._finished:
                continue
            last, since = self._beats.get(rank, (None, now))
            if beat != last:
                self._beats[rank] = (beat, now)
            elif now - since > self._times.timeout_s and not self._is_busy(rank):
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
        """Determine the reason for a rank's end; ``None`` if its work was done."""
        end = self._get(f"health/end/{rank}")
        if end == b"done":
            self._finished.add(rank)
            return None
        return STOPPED if end == b"stopped" else otherwise

    def _silence(self, rank: int, seconds: float) -> str:
        identity = self._who(rank)
        state = local_state(identity) if identity else None
        text = f"silent for {seconds:.1f} s"
        if state is not None and state.code in "Tt":
            return f"{text}; its process is stopped"
        if identity is not None and identity.space != self._identity.space:
            return f"{text}{NETWORK_ADVICE}"
        return text

    def _is_busy(self, rank: int) -> bool:
        """Check if a silent rank of this machine uses CPU; native code can block its heartbeat."""
        identity = self._who(rank)
        state = local_state(identity) if identity else None
        if state is None:
            return False
        before = self._cpu_ticks.get(rank)
        self._cpu_ticks[rank] = state.cpu_ticks
        return before is None or state.cpu_ticks > before

    # ---- store ---------------------------------------------------------------------------------

    def _recorded(self) -> Failure | None:
        return self._look([])[0]

    def _record(self, rank: int, reason: str) -> Failure:
        failure = Failure(rank=rank, who=str(self._who(rank) or f"rank {rank}"), reason=reason)
        return self._ask(lambda store: record_failure(store, failure))

    def _store_lost(self, error: RuntimeError) -> Failure:
        known = [who for _, who in sorted(self._known.items())]
        beyond = [who for who in known if who.space != self._identity.space]  # other machines
        with_it = f"; with it {', '.join(map(str, beyond))}" if beyond else ""
        return Failure(
            rank=STORE_HOST,
            who=str(self._context.address),
            reason=f"no answer ({first_line(error)}){with_it}{NETWORK_ADVICE}",
        )

    def _who(self, rank: int) -> Identity | None:
        self._learn([rank])
        return self._known.get(rank)

    def _learn(self, ranks: Sequence[int]) -> None:
        """Read the identities of ranks, as far as they have published them."""
        unknown = [rank for rank in ranks if rank not in self._known]
        found = self._get_some({rank: f"health/who/{rank}" for rank in unknown})
        self._known |= {rank: Identity.from_json(text.decode()) for rank, text in found.items()}

    def _watched(self) -> list[int]:
        """List the ranks that arrived after this one; the first one follows the last one."""
        if self._num_arrived < self._context.world_size:
            self._num_arrived = self._ask(lambda store: store.add(ARRIVED_KEY, 0))
        offsets = range(1, min(NUM_WATCHED, self._num_arrived - 1) + 1)
        numbers = [(self._number + offset) % self._num_arrived for offset in offsets]
        unknown = [number for number in numbers if number not in self._arrivals]
        found = self._get_some({number: f"health/arrival/{number}" for number in unknown})
        self._arrivals |= {number: int(text) for number, text in found.items()}
        return [self._arrivals[number] for number in numbers if number in self._arrivals]

    def _key(self, kind: str) -> str:
        return f"health/{kind}/{self._context.rank}"

    def _get(self, key: str) -> bytes | None:
        return self._get_some({0: key}).get(0)

    def _get_some(self, keys: Mapping[int, str]) -> dict[int, bytes]:
        """Read those keys that exist; a store would wait for the others."""

        def read(store: Store) -> dict[int, bytes]:
            # Nearly always all exist, or there is one.
            if store.check(list(keys.values())):
                return dict(zip(keys, store.multi_get(list(keys.values())), strict=True))
            if len(keys) == 1:
                return {}
            return {name: store.get(key) for name, key in keys.items() if store.check([key])}

        return self._ask(read) if keys else {}

    def _ask(self, request: Callable[[Store], T]) -> T:
        return self._store.ask(request)

    def _connect(self, timeout_s: float) -> Store:
        prefixed = PrefixStore(
            self._context.address.prefix, self._context.address.connect(timeout_s=timeout_s)
        )
        prefixed.set_timeout(timedelta(seconds=max(5.0, self._peer_timeout_s)))
        return prefixed


@contextlib.contextmanager
def failure_monitor(
    context: RankContext, *, peer_timeout_s: float, on_end: Callable[[str, int], None]
) -> Iterator[FailureMonitor]:
    """Monitor the other ranks while the block runs.

    If called in the main thread, signals to stop go to ``context.stop`` and wake the monitor.
    Unless they are deferred, the main thread gets `SystemExit`, and if it stays blocked in a
    collective operation, the monitor ends the process.
    """
    monitor = FailureMonitor(context, peer_timeout_s=peer_timeout_s, on_end=on_end)
    monitor.start()
    try:
        with stop_signals_to(context.stop.handle, monitor.wake_fd):
            yield monitor
    finally:
        monitor.stop()
