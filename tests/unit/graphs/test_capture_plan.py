"""Capture plans of real schedules: how many graphs and buffers, and that microbatches do not count.

What lies in a buffer when it is read is checked by the native tests on random orders.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.graphs import BufferRole, StepKind, plan_capture, static_bytes
from megacore.pipeline import build_schedule


def order_of(name: str, rank: int, **arguments: int) -> list[int]:
    return build_schedule(name, **arguments).order(rank)


@given(
    num_ranks=st.integers(2, 6),
    num_chunks=st.integers(1, 3),
    rounds=st.integers(1, 4),
    data=st.data(),
)
def test_input_buffers_are_the_peak_of_live_microbatches(
    num_ranks: int, num_chunks: int, rounds: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, num_ranks - 1))
    num_microbatches = rounds * num_ranks
    name = "1f1b" if num_chunks == 1 else "interleaved_1f1b"
    chunks = {} if num_chunks == 1 else {"num_chunks": num_chunks, "group_size": num_ranks}
    order = order_of(name, rank, num_ranks=num_ranks, num_microbatches=num_microbatches, **chunks)
    plan = plan_capture(order, reuse="buffers")
    if num_chunks == 1:
        expected = min(num_ranks - rank, num_microbatches)
    else:
        warmup = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks
        expected = min(warmup + 1, num_chunks * num_microbatches)
    assert len(plan.buffer_signatures(BufferRole.INPUT)) == expected
    rings = plan_capture(order)
    assert rings.slots_per_chunk == rings.peak_per_chunk == plan.peak_per_chunk
    assert len(rings.captures) == 2 * sum(rings.peak_per_chunk)


@pytest.mark.parametrize("reuse", ["buffers", "graphs"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "interleaved_zb", "zb_h1"])
def test_buffers_do_not_grow_with_microbatches(name: str, reuse: str) -> None:
    chunks = {"num_chunks": 2} if name.startswith("interleaved") else {}
    counts = set()
    for num_microbatches in (16, 32, 64):
        for rank in range(4):
            schedule = build_schedule(
                name, num_ranks=4, num_microbatches=num_microbatches, **chunks
            )
            plan = plan_capture(order_with_halves(schedule, rank), reuse=reuse)
            counts.add((rank, *(len(plan.buffer_signatures(role)) for role in BufferRole)))
    assert len(counts) == 4


def order_with_halves(schedule: object, rank: int) -> list[float]:
    """The order list of a schedule that may split backward passes."""
    entries: list[float] = []
    for action in schedule.actions(rank):
        chunk = action.stage // schedule.num_ranks + 1
        kind = action.kind.name
        entries.append(
            {"FORWARD": chunk, "BACKWARD": -chunk, "BACKWARD_INPUT": -chunk}.get(kind, -chunk - 0.5)
        )
    return entries


def test_graphs_per_layer_without_and_with_reuse() -> None:
    order = order_of("interleaved_1f1b", 0, num_ranks=4, num_microbatches=64, num_chunks=2)
    assert len(plan_capture(order, reuse="none").captures) == 2 * 128
    plan = plan_capture(order)
    assert plan.peak_per_chunk == [8, 4]
    assert len(plan.captures) == 2 * 12
    kinds = [plan.captures[index].kind for index in plan.replays(0)]
    assert kinds == [StepKind.FORWARD]


def test_predicted_bytes_count_each_buffer_once() -> None:
    plan = plan_capture(
        [1, 2, -2, -1],
        num_layers_per_chunk=[2, 1],
        input_signature=[0, 1, 1],
        output_signature=[1, 1, 0],
    )
    found = static_bytes(plan, input_bytes=[1, 10], output_bytes=[100, 1000])
    assert found[BufferRole.INPUT] == 1 + 10 + 10
    assert found[BufferRole.OUTPUT] == 1000 + 1000 + 100
    split = plan_capture([1, 1, -1, -1.5, -1, -1.5], num_layers_per_chunk=2)
    sizes = static_bytes(split, input_bytes=[1], output_bytes=[1], kept_bytes=[10, 1000])
    assert sizes[BufferRole.KEPT] == 2 * 10 + 2 * 1000
    with pytest.raises(ValueError, match="signature 0 of kept buffers has no size; 0 were given"):
        static_bytes(split, input_bytes=[1], output_bytes=[1])
    with pytest.raises(ValueError, match="signature 1 of output buffers has no size; 1 were given"):
        static_bytes(plan, input_bytes=[1, 10], output_bytes=[100])


def test_bad_orders_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"order position 2: -1.5 in 1 -1 \[-1.5\]|position 3"):
        plan_capture([1, -1, -1.5, -1.5])
    with pytest.raises(ValueError, match=r"\[-2\] -1 is a backward pass without a forward pass"):
        plan_capture([1, -2, -1])
    with pytest.raises(
        ValueError, match="layers_per_chunk has 2 entries, but the order list has 1"
    ):
        plan_capture([1, -1], num_layers_per_chunk=[1, 1])
    with pytest.raises(ValueError, match="there are 1 input signatures for 2 layers"):
        plan_capture([1, -1], num_layers_per_chunk=2, input_signature=[0])
    with pytest.raises(ValueError, match='reuse "all" is unknown'):
        plan_capture([1, -1], reuse="all")
