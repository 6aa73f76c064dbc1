"""Ranks on two pretend hosts: whatever the network does, every rank ends and names its peers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.campaigns import representatives
from tests.support.hosts import Host, Hosts, two_hosts
from tests.support.jobs import Ended, Job

pytestmark = pytest.mark.dist

WORKER = Path(__file__).parents[1] / "support" / "launch_worker.py"
LIMIT_S = 60.0

FAULTS: dict[str, Callable[[Hosts], None]] = {
    "partition": Hosts.partition,
    "loss to the host of the store": lambda hosts: hosts.lose_packets_to(hosts.a),
    "loss to the other host": lambda hosts: hosts.lose_packets_to(hosts.b),
    "link of the host of the store down": lambda hosts: hosts.take_link_down(hosts.a),
    "link of the other host down": lambda hosts: hosts.take_link_down(hosts.b),
}


def _start(hosts: Hosts, behaviour: str, folder: Path, *, per_host: int = 1) -> list[Job]:
    """Two ranks per host; rank 0, on the first host, has the store."""

    def rank(number: int, host: Host) -> Job:
        return host.start(
            [sys.executable, str(WORKER), behaviour, "0", str(folder)],
            folder,
            RANK=number,
            WORLD_SIZE=2 * per_host,
            LOCAL_RANK=number % per_host,
            LOCAL_WORLD_SIZE=per_host,
            MASTER_ADDR=hosts.a.address,
            MASTER_PORT=29711,
        )

    return [rank(number, (hosts.a, hosts.b)[number // per_host]) for number in range(2 * per_host)]


def _wait_until_ready(folder: Path, num_ranks: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.ready"))) < num_ranks:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)


def _finish(jobs: list[Job]) -> list[Ended]:
    deadline = time.monotonic() + LIMIT_S
    return [job.finish(timeout_s=max(0.1, deadline - time.monotonic())) for job in jobs]


def test_two_hosts_sum_and_leave(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        for ended in _finish(_start(hosts, "ok", tmp_path)):
            assert (ended.code, ended.out) == (0, "sum 3\n"), ended.err


@pytest.mark.parametrize("fault", representatives(FAULTS, ["partition"]))
def test_a_network_failure_ends_all_ranks_of_both_sides(tmp_path: Path, fault: str) -> None:
    with two_hosts() as hosts:
        jobs = _start(hosts, "endless", tmp_path)
        _wait_until_ready(tmp_path, 2)
        FAULTS[fault](hosts)
        on_a, on_b = _finish(jobs)
    assert (on_a.code, on_b.code) == (1, 1)
    [complaint] = on_a.complaints()
    assert "rank 1 (pid " in complaint
    assert "on host host-b) went away: silent for " in complaint
    assert "the network between the hosts may have failed" in complaint
    [complaint] = on_b.complaints()
    assert f"the launcher that holds the store at {hosts.a.address}:29711 went away" in complaint
    assert "with it rank 0 (pid " in complaint
    assert "the network between the hosts may have failed" in complaint


def test_a_rank_that_cannot_reach_the_store_says_so(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        hosts.partition()
        on_a, on_b = _start(hosts, "short", tmp_path)
        ended = on_b.finish(timeout_s=LIMIT_S)
        assert ended.code == 2
        [complaint] = ended.complaints()
        assert f"no answer from the store of the launcher at {hosts.a.address}:29711" in complaint
        assert "check MASTER_ADDR and MASTER_PORT, and the network" in complaint
        waiting = on_a.finish(timeout_s=LIMIT_S)
    assert waiting.code == 1
    [complaint] = waiting.complaints()
    assert "1 of 2 ranks did not start within 15 s (run.timeout_s): 1;" in complaint
