from __future__ import annotations

from collections.abc import Callable

import pytest

from megacore.parallel.interleave import InterleavedPair, idle_work, num_turns_given, yield_turn


def speaker(heard: list[str], name: str, times: int) -> Callable[[], str]:
    def speak() -> str:
        for number in range(times):
            heard.append(f"{name}{number}")
            yield_turn()
        return name

    return speak


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (2, 2, "a0 b0 a1 b1"),
        (3, 1, "a0 b0 a1 a2"),
        (1, 3, "a0 b0 b1 b2"),
        (0, 2, "b0 b1"),
        (2, 0, "a0 a1"),
    ],
)
def test_the_order_is_that_of_the_code(first: int, second: int, expected: str) -> None:
    turns = InterleavedPair()
    for _ in range(20):
        heard: list[str] = []
        names = turns.run(speaker(heard, "a", first), speaker(heard, "b", second))
        assert names == ("a", "b")
        assert " ".join(heard) == expected


def test_without_a_pair_nobody_waits() -> None:
    yield_turn()


@pytest.mark.parametrize("failing", ["first", "second"])
def test_an_error_ends_both(failing: str) -> None:
    heard: list[str] = []

    def fail() -> str:
        heard.append("x")
        yield_turn()
        raise KeyError("mine")

    pair = [fail, speaker(heard, "b", 5)]
    turns = InterleavedPair()
    with pytest.raises(KeyError, match="mine"):
        turns.run(*(pair if failing == "first" else reversed(pair)))
    assert heard == (["x", "b0"] if failing == "first" else ["b0", "x", "b1"])
    assert turns.run(lambda: 1, lambda: 2) == (1, 2), "the next pair starts anew"


def test_spare_work_of_a_thread_runs_before_its_turn_ends() -> None:
    heard: list[str] = []

    def busy() -> None:
        with idle_work(lambda: heard.append("spare")):
            speaker(heard, "b", 2)()
        yield_turn()  # nothing put aside any more

    InterleavedPair().run(speaker(heard, "a", 3), busy)
    assert " ".join(heard) == "a0 b0 spare a1 b1 spare a2"


def test_turns_are_counted_for_each_of_a_pair() -> None:
    def count(times: int) -> int:
        for number in range(times):
            assert num_turns_given() == number
            yield_turn()
        return num_turns_given()

    yield_turn()
    assert num_turns_given() == 0
    for _ in range(2):  # each pair counts anew
        assert InterleavedPair().run(lambda: count(3), lambda: count(1)) == (3, 1)
