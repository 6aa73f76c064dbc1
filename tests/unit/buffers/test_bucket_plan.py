from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.buffers import BufferPlan, plan_buckets

GOLDEN = Path(__file__).parents[2] / "golden"


@st.composite
def plan_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of plan_buckets: empty parameters, single elements, ranks that own nothing."""
    numels = draw(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 700)), max_size=10))
    dp_size = draw(st.integers(1, 9))
    arguments: dict[str, Any] = {
        "numels": numels,
        "dp_size": dp_size,
        "bucket_numel": draw(st.one_of(st.none(), st.integers(1, 900))),
    }
    if draw(st.booleans()):
        size = len(numels)
        arguments["shared"] = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    if draw(st.booleans()):
        arguments["param_alignment"] = draw(st.integers(1, 80))
        arguments["bucket_alignment"] = dp_size * draw(st.integers(1, 50))
    return arguments


def test_four_parameters_on_four_ranks_match_the_worked_example() -> None:
    # Parameters of 3 and 5 elements lead the buffer: the second one crosses the first border.
    plan = plan_buckets([2, 6, 5, 3], dp_size=4, param_alignment=1, bucket_alignment=4)
    text = plan.to_text() + "".join(plan.to_text(rank) for rank in range(4))
    assert text == (GOLDEN / "buffer_plan_four_params.txt").read_text()
    on_rank_0, on_rank_1 = plan.shard(0)[1], plan.shard(1)[0]
    assert (on_rank_0.world_start, on_rank_0.world_end) == (3, 4)
    assert (on_rank_0.local_start, on_rank_0.local_end) == (3, 4)
    assert (on_rank_0.param_start, on_rank_0.param_end) == (0, 1)
    assert (on_rank_1.world_start, on_rank_1.world_end) == (4, 8)
    assert (on_rank_1.local_start, on_rank_1.local_end) == (0, 4)
    assert (on_rank_1.param_start, on_rank_1.param_end) == (1, 5)


@given(plan_arguments())
def test_buckets_tile_the_buffer_in_reverse_parameter_order(arguments: dict[str, Any]) -> None:
    plan = plan_buckets(**arguments)
    position = 0
    placed: list[int] = []
    for bucket in plan.buckets:
        assert bucket.start == position
        assert 0 <= bucket.numel - bucket.numel_unpadded < plan.bucket_alignment
        placed += bucket.param_indices
        position = bucket.end
    assert position == plan.numel
    assert placed == list(reversed(range(len(arguments["numels"]))))


@given(plan_arguments())
def test_alignment_and_closing_rules_hold(arguments: dict[str, Any]) -> None:
    plan = plan_buckets(**arguments)
    shared = arguments.get("shared") or [False] * plan.num_params
    if "bucket_alignment" not in arguments:
        assert plan.bucket_alignment == math.lcm(plan.dp_size, 128)
    for bucket in plan.buckets:
        assert bucket.end % plan.bucket_alignment == 0
        assert bucket.end % plan.dp_size == 0
        for index in bucket.param_indices:
            start, end = plan.param_range(index)
            assert start % plan.param_alignment == 0
            assert end - start == arguments["numels"][index]
            is_last = index == bucket.param_indices[-1]
            assert is_last or end - bucket.start < plan.bucket_numel
            assert not shared[index] or bucket.param_indices == [index]
    for bucket in plan.buckets[:-1]:
        full = bucket.numel_unpadded >= plan.bucket_numel
        next_is_shared = shared[bucket.param_indices[-1] - 1]
        assert full or next_is_shared or shared[bucket.param_indices[0]]


@given(plan_arguments())
def test_every_parameter_element_is_owned_exactly_once(arguments: dict[str, Any]) -> None:
    plan = plan_buckets(**arguments)
    owned: list[list[tuple[int, int]]] = [[] for _ in arguments["numels"]]
    for rank in range(plan.dp_size):
        for piece in plan.shard(rank):
            param_start, _ = plan.param_range(piece.param_index)
            bucket = plan.buckets[piece.bucket]
            own_start, own_end = plan.shard_range(piece.bucket, dp_rank=rank)
            earlier = sum(b.numel for b in plan.buckets[: piece.bucket]) // plan.dp_size
            assert own_start <= piece.world_start < piece.world_end <= own_end
            assert piece.world_start == param_start + piece.param_start
            assert piece.world_start == bucket.start + piece.bucket_start
            assert piece.world_start == own_start + piece.local_start - earlier
            lengths = {
                piece.numel,
                piece.world_end - piece.world_start,
                piece.bucket_end - piece.bucket_start,
                piece.local_end - piece.local_start,
                piece.param_end - piece.param_start,
            }
            assert len(lengths) == 1
            assert piece.local_end <= plan.shard_numel
            owned[piece.param_index].append((piece.param_start, piece.param_end))
    for numel, ranges in zip(arguments["numels"], owned, strict=True):
        covered = 0
        for start, end in sorted(ranges):
            assert start == covered
            covered = end
        assert covered == numel


@given(plan_arguments())
def test_shards_tile_each_bucket_equally(arguments: dict[str, Any]) -> None:
    plan = plan_buckets(**arguments)
    for index, bucket in enumerate(plan.buckets):
        borders = [plan.shard_range(index, dp_rank=rank) for rank in range(plan.dp_size)]
        assert borders[0][0] == bucket.start
        assert borders[-1][1] == bucket.end
        assert all(a[1] == b[0] for a, b in itertools.pairwise(borders))
        assert len({end - start for start, end in borders}) == 1
    assert plan.shard_numel * plan.dp_size == plan.numel


@given(plan_arguments())
def test_the_plan_is_a_value(arguments: dict[str, Any]) -> None:
    first, second = plan_buckets(**arguments), plan_buckets(**arguments)
    assert first == second
    assert repr(first) == first.to_text()
    assert first.shard(0) == second.shard(0)


def same_layout(a: BufferPlan, b: BufferPlan) -> bool:
    ranges = [[p.param_range(i) for i in range(p.num_params)] for p in (a, b)]
    return a.buckets == b.buckets and ranges[0] == ranges[1]


@given(plan_arguments())
def test_one_shard_of_the_same_alignment_has_the_same_layout(arguments: dict[str, Any]) -> None:
    sharded = plan_buckets(**arguments)
    arguments |= {"dp_size": 1, "bucket_alignment": sharded.bucket_alignment}
    arguments |= {"bucket_numel": sharded.bucket_numel}
    whole = plan_buckets(**arguments)
    assert same_layout(sharded, whole)
    assert whole.shard_numel == sharded.numel


@pytest.mark.parametrize(("dp_size", "expected"), [(1, 40_000_000), (64, 64_000_000)])
def test_default_bucket_grows_with_the_number_of_ranks(dp_size: int, expected: int) -> None:
    assert plan_buckets([1], dp_size=dp_size).bucket_numel == expected


def test_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match="dp_size must be a number of ranks, at least 1, got 0"):
        plan_buckets([1], dp_size=0)
    with pytest.raises(ValueError, match="bucket_numel is 0; a bucket must hold at least 1"):
        plan_buckets([1], dp_size=1, bucket_numel=0)
    with pytest.raises(ValueError, match=r"multiple of dp_size = 4, e.g. 8"):
        plan_buckets([1], dp_size=4, bucket_alignment=6)
    with pytest.raises(ValueError, match="1 shared flags for 2 parameters"):
        plan_buckets([1, 2], dp_size=1, shared=[True])
    with pytest.raises(ValueError, match="parameter 1 has -1 elements"):
        plan_buckets([1, -1], dp_size=1)
    with pytest.raises(ValueError, match=r"at most 2\^60"):
        plan_buckets([2**60, 1], dp_size=1)
    plan = plan_buckets([1], dp_size=2)
    with pytest.raises(IndexError, match="parameter 1"):
        plan.param_range(1)
    with pytest.raises(IndexError, match="dp_rank 2"):
        plan.shard(2)
    with pytest.raises(IndexError, match="bucket 1"):
        plan.shard_range(1, dp_rank=0)


def test_a_large_model_is_planned_at_once() -> None:
    plan = plan_buckets([4096 * 4096, 4096] * 5000, dp_size=1024)
    assert plan.numel >= 5000 * (4096 * 4096 + 4096)
    assert len(plan.shard(511)) >= len(plan.buckets)
