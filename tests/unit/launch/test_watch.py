"""What monitors of large worlds ask of the store, and when they find a silent rank."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from megacore.calls.processes import Identity
from megatrain.launch import failure
from megatrain.launch.failure import NUM_WATCHED, Failure, FailureMonitor, watch_times
from tests.support.configs import rank_context


class SlowStore:
    """A store in memory that counts requests and answers each after a while."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.latency_s = latency_s
        self._lock = threading.Lock()

    def _count(self, name: str) -> None:
        time.sleep(self.latency_s)
        self.requests[name] += 1

    def set(self, key: str, value: str) -> None:
        self._count("set")
        self.values[key] = value.encode()

    def check(self, keys: Sequence[str]) -> bool:
        self._count("check")
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self._count("get")
        return self.values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._count("multi_get")
        return [self.values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        self._count("add")
        with self._lock:
            value = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(value).encode()
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count("compare_set")
        with self._lock:
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = desired.encode()
            return self.values[key]


class Watched(FailureMonitor):
    """Rank 0 of a world whose other ranks, on other machines, have arrived."""

    def __init__(self, store: SlowStore, world_size: int, *, peer_timeout_s: float) -> None:
        self.found: list[str] = []
        self.ended = threading.Event()
        self._the_store = store
        context = rank_context(0, world_size)
        super().__init__(context, peer_timeout_s=peer_timeout_s, on_end=lambda *_: None)

    def _connect(self, timeout_s: float) -> Any:
        del timeout_s
        return self._the_store

    def _end(self, failure: Failure | None, exit_code: int) -> None:
        """Note the failure in place of the end of the process."""
        del exit_code
        self.found.append(str(failure))
        self.ended.set()
        self._stopped.set()

    def others_arrive(self) -> None:
        far = dataclasses.replace(Identity.mine(1), host="far", space="elsewhere")
        world = self._context.world_size
        values = self._the_store.values
        for rank in range(1, NUM_WATCHED + 2):
            values[f"health/who/{rank}"] = dataclasses.replace(far, rank=rank).to_json().encode()
            values[f"health/beat/{rank}"] = b"0"
            values[f"health/arrival/{rank}"] = str(rank).encode()
        values["health/arrived"] = str(world).encode()


@pytest.mark.parametrize("world_size", [2, 64, 1_024, 16_384, 131_072])
def test_all_monitors_together_leave_the_store_room(world_size: int) -> None:
    times = watch_times(world_size, peer_timeout_s=20.0)
    assert world_size * failure.REQUESTS_PER_INTERVAL / times.interval_s <= failure.REQUESTS_PER_S
    assert times.interval_s >= 2.0
    # A rank is never lost for one late look.
    assert times.timeout_s >= max(20.0, 3 * times.interval_s)


@pytest.mark.parametrize("world_size", [64, 16_384, 131_072])
def test_a_monitor_sends_two_requests_per_interval(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "REQUESTS_PER_S", 10**9)
    store = SlowStore()
    monitor = Watched(store, world_size, peer_timeout_s=0.4)
    monitor.start()
    monitor.others_arrive()
    monitor.wait_for_all(timeout_s=10.0)
    assert store.requests.total() <= 12
    store.requests.clear()
    beating = threading.Event()

    def beat() -> None:
        for count in range(8):
            for rank in range(1, NUM_WATCHED + 1):
                store.values[f"health/beat/{rank}"] = str(count).encode()
            time.sleep(0.1)
        beating.set()

    threading.Thread(target=beat).start()
    assert beating.wait(10.0)
    monitor.stop()
    assert monitor.found == []
    looks = store.requests["multi_get"]
    assert looks >= 2
    assert store.requests.total() <= failure.REQUESTS_PER_INTERVAL * looks + 2


@pytest.mark.parametrize("latency_s", [0.0, 0.1, 0.5])
def test_a_slow_store_postpones_the_loss_of_a_silent_rank_and_does_not_cancel_it(
    latency_s: float,
) -> None:
    store = SlowStore(latency_s)
    monitor = Watched(store, 16, peer_timeout_s=1.0)
    monitor.start()
    monitor.others_arrive()
    monitor.wait_for_all(timeout_s=30.0)
    start = time.monotonic()
    assert monitor.ended.wait(30.0)
    # Four looks of an interval each count; each takes as long as its two requests besides.
    assert time.monotonic() - start >= 0.8
    monitor.stop()
    assert "went away: silent for" in monitor.found[0]


def test_time_of_a_stall_does_not_count_but_that_before_it_does() -> None:
    monitor = Watched(SlowStore(), 16, peer_timeout_s=8.0)
    monitor.start()
    monitor.stop()
    monitor._beats = {1: (b"3", 100.0)}
    monitor._postpone(-0.5)
    assert monitor._beats[1] == (b"3", 100.0)
    monitor._postpone(30.0)  # at 137, silent for 7 of 37 s
    assert monitor._beats[1] == (b"3", 130.0)


def test_the_rank_that_arrived_first_lists_who_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SlowStore()
    first = Watched(store, 1_000, peer_timeout_s=1.0)
    monkeypatch.setattr(first._context, "rank", 3)
    first.start()
    other = Watched(store, 1_000, peer_timeout_s=1.0)
    monkeypatch.setattr(other._context, "rank", 5)
    other.start()
    store.requests.clear()
    with pytest.raises(failure.PeerLostError, match=r"^998 of 1000 ranks .*: rank 3 names them;"):
        other.wait_for_all(timeout_s=0.0)
    assert store.requests.total() <= 4
    late = r"^998 of 1000 ranks .*: 0, 1, 2, 4, 6, 7, 8, 9, \.\.\.;"
    with pytest.raises(failure.PeerLostError, match=late):
        first.wait_for_all(timeout_s=0.0)
    first.stop()
    other.stop()
