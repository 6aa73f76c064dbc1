"""Requests to a store end by their deadline; records of others cannot change a terminal."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megacore.errors import printable
from megatrain.daemon import within
from megatrain.launch.failure import Failure, record_failure
from megatrain.launch.store import StoreConnection, local_store


class _Mute:
    """A store behind a network that loses all packets."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def get(self, _key: str) -> bytes:
        self.released.wait(20)
        return b"late"


def test_a_request_ends_though_the_store_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.launch.store.RETRY_S", 0.1)
    mute = _Mute()
    stores: list[Any] = [mute, mute]
    connection = StoreConnection(lambda _: stores.pop(), deadline_s=0.1)
    with pytest.raises(RuntimeError):
        connection.ask(lambda store: store.get("x"))
    assert stores == []  # it was asked once more on a new connection
    mute.released.set()


def test_a_request_that_must_not_repeat_is_sent_once() -> None:
    connections: list[float] = []

    def connect(timeout_s: float) -> Any:
        connections.append(timeout_s)
        raise TimeoutError("no answer")

    connection = StoreConnection(connect, deadline_s=5.0)
    for repeat, count in ((False, 1), (True, 2)):
        connections.clear()
        with pytest.raises(RuntimeError, match="no answer"):
            connection.ask(lambda store: store.add("n", 1), repeat=repeat)
        assert len(connections) == count
    connection.close()


def test_a_late_answer_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.launch.store.RETRY_S", 5.0)
    mute = _Mute()
    with local_store() as address:
        good = address.connect(timeout_s=0)
        good.set("x", "right")
        stores: list[Any] = [good, mute]
        connection = StoreConnection(lambda _: stores.pop(), deadline_s=0.1)
        assert connection.ask(lambda store: store.get("x")) == b"right"
        mute.released.set()
        assert connection.ask(lambda store: store.get("x")) == b"right"


def test_an_action_in_time_returns_or_raises() -> None:
    assert within(5.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0)


def test_the_first_failure_of_a_local_store_wins() -> None:
    with local_store() as address:
        first = Failure(rank=1, who="rank 1", reason="a")
        for failure in (first, Failure(rank=2, who="rank 2", reason="b")):
            store = address.connect(timeout_s=0)
            assert record_failure(store, failure) == first


def test_records_of_others_are_escaped_and_checked() -> None:
    text = '{"rank": 1, "who": "\\u001b[31mrank 1", "reason": "a\\nb\\u009b"}'
    assert str(Failure.from_json(text)) == "\\x1b[31mrank 1 went away: a b\\x9b"
    for wrong in ("", "[]", "{}", '{"rank": "x", "who": "", "reason": ""}', b"\xff"):
        with pytest.raises(RuntimeError, match="invalid record"):
            Failure.from_json(wrong)


def test_printable_text_has_no_control_characters() -> None:
    every = "".join(map(chr, range(0x3000)))
    shown = printable(every).replace("\n", "")
    assert all(letter.isprintable() for letter in shown)
    assert printable("naïve 漢字\n") == "naïve 漢字\n"
