"""Another user of the machine has no effect on a run."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (of host names; the other user cannot import it)
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megacore.calls.records import ring_folder
from megatrain.cli import main
from tests.support.campaigns import representatives
from tests.support.jobs import Job, start_function

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user"),
]

NOBODY = 65534
STEPS = 40
CONFIG = """\
[model]
hidden_size = 32
num_layers = 4
num_heads = 4
seq_length = 16

[parallel]
tp = 2

[train]
steps = {steps}
microbatch_size = 1
global_batch_size = 4
eval_interval = 0

[data]
source = "{folder}/text.txt"

[run]
dir = "{folder}/{name}"
plain = true
host_memory = {host_memory}
"""


def _start(folder: Path, name: str, *, host_memory: bool) -> Job:
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    path = folder / f"{name}.toml"
    memory = str(host_memory).lower()
    path.write_text(CONFIG.format(folder=folder, name=name, steps=STEPS, host_memory=memory))
    return start_function(lambda: main(["train", str(path), "--nproc=2"]), folder)


def _losses(folder: Path) -> list[float]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("}")]


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def _listening_ports(family: list[int]) -> list[tuple[str, int]]:
    """List the ports of these processes; those of other programs are not ours to attack."""
    sockets, found = set(), []
    for link in [link for pid in family for link in Path(f"/proc/{pid}/fd").iterdir()]:
        with contextlib.suppress(FileNotFoundError):
            sockets.add(str(link.readlink()))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in sockets:
            address, port = local.split(":")
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            found.append((host, int(port, 16)))
    return found


def _attempts(
    family: list[int], ports: list[tuple[str, int]], run: Path, chance: random.Random
) -> Iterator[Callable[[], object]]:
    """What another user can try, once each; a success that must not be returns a value."""
    for pid in family:
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
            yield lambda pid=pid, number=number: os.kill(pid, number) or f"signal to {pid}"
        for name in ("mem", "environ", "maps"):
            yield lambda pid=pid, name=name: Path(f"/proc/{pid}/{name}").read_bytes()
        for number in range(64):
            path = Path(f"/proc/{pid}/fd/{number}")
            yield lambda path=path: path.open("r+b")
    rings = ring_folder(run)
    for path in (rings, *(rings / f"rank_{rank:05d}.ring" for rank in range(2))):
        yield lambda path=path: path.open("r+b")
        yield lambda path=path: path.rename(path.with_suffix(".x")) and "renamed"
        yield lambda path=path: path.unlink() or "deleted"
    for host, port in ports:
        for size in (0, 1, 8, 64, 4096):
            yield lambda host=host, port=port, size=size: _talk(host, port, chance.randbytes(size))


def _talk(host: str, port: int, data: bytes) -> None:
    with socket.create_connection((host, port), timeout=0.2) as connection:
        connection.sendall(data)
        with contextlib.suppress(OSError):
            connection.recv(64)


def _attack(family: list[int], run: Path) -> int:
    """Become nobody and try everything; returns 0 if nothing that must not succeed did."""
    ports = _listening_ports(family)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    successes, tried = [], 0
    for attempt in _attempts(family, ports, run, random.Random(0)):
        tried += 1
        with contextlib.suppress(OSError):
            result = attempt()
            if result is not None:
                successes.append(result)
    print(tried, len(ports), successes)
    return 0 if tried > 200 and not successes else 1


@pytest.mark.parametrize("host_memory", representatives([True, False], [True]))
def test_nobody_cannot_disturb_a_run(tmp_path: Path, host_memory: bool) -> None:
    tmp_path.chmod(0o755)
    calm = _start(tmp_path, "calm", host_memory=host_memory).finish(timeout_s=90)
    assert calm.code == 0, calm.err
    job = _start(tmp_path, "attacked", host_memory=host_memory)
    run = tmp_path / "attacked"
    deadline = time.monotonic() + 60
    while len(_losses(run)) < 2:
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.01)
    family = _family(job.pid)
    assert len(family) == 3
    attacker = start_function(lambda: _attack(family, run), tmp_path).finish(timeout_s=60)
    print(attacker.out, attacker.err)
    assert attacker.code == 0
    ended = job.finish(timeout_s=90)
    assert (ended.code, ended.err) == (0, "")
    assert _losses(run) == _losses(tmp_path / "calm")
