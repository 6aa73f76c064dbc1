"""Choice of the rank that compares the calls of all ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatrain.launch import worker


def context(rank: int, world_size: int, store: Any) -> Any:
    return SimpleNamespace(rank=rank, world_size=world_size, store=store)


def choices(ranks: tuple[int, ...], world_size: int, store: Any) -> list[bool]:
    return [worker._is_to_diagnose(context(rank, world_size, store)) for rank in ranks]


class Silent:
    """A store whose host does not respond."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def add(self, _key: str, _amount: int) -> int:
        self.released.wait(60.0)
        return 1


class Gone:
    """A store whose host has ended."""

    def add(self, _key: str, _amount: int) -> int:
        raise dist.DistNetworkError("Connection reset by peer")


def test_each_rank_of_a_small_run_diagnoses_without_the_store() -> None:
    assert choices((0, 63), 64, None) == [True, True]


def test_the_first_rank_that_asks_diagnoses_a_large_run() -> None:
    store = dist.HashStore()
    assert choices((70, 3, 99), 100, store) == [True, False, False]


def test_the_last_rank_diagnoses_without_the_store() -> None:
    assert choices((0, 98, 99), 100, Gone()) == [False, False, True]


def test_a_store_that_does_not_respond_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_STORE_S", 0.05)
    store = Silent()
    assert choices((0, 99), 100, store) == [False, True]
    store.released.set()
