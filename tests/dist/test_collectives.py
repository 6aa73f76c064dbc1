"""Collectives and messages on real ranks, on gloo and through shared memory, against arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megacore.parallel import Group, ProcessGroups, Topology
from megacore.parallel.async_collectives import reduce_scatter_async
from megacore.parallel.collectives import (
    all_gather,
    all_gather_objects,
    all_reduce_,
    barrier,
    broadcast_,
    gather_objects,
    irecv,
    isend,
    reduce_scatter,
)
from megacore.parallel.host.gloo_messages import chunk_length
from tests.support.distributed import run_ranks

WORLD = 4
OnEveryRank = Callable[..., list[Any]]


@pytest.fixture(params=["gloo", "shared memory"])
def on_every_rank(request: pytest.FixtureRequest) -> OnEveryRank:
    """Calls ``function(rank, world, *args)`` on four ranks; returns the results by rank."""

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        return run_ranks(WORLD, call_with_world, request.param, function, *args)

    return run


def call_with_world(rank: int, path: str, function: Callable[..., Any], *args: Any) -> Any:
    wants_memory = path == "shared memory"
    group = ProcessGroups.create(Topology(world_size=WORLD), host_memory=wants_memory).world
    assert (group.host is not None) == wants_memory, group.host_note
    return function(rank, group, *args)


def values_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Different, reproducible values per rank; small whole numbers for integer dtypes."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 20, (numel,), generator=generator).to(dtype)


def left_to_right(parts: list[Tensor]) -> Tensor:
    """The sum in the order of ranks, in float32 for low precision."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total


def reduce_all(
    rank: int, group: Group, op: Literal["sum", "max", "avg"], dtype: torch.dtype
) -> Tensor:
    tensor = values_of(rank, 1001, dtype)
    all_reduce_(tensor, group, op=op)
    return tensor


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_all_reduce_sum_and_max(on_every_rank: OnEveryRank, dtype: torch.dtype) -> None:
    inputs = torch.stack([values_of(rank, 1001, dtype) for rank in range(WORLD)])
    for result in on_every_rank(reduce_all, "sum", dtype):
        assert result.dtype == dtype
        expected = inputs.double().sum(0)
        tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5}.get(dtype, 1e-12)
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    for result in on_every_rank(reduce_all, "max", dtype):
        assert torch.equal(result, inputs.max(0).values)


@pytest.mark.dist
def test_all_reduce_avg_divides_by_the_group(on_every_rank: OnEveryRank) -> None:
    inputs = torch.stack([values_of(rank, 1001, torch.float32) for rank in range(WORLD)])
    for result in on_every_rank(reduce_all, "avg", torch.float32):
        torch.testing.assert_close(result, inputs.mean(0))


@pytest.mark.dist
def test_low_precision_sums_are_rounded_once_and_equal_everywhere(
    on_every_rank: OnEveryRank,
) -> None:
    # 256 + 1 + 1 + 1 = 259 lies between 258 and 260; adding one at a time in bfloat16 stays at 256.
    assert on_every_rank(sum_of_256_and_ones) == [260.0] * WORLD


def sum_of_256_and_ones(rank: int, group: Group) -> float:
    tensor = torch.tensor([256.0 if rank == 2 else 1.0], dtype=torch.bfloat16)
    all_reduce_(tensor, group)
    return tensor.item()


def reduce_and_scatter(
    rank: int, group: Group, op: Literal["sum", "avg"], dtype: torch.dtype, out: torch.dtype
) -> Tensor:
    output = torch.empty(25, 2, dtype=out)
    reduce_scatter(output, values_of(rank, 50 * WORLD, dtype), group, op=op)
    return output


@pytest.mark.dist
@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.int64, torch.int64),
    ],
)
def test_reduce_scatter_adds_in_rank_order_bit_for_bit(
    on_every_rank: OnEveryRank, dtype: torch.dtype, out: torch.dtype
) -> None:
    total = left_to_right([values_of(rank, 50 * WORLD, dtype) for rank in range(WORLD)])
    for rank, result in enumerate(on_every_rank(reduce_and_scatter, "sum", dtype, out)):
        assert torch.equal(result.flatten(), total[50 * rank : 50 * rank + 50].to(out))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_large_slices_are_added_in_rank_order_and_in_place(
    on_every_rank: OnEveryRank, dtype: torch.dtype, out: torch.dtype
) -> None:
    for same in on_every_rank(reduce_large, dtype, out):
        assert same == [True] * len(same)


def reduce_large(rank: int, group: Group, dtype: torch.dtype, out: torch.dtype) -> list[bool]:
    """Reduce several chunks of a message and a rest, also with two reductions in flight."""
    numel = 2 * chunk_length(WORLD, dtype.itemsize) + 1000
    inputs = [values_of(member, numel * WORLD, dtype) for member in range(WORLD)]
    wanted = left_to_right(inputs).view(WORLD, -1)[rank]
    buffers = [inputs[rank].clone() for _ in range(3)]
    outputs = [torch.empty(numel, dtype=out) for _ in buffers]
    if dtype == out:
        outputs = [buffer.view(WORLD, -1)[rank] for buffer in buffers]
    pending = [
        reduce_scatter_async(outputs[0], buffers[0], group),
        reduce_scatter_async(outputs[1], buffers[1], group, op="avg"),
    ]
    reduce_scatter(outputs[2], buffers[2], group)
    for collective in pending:
        collective.wait()
    means = (wanted / WORLD).to(out)
    results = [outputs[0], outputs[2]]
    return [torch.equal(x, wanted.to(out)) for x in results] + [torch.equal(outputs[1], means)]


@pytest.mark.dist
def test_reduce_scatter_avg_divides_before_it_rounds(on_every_rank: OnEveryRank) -> None:
    total = left_to_right([values_of(rank, 50 * WORLD, torch.bfloat16) for rank in range(WORLD)])
    expected = (total / WORLD).to(torch.bfloat16)
    results = on_every_rank(reduce_and_scatter, "avg", torch.bfloat16, torch.bfloat16)
    assert torch.equal(torch.cat(results).flatten(), expected)


@pytest.mark.dist
def test_reduce_scatter_and_all_gather_work_in_place(on_every_rank: OnEveryRank) -> None:
    expected = left_to_right([values_of(rank, 8 * WORLD, torch.float32) for rank in range(WORLD)])
    for result in on_every_rank(in_place_round_trip):
        assert torch.equal(result, expected)


def in_place_round_trip(rank: int, group: Group) -> Tensor:
    buffer = values_of(rank, 8 * WORLD, torch.float32)
    mine = buffer[8 * rank : 8 * rank + 8]
    reduce_scatter(mine, buffer, group)
    all_gather(buffer, mine, group)
    return buffer


@pytest.mark.dist
def test_all_gather_concatenates_along_dimension_0(on_every_rank: OnEveryRank) -> None:
    for result in on_every_rank(gather_rows):
        assert result[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert result.shape == (8, 3)


def gather_rows(rank: int, group: Group) -> Tensor:
    output = torch.empty(2 * WORLD, 3, dtype=torch.bfloat16)
    all_gather(output, torch.full((2, 3), rank, dtype=torch.bfloat16), group)
    return output


@pytest.mark.dist
def test_broadcast_takes_the_value_at_the_position(on_every_rank: OnEveryRank) -> None:
    assert on_every_rank(broadcast_from_each) == [[0, 1, 2, 3]] * WORLD


def broadcast_from_each(rank: int, group: Group) -> list[int]:
    found = []
    for source in range(WORLD):
        tensor = torch.tensor([rank])
        broadcast_(tensor, group, source_position=source)
        found.append(int(tensor.item()))
    return found


@pytest.mark.dist
def test_objects_arrive_in_the_order_of_positions(on_every_rank: OnEveryRank) -> None:
    results = on_every_rank(collect_objects)
    everyone = [f"rank {rank}" for rank in range(WORLD)]
    assert [gathered for gathered, _ in results] == [everyone, [], [], []]
    assert all(copies == everyone for _, copies in results)


def collect_objects(rank: int, group: Group) -> tuple[list[str], list[str]]:
    barrier(group)
    return gather_objects(f"rank {rank}", group), all_gather_objects(f"rank {rank}", group)


@pytest.mark.dist
def test_positions_count_within_the_group_not_the_world() -> None:
    # Groups {0, 2} and {1, 3}: position 1 is rank 2 or 3.
    assert run_ranks(WORLD, exchange_within_pairs) == [2.0, 3.0, 0.0, 1.0]


def exchange_within_pairs(rank: int) -> float:
    group = ProcessGroups.create(Topology(world_size=WORLD, tp=2)).dp
    other = 1 - group.position
    received = torch.empty(1)
    works = [
        isend(torch.tensor([float(rank)]), group, to_position=other, tag=0),
        irecv(received, group, from_position=other, tag=0),
    ]
    for work in works:
        work.wait()
    source = torch.tensor([float(rank)])
    broadcast_(source, group, source_position=1)
    assert source.item() == group.ranks[1]
    return received.item()


@pytest.mark.dist
def test_messages_with_tags_may_be_received_out_of_order(on_every_rank: OnEveryRank) -> None:
    assert on_every_rank(tagged_ring) == [
        [10 * ((rank - 1) % WORLD) + 1, 10 * ((rank - 1) % WORLD) + 2] for rank in range(WORLD)
    ]


def tagged_ring(rank: int, group: Group) -> list[float]:
    after, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    sent = [torch.tensor([10.0 * rank + tag]) for tag in (1, 2)]
    received = {tag: torch.empty(1) for tag in (1, 2)}
    works = [isend(sent[tag - 1], group, to_position=after, tag=tag) for tag in (1, 2)]
    works += [irecv(received[tag], group, from_position=before, tag=tag) for tag in (2, 1)]
    for work in works:
        work.wait()
    return [received[1].item(), received[2].item()]


def wrong_calls(group: Group) -> list[tuple[Callable[[], object], str]]:
    four, eight = torch.zeros(4), torch.zeros(8)
    turned = torch.zeros(4, 2).t()
    tiny = torch.zeros(4).to(torch.float8_e4m3fn)
    whole = torch.zeros(8, dtype=torch.int64)
    return [
        (
            lambda: reduce_scatter(four, eight, group),
            "input [8] float32 has 8 elements; it needs 4 x 4 = 16",
        ),
        (
            lambda: all_gather(eight, four, group),
            "output [8] float32 has 8 elements; it needs 4 x 4 = 16",
        ),
        (
            lambda: all_gather(torch.zeros(2, 8), four, group),
            "needs an output [16] float32, got [2, 8] float32",
        ),
        (
            lambda: all_gather(torch.zeros(16, dtype=torch.bfloat16), four, group),
            "needs an output [16] float32, got [16] bfloat16",
        ),
        (lambda: all_reduce_(turned, group), "strides [1, 2] is not contiguous"),
        (lambda: all_reduce_(tiny, group), "dtype float8_e4m3fn, which cannot be communicated"),
        (lambda: all_reduce_(whole, group, op="avg"), "needs a floating point tensor, got int64"),
        (lambda: all_reduce_(four, group, op="mean"), "unknown op 'mean'"),  # type: ignore[arg-type]
        (lambda: reduce_scatter(four, eight, group, op="max"), "unknown op 'max'"),  # type: ignore[arg-type]
        (
            lambda: reduce_scatter(torch.zeros(2, device="meta"), eight, group),
            "output is on meta but input on cpu",
        ),
        (lambda: broadcast_(four, group, source_position=4), "must be in [0, 4)"),
        (
            lambda: isend(four, group, to_position=group.position, tag=0),
            f"to_position {group.position} is this rank itself",
        ),
        (lambda: irecv(four, group, from_position=-1, tag=0), "must be in [0, 4)"),
        (
            lambda: isend(four, group, to_position=(group.position + 1) % 4, tag=-1),
            "tag must be at least 0, got -1",
        ),
        (
            lambda: irecv(turned, group, from_position=(group.position + 1) % 4, tag=0),
            "is not contiguous",
        ),
    ]


@pytest.mark.dist
def test_wrong_calls_are_refused_before_the_backend_sees_them(on_every_rank: OnEveryRank) -> None:
    assert on_every_rank(messages_of_wrong_calls) == [[]] * WORLD


def messages_of_wrong_calls(rank: int, group: Group) -> list[str]:
    """The expectations that failed. The group must work afterwards."""
    failed = []
    for call, expected in wrong_calls(group):
        try:
            call()
        except ValueError as error:
            text = str(error)
            names_the_place = "unknown op" in text or "output is on" in text or "op 'avg'" in text
            if expected not in text or not (names_the_place or f"here rank {rank}" in text):
                failed.append(f"{expected!r} not in {text!r}")
        else:
            failed.append(f"nothing raised, wanted {expected!r}")
    total = torch.ones(1)
    all_reduce_(total, group)
    assert total.item() == WORLD
    return failed


def test_a_group_of_one_copies_or_does_nothing() -> None:
    group = Group.solo(rank=7)
    tensor = torch.arange(6.0)
    all_reduce_(tensor, group, op="avg")
    broadcast_(tensor, group)
    barrier(group)
    assert tensor.tolist() == list(range(6))
    output = torch.empty(2, 3, dtype=torch.bfloat16)
    reduce_scatter(output, tensor, group)
    assert output.flatten().tolist() == list(range(6))
    gathered = torch.empty(6)
    all_gather(gathered, tensor, group)
    assert torch.equal(gathered, tensor)
    all_gather(tensor, tensor, group)
    assert gather_objects("x", group) == all_gather_objects("x", group) == ["x"]
    with pytest.raises(ValueError, match="is this rank itself"):
        isend(tensor, group, to_position=0, tag=0)


def test_parameters_may_be_reduced_in_place() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    output = torch.nn.Parameter(torch.zeros(4))
    reduce_scatter(output, parameter, Group.solo())
    assert output.tolist() == [1.0] * 4
