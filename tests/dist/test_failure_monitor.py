"""The watch over a rank of another machine, which is played by a few writes to the store.

All scenes run at once, each in a process of its own that ends with 0 if nothing alarmed it.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch.distributed import PrefixStore, Store, TCPStore

from megacore.calls.processes import Identity
from megatrain.launch.context import RankContext
from megatrain.launch.failure import Failure, FailureMonitor, record_failure
from megatrain.launch.store import StoreAddress
from tests.support.jobs import Job, start_function

pytestmark = pytest.mark.dist

TIMEOUT_S = 1.5
FAR_AWAY = dataclasses.replace(Identity.mine(1), pid=77, host="far", space="elsewhere")


WORLD_SIZE = 20  # where some ranks have not arrived yet


@dataclasses.dataclass
class Own:
    """The only reference to the server of the store, and the monitor of rank 0."""

    server: list[Store]
    monitor: FailureMonitor


def arrive(store: Store, rank: int) -> None:
    """Be a rank of another machine that starts."""
    store.set(f"health/who/{rank}", dataclasses.replace(FAR_AWAY, rank=rank).to_json())
    store.set(f"health/beat/{rank}", "first")
    number = store.add("health/arrived", 1) - 1
    store.set(f"health/arrival/{number}", str(rank))


def beat(store: Store, *, seconds: float, every_s: float, rank: int = 1) -> None:
    """Be a healthy rank for a while."""
    deadline = time.monotonic() + seconds
    count = 0
    while time.monotonic() < deadline:
        store.set(f"health/beat/{rank}", str(count))
        count += 1
        time.sleep(every_s)


def goes_silent(store: Store, _own: Own) -> None:
    beat(store, seconds=0.5, every_s=0.2)
    time.sleep(6.0)


def goes_silent_while_others_are_late(store: Store, own: Own) -> None:
    arrive(store, 15)
    own.monitor.wait_for_all(timeout_s=100.0)


def waits_for_late_ranks(store: Store, own: Own) -> None:
    def others() -> None:
        arrive(store, 15)
        beat(store, seconds=3.0 * TIMEOUT_S, every_s=0.2, rank=15)
        for rank in range(1, WORLD_SIZE):
            if rank != 15:
                arrive(store, rank)

    thread = threading.Thread(target=others)
    thread.start()
    own.monitor.wait_for_all(timeout_s=100.0)
    thread.join()


def is_suspended_with_us(store: Store, _own: Own) -> None:
    beat(store, seconds=0.5, every_s=0.2)
    time.sleep(0.4 * TIMEOUT_S)  # our watch sees the last beat
    os.kill(os.getpid(), signal.SIGSTOP)  # the fixture wakes us up
    time.sleep(0.6 * TIMEOUT_S)
    beat(store, seconds=3.0, every_s=0.2)  # longer than an alarmed watch waits


def is_done(store: Store, _own: Own) -> None:
    beat(store, seconds=0.3, every_s=0.2)
    store.set("health/end/1", "done")
    time.sleep(2.0 * TIMEOUT_S + 2.5)


def is_stopped(store: Store, _own: Own) -> None:
    beat(store, seconds=0.3, every_s=0.2)
    store.set("health/end/1", "stopped")
    time.sleep(6.0)


def fails_far_from_us(store: Store, _own: Own) -> None:
    record_failure(store, Failure(rank=5, who="rank 5", reason="its fuse blew"))
    record_failure(store, Failure(rank=6, who="rank 6", reason="came too late"))
    beat(store, seconds=6.0, every_s=0.2)


def loses_the_store(_store: Store, own: Own) -> None:
    own.server.clear()  # the last reference to it
    time.sleep(8.0)


Scene = Callable[[Store, Own], None]
SCENES: tuple[Scene, ...] = (
    goes_silent,
    goes_silent_while_others_are_late,
    waits_for_late_ranks,
    is_suspended_with_us,
    is_done,
    is_stopped,
    fails_far_from_us,
    loses_the_store,
)


def play(scene: Scene) -> int:
    """Be rank 0 under watch while rank 1 plays its scene."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listening_fd = os.dup(listener.fileno())
    server = [
        TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening_fd
        )
    ]
    address = StoreAddress(host="127.0.0.1", port=port)
    store = PrefixStore(address.prefix, address.connect(timeout_s=10))
    is_late = "late" in scene.__name__
    context = RankContext(
        rank=0,
        world_size=WORLD_SIZE if is_late else 2,
        local_rank=0,
        local_world_size=1,
        device=torch.device("cpu"),
        backend="gloo",
        address=address,
        store=store,
        launched_by="torchrun",
    )
    monitor = FailureMonitor(
        context,
        peer_timeout_s=TIMEOUT_S,
        on_end=lambda sentence, code: print(f"{code}: {sentence}", file=sys.stderr, flush=True),
    )
    monitor.start()
    if not is_late:
        arrive(store, 1)
    scene(store, Own(server, monitor))
    monitor.stop()
    return 0


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[Scene, Job]:
    folder = tmp_path_factory.mktemp("scenes")
    started = {scene: start_function(lambda scene=scene: play(scene), folder) for scene in SCENES}
    suspended = started[is_suspended_with_us].pid
    os.waitpid(suspended, os.WUNTRACED)
    time.sleep(2.0 * TIMEOUT_S)
    os.kill(suspended, signal.SIGCONT)
    return started


def test_a_silent_rank_is_reported(jobs: dict[Scene, Job]) -> None:
    ended = jobs[goes_silent].finish()
    assert ended.code == 1
    assert ended.err.startswith("1: rank 1 (pid 77 on host far) went away: silent for ")
    assert 1.5 <= float(ended.err.split("silent for ")[1].split()[0]) < 4.0
    assert "the network between the hosts may have failed" in ended.err


def test_a_silent_rank_is_reported_while_others_are_late(jobs: dict[Scene, Job]) -> None:
    ended = jobs[goes_silent_while_others_are_late].finish()
    assert ended.code == 1
    assert ended.err.startswith("1: rank 15 (pid 77 on host far) went away: silent for ")


def test_late_ranks_are_waited_for(jobs: dict[Scene, Job]) -> None:
    ended = jobs[waits_for_late_ranks].finish()
    assert (ended.code, ended.err) == (0, "")


def test_silence_while_we_were_suspended_ourselves_proves_nothing(jobs: dict[Scene, Job]) -> None:
    ended = jobs[is_suspended_with_us].finish()
    assert (ended.code, ended.err) == (0, "")


def test_a_rank_that_is_done_may_be_silent(jobs: dict[Scene, Job]) -> None:
    ended = jobs[is_done].finish()
    assert (ended.code, ended.err) == (0, "")


def test_a_rank_stopped_by_a_signal_is_reported_as_such(jobs: dict[Scene, Job]) -> None:
    ended = jobs[is_stopped].finish()
    assert (ended.code, ended.err) == (
        1,
        "1: rank 1 (pid 77 on host far) went away: it was stopped by a signal\n",
    )


def test_the_first_recorded_failure_is_everybodys_story(jobs: dict[Scene, Job]) -> None:
    ended = jobs[fails_far_from_us].finish()
    assert (ended.code, ended.err) == (1, "1: rank 5 went away: its fuse blew\n")


def test_a_lost_store_ends_the_rank(jobs: dict[Scene, Job]) -> None:
    ended = jobs[loses_the_store].finish()
    assert ended.code == 1
    [sentence] = [line for line in ended.err.splitlines() if line.startswith("1: ")]
    assert sentence.startswith("1: the launcher that holds the store at 127.0.0.1:")
    assert "went away: no answer" in sentence
