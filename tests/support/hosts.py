"""Two pretend hosts on one machine, with a router between them that can lose packets.

Each host is a network namespace; a process on it has a hostname, a process-id space and a
``/dev/shm`` of its own. Needs root and the kernel's namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.jobs import Job, start_command


@dataclass(frozen=True, kw_only=True)
class Host:
    """One pretend host.

    Attributes:
        name: Its hostname, and the end of the name of its namespace.
        space: Its network namespace.
        address: Its IPv4 address.
    """

    name: str
    space: str
    address: str

    def start(self, command: Sequence[str], folder: Path, **env: object) -> Job:
        """Start a command on the host; its environment gets ``env``."""
        script = f'hostname {self.name}; mount -t tmpfs none /dev/shm; exec "$@"'
        isolated = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        settings: Mapping[str, str] = {name: str(value) for name, value in env.items()}
        shell = ["--mount-proc", "sh", "-c", script, "sh"]
        return start_command(
            ["ip", "netns", "exec", self.space, *isolated, *shell, *command],
            folder,
            # Without a name service, gloo would take the loopback interface.
            env={"GLOO_SOCKET_IFNAME": "eth0", **settings},
        )

    def enter(self) -> None:
        """Move the calling process, which must have one thread, to the network of the host."""
        with Path(f"/var/run/netns/{self.space}").open() as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Two hosts, and the router between them."""

    a: Host
    b: Host
    router: str

    def partition(self) -> None:
        """Lose all packets between the hosts, without a word to either."""
        _ip("netns", "exec", self.router, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward")

    def lose_packets_to(self, host: Host) -> None:
        """Lose the packets of one direction."""
        _ip("-n", self.router, "route", "replace", "blackhole", f"{host.address}/32")

    def take_link_down(self, host: Host) -> None:
        """Take down the network interface of a host."""
        _ip("-n", host.space, "link", "set", "eth0", "down")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Create two hosts; skips the test where the machine does not allow it."""
    if not _can_isolate():
        pytest.skip("needs root, iproute2 and network namespaces")
    stem = f"mc{os.getpid()}"
    router = f"{stem}r"
    hosts = [
        Host(name=name, space=f"{stem}{name[-1]}", address=f"10.77.{number}.2")
        for number, name in enumerate(("host-a", "host-b"))
    ]
    try:
        _ip("netns", "add", router)
        for number, host in enumerate(hosts):
            gateway = f"10.77.{number}.1"
            _ip("netns", "add", host.space)
            _ip("link", "add", f"e{number}", "netns", router, "type", "veth")
            _ip("-n", router, "link", "set", "veth0", "netns", host.space, "name", "eth0")
            _ip("-n", router, "addr", "add", f"{gateway}/24", "dev", f"e{number}")
            _ip("-n", router, "link", "set", f"e{number}", "up")
            _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.space, "link", "set", device, "up")
            _ip("-n", host.space, "route", "add", "default", "via", gateway)
        _ip("netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        yield Hosts(a=hosts[0], b=hosts[1], router=router)
    finally:
        for space in (router, *(host.space for host in hosts)):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@cache
def _can_isolate() -> bool:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "mount", "hostname"))):
        return False
    name = f"mc{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True)
    isolate = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc"]
    script = "mount -t tmpfs none /dev/shm && echo 1 > /proc/sys/net/ipv4/ip_forward"
    tried = subprocess.run(
        ["ip", "netns", "exec", name, *isolate, "sh", "-c", script],
        check=False,
        capture_output=True,
    )
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return made.returncode == 0 and tried.returncode == 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
