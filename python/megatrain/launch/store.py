"""Addresses of the key-value store of a run, and requests to it that end by a deadline."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import DistError, FileStore, Store, TCPStore  # type: ignore[attr-defined]

from megacore.errors import ConfigError
from megatrain.daemon import within

T = TypeVar("T")

RETRY_S = 5.0  # to connect again and repeat a request


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """Address of a store on the network, and key prefix of this attempt."""

    host: str
    port: int
    prefix: str = "megacore"

    def __str__(self) -> str:
        return f"the launcher that holds the store at {self.host}:{self.port}"

    def connect(self, *, timeout_s: float, is_server: bool = False) -> Store:
        """Open a new connection to the store.

        Raises:
            ConfigError: If the store does not answer within ``timeout_s``.
        """

        def open_store() -> Store:
            return TCPStore(
                self.host,
                self.port,
                is_master=is_server,
                wait_for_workers=False,
                multi_tenant=is_server,
                timeout=timedelta(seconds=timeout_s),
            )

        try:
            return within(timeout_s + 1.0, open_store)
        except (DistError, TimeoutError) as error:
            raise ConfigError(
                f"no answer from the store of the launcher at {self.host}:{self.port} within "
                f"{timeout_s:g} s ({first_line(error)}); check MASTER_ADDR and MASTER_PORT, and "
                f"the network between the hosts"
            ) from error


@dataclass(frozen=True, kw_only=True)
class LocalStoreAddress:
    """Store in a file that only processes of one user on this machine can open."""

    path: str
    prefix: str = "megacore"

    def __str__(self) -> str:
        return f"the store {self.path}"

    def connect(self, *, timeout_s: float) -> Store:  # noqa: ARG002
        """Open the store."""
        return FileStore(self.path, -1)


@contextlib.contextmanager
def local_store() -> Iterator[LocalStoreAddress]:
    """Create a store for the ranks of this machine, without a port that others could connect to.

    The file has no name and is in memory where the system supports it. It grows by some 20 bytes
    per rank and second, because a file store keeps former values.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("megacore-store", os.MFD_CLOEXEC)
        try:
            yield LocalStoreAddress(path=f"/proc/{os.getpid()}/fd/{descriptor}")
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="megacore-") as folder:
            yield LocalStoreAddress(path=str(Path(folder) / "store"))


class StoreConnection:
    """Connection to a store, for any thread; a request is repeated once on a new connection.

    torch's own timeouts do not apply while the network drops all packets, and a request can also
    time out because this process was suspended. The connection is then abandoned with its thread,
    since a late reply would be read as the reply to the next request.

    Args:
        connect: Opens a connection within the given number of seconds.
        deadline_s: Limit of one request, seconds.
    """

    def __init__(self, connect: Callable[[float], Store], *, deadline_s: float) -> None:
        self._connect = connect
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._channel = _Channel(lambda: connect(30.0))

    def ask(self, request: Callable[[Store], T], *, repeat: bool = True) -> T:
        """Send one request.

        Args:
            request: The request.
            repeat: Whether it may be sent twice, because the first answer did not arrive.

        Raises:
            RuntimeError: If there is no answer.
        """
        if not self._lock.acquire(timeout=self._deadline_s + 2 * RETRY_S):
            raise RuntimeError("the store is blocked by another request")
        try:
            try:
                return self._channel.ask(request, self._deadline_s)
            except (DistError, TimeoutError):
                if not repeat:
                    raise
                self._channel.close()
                self._channel = _Channel(lambda: self._connect(RETRY_S / 2))
                return self._channel.ask(request, RETRY_S)
        except (ConfigError, DistError, TimeoutError) as error:
            raise RuntimeError(first_line(error)) from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the thread of the connection once its request has ended."""
        self._channel.close()


class _Channel:
    """Daemon thread with one connection."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._requests: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = (
            SimpleQueue()
        )
        threading.Thread(
            target=self._serve, args=(connect,), name="megacore-store", daemon=True
        ).start()

    def ask(self, request: Callable[[Store], T], deadline_s: float) -> T:
        answer: Future[T] = Future()
        self._requests.put((request, answer))
        return answer.result(timeout=deadline_s)

    def close(self) -> None:
        self._requests.put(None)

    def _serve(self, connect: Callable[[], Store]) -> None:
        store: Store | None = None
        while (item := self._requests.get()) is not None:
            request, answer = item
            try:
                store = connect() if store is None else store
                answer.set_result(request(store))
            except BaseException as error:  # raised in the thread that asked
                answer.set_exception(error)


def first_line(error: BaseException) -> str:
    """Extract the first line of an error's text, because torch appends C++ frames."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
