"""Ranks on two pretend hosts: whatever the network does, every rank ends and names its peers."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.launch.store import StoreAddress
from tests.support.campaigns import representatives
from tests.support.hosts import Host, Hosts, two_hosts
from tests.support.jobs import Ended, Job, start_function

pytestmark = pytest.mark.dist

WORKER = Path(__file__).parents[1] / "support" / "launch_worker.py"
LIMIT_S = 60.0
LATE_S = 40  # longer than a connection, or the heartbeat of a rank, is waited for
PORT = 29711

FAULTS: dict[str, Callable[[Hosts], None]] = {
    "partition": Hosts.partition,
    "loss to the host of the store": lambda hosts: hosts.lose_packets_to(hosts.a),
    "loss to the other host": lambda hosts: hosts.lose_packets_to(hosts.b),
    "link of the host of the store down": lambda hosts: hosts.take_link_down(hosts.a),
    "link of the other host down": lambda hosts: hosts.take_link_down(hosts.b),
}


def _start(hosts: Hosts, behaviour: str, folder: Path) -> list[Job]:
    return _start_command(hosts, [sys.executable, str(WORKER), behaviour, "0", str(folder)], folder)


def _start_command(
    hosts: Hosts, command: Sequence[str], folder: Path, *, late: int = -1
) -> list[Job]:
    """One rank per host, the ``late`` one after the others; rank 0, on the first, has the store."""

    def rank(number: int, host: Host) -> Job:
        if number == late:
            command_ = ["sh", "-c", f'sleep {LATE_S}; exec "$@"', "sh", *command]
        else:
            command_ = [*command]
        return host.start(
            command_,
            folder,
            RANK=number,
            WORLD_SIZE=2,
            LOCAL_RANK=0,
            LOCAL_WORLD_SIZE=1,
            MASTER_ADDR=hosts.a.address,
            MASTER_PORT=PORT,
        )

    return [rank(number, host) for number, host in enumerate((hosts.a, hosts.b))]


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
        jobs = _start(hosts, "parted", tmp_path)
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


@pytest.mark.campaign
@pytest.mark.parametrize("late", [0, 1])
def test_a_late_host_is_waited_for(tmp_path: Path, late: int) -> None:
    with two_hosts() as hosts:
        command = [sys.executable, str(WORKER), "parted-late", "0", str(tmp_path)]
        jobs = _start_command(hosts, command, tmp_path, late=late)
        for ended in (job.finish(timeout_s=2 * LIMIT_S) for job in jobs):
            assert (ended.code, ended.out) == (0, "sum 3\n"), ended.err
    has_waited = "waits up to 60 s (run.timeout_s) for rank 0, whose store at" in ended.err
    assert has_waited == (late == 0)


@pytest.mark.campaign
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
    assert "1 of 2 ranks did not start within 4 s (run.timeout_s): 1;" in complaint


# ---- a training run ------------------------------------------------------------------------------

CONFIG = """\
[model]
hidden_size = 64
num_layers = 4
num_heads = 4
seq_length = 16

[train]
steps = {steps}
microbatch_size = 1
global_batch_size = 4
eval_interval = 0

[data]
source = "{folder}/text.txt"

[checkpoint]
interval = 5

[run]
dir = "{folder}/run"
plain = true
"""
MOMENTS = ("arrival", "start", "step", "save", "resume", "loading")


def _train(hosts: Hosts, folder: Path, *settings: str) -> list[Job]:
    command = [sys.executable, "-m", "megacore", "train", str(folder / "tiny.toml"), *settings]
    return _start_command(hosts, command, folder)


def _steps(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def _wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.002)


def _wait_for_arrival(hosts: Hosts, folder: Path) -> None:
    """Wait until both ranks are known to each other, before they have any group."""

    def wait() -> int:
        hosts.a.enter()
        store = StoreAddress(host=hosts.a.address, port=PORT).connect(timeout_s=LIMIT_S)
        store.set_timeout(timedelta(seconds=LIMIT_S))
        store.wait(["megacore/0/health/arrival/1"])
        return 0

    assert start_function(wait, folder).finish(timeout_s=2 * LIMIT_S).code == 0


def _reach(moment: str, hosts: Hosts, folder: Path, chance: random.Random) -> list[Job]:
    """Start a run and return at a moment of it."""
    lock = folder / "run" / ".lock"
    if moment in ("resume", "loading"):
        jobs = _train(hosts, folder, "--train.steps=6")
        assert [ended.code for ended in _finish(jobs)] == [0, 0]
        lock.unlink()
        jobs = _train(hosts, folder, "--checkpoint.resume=auto")
        if moment == "loading":
            _wait_until(lock.exists)  # just before the checkpoint is read
        else:
            _wait_for_arrival(hosts, folder)
            time.sleep(chance.uniform(0.0, 1.0))
        return jobs
    if moment in ("arrival", "start"):
        jobs = _train(hosts, folder)
        _wait_for_arrival(hosts, folder)
        time.sleep(chance.uniform(0.0, 1.0) if moment == "start" else 0.0)
        return jobs
    jobs = _train(hosts, folder)
    if moment == "step":
        _wait_until(lambda: _steps(folder) > 3)
        time.sleep(chance.uniform(0.0, 0.1))
    else:
        _wait_until(lambda: list((folder / "run").glob("checkpoints/*.partial")))
    return jobs


CASES = [(moment, fault) for moment in MOMENTS for fault in FAULTS]


@pytest.mark.parametrize(("moment", "fault"), representatives(CASES, []))
def test_a_run_ends_at_a_network_failure_and_can_be_resumed(
    tmp_path: Path, moment: str, fault: str
) -> None:
    chance = random.Random(f"{moment}/{fault}")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "tiny.toml").write_text(CONFIG.format(folder=tmp_path, steps=100_000))
    with two_hosts() as hosts:
        jobs = _reach(moment, hosts, tmp_path, chance)
        FAULTS[fault](hosts)
        since = time.monotonic()
        ends = _finish(jobs)
        took_s = time.monotonic() - since
    print(f"{moment}, {fault}: gone after {took_s:.0f} s")
    for ended in ends:
        assert ended.code in (1, 2), ended
        [complaint] = ended.complaints()
        assert "network" in complaint
        assert "went away" in complaint
        # The host that is lost, by name or address.
        assert ("on host host-b)" if ended is ends[0] else hosts.a.address) in complaint
    steps = _steps(tmp_path) + 2
    arguments = ["train", str(tmp_path / "tiny.toml"), "--nproc=2", f"--train.steps={steps}"]
    resume = "--checkpoint.resume=auto"
    resumed = start_function(lambda: main([*arguments, resume]), tmp_path).finish(timeout_s=120)
    assert (resumed.code, resumed.err) == (0, "")
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(record)["step"] for record in records] == list(range(1, steps + 1))
