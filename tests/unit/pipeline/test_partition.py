"""Layers over stages: nothing is lost, and every refusal names values that work."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.pipeline import partition_layers

SETTINGS = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 40),
        "num_ranks": st.integers(1, 6),
        "num_chunks": st.integers(1, 3),
        "first": st.none() | st.integers(1, 9),
        "last": st.none() | st.integers(1, 9),
        "account_for_embedding": st.booleans(),
        "account_for_loss": st.booleans(),
    }
)


def split(settings: dict[str, Any]) -> list[range]:
    return partition_layers(**settings)


def works(settings: dict[str, Any]) -> bool:
    try:
        split(settings)
    except ValueError:
        return False
    return True


@given(SETTINGS)
def test_stages_hold_all_layers_in_order_or_the_nearest_legal_values_are_named(
    settings: dict[str, Any],
) -> None:
    try:
        stages = split(settings)
    except ValueError as error:
        check_suggestions(str(error), settings)
        return
    assert len(stages) == settings["num_ranks"] * settings["num_chunks"]
    assert [layer for stage in stages for layer in stage] == list(range(settings["num_layers"]))
    mine = [
        sum(len(stage) for stage in stages[rank :: settings["num_ranks"]])
        for rank in range(settings["num_ranks"])
    ]
    if settings["first"] is not None:
        assert mine[0] == settings["first"]
    if settings["last"] is not None:
        assert mine[-1] == settings["last"]


def check_suggestions(message: str, settings: dict[str, Any]) -> None:
    """Every value named works, and none nearer to the present one does."""
    remedy, suggestions = re.search(
        r"\. (Nearest legal values, changing one setting: |No single change helps; without .*, "
        r"(?:nearest legal: )?)(.*)$",
        message,
    ).groups()
    if remedy.startswith("No single"):
        sizes = ("num_layers", "num_ranks", "num_chunks")
        settings = {name: settings[name] for name in sizes}
        if suggestions == "these sizes are legal":
            assert works(settings)
            return
    named = re.findall(r"(\w+) ([\d or]+)", suggestions)
    assert named
    for name, values in named:
        present = settings[name]
        for value in map(int, values.split(" or ")):
            assert works({**settings, name: value}), (message, name, value)
            between = range(min(value, present) + 1, max(value, present))
            assert not any(works({**settings, name: other}) for other in between)


def test_stages_go_round_the_ranks_once_per_chunk() -> None:
    # Two chunks of two ranks: rank 0 holds stages 0 and 2.
    assert partition_layers(8, num_ranks=2, num_chunks=2)[0::2] == [range(0, 2), range(4, 6)]


def test_uneven_ends() -> None:
    stages = partition_layers(14, num_ranks=4, first=3, last=1)
    assert [len(stage) for stage in stages] == [3, 5, 5, 1]
    stages = partition_layers(6, num_ranks=4, account_for_embedding=True, account_for_loss=True)
    assert [len(stage) for stage in stages] == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_layers": 30, "num_ranks": 4}, "num_layers 28 or 32; num_ranks 3 or 5"),
        ({"num_layers": 4, "num_ranks": 2, "first": 3, "last": 3}, "no other rank is left"),
        ({"num_layers": 0, "num_ranks": 2}, "num_layers must be in 1.."),
        ({"num_layers": 4, "num_ranks": 0}, "num_ranks must be in 1.."),
    ],
)
def test_errors_say_value_rule_and_remedy(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        split(settings)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_layout_is_read_back(layers: list[int], random: Any) -> None:
    parts = [
        random.choice(["t" * n, f"t*{n}" if n else "", f"(t)*{n}," if n else " "]) for n in layers
    ]
    layout = "E" + "|".join(parts) + "L"
    if sum(layers) == 0:
        return
    stages = partition_layers(sum(layers), num_ranks=len(layers), layout=layout)
    assert [len(stage) for stage in stages] == layers
    assert [layer for stage in stages for layer in stage] == list(range(sum(layers)))


@given(st.text(alphabet="EtmL|*()0123456789, x", max_size=30))
def test_any_layout_is_read_or_refused_with_a_sentence(layout: str) -> None:
    try:
        stages = partition_layers(4, num_ranks=2, layout=layout)
    except ValueError as error:
        sentence = str(error)
    else:
        assert sum(map(len, stages)) == 4
        return
    assert sentence.startswith('layout "')


def test_first_and_last_follow_the_placement() -> None:
    stages = partition_layers(14, num_ranks=3, num_chunks=2, first=4, last=2, placement="v")
    assert [len(stage) for stage in stages] == [2, 4, 1, 1, 4, 2]
    with pytest.raises(ValueError, match="placement must be 'loop' or 'v', got 'w'"):
        partition_layers(4, num_ranks=2, placement="w")  # type: ignore[arg-type]
