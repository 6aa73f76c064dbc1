"""The executor on gloo: a pipeline computes exactly what one process computes."""

from __future__ import annotations

import gc
import itertools
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.process_groups import Group
from megacore.pipeline import (
    ActionRecorder,
    ActivationSpec,
    PipelineExecutor,
    Schedule,
    TimedAction,
    build_schedule,
    forward_backward,
)
from megatrain.view import timeline_svg
from tests.support.distributed import RankFailed, run_ranks

pytestmark = pytest.mark.dist

WIDTH, BATCH = 6, 3
SPEC = ActivationSpec(shape=(BATCH, WIDTH), dtype=torch.float32, device="cpu")
Grads = dict[str, Tensor]

CASES = [
    ("gpipe", 2, 1, 4),
    ("1f1b", 2, 1, 5),
    ("interleaved_1f1b", 2, 2, 4),
    ("gpipe", 4, 1, 3),
    ("1f1b", 4, 1, 8),
    ("1f1b", 4, 1, 2),
    ("interleaved_1f1b", 4, 2, 6),
    ("interleaved_1f1b", 4, 3, 4),
]


def make_stage(stage: int) -> nn.Module:
    generator = torch.Generator().manual_seed(100 + stage)
    linear = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return linear


def data(microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    both = torch.randn(2, BATCH, WIDTH, generator=generator)
    return both[0], both[1]


def make_forward_step(
    last: nn.Module | None, num_microbatches: int
) -> Callable[[nn.Module, Tensor | None, int], Tensor]:
    def forward_step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        x, target = data(microbatch)
        output = torch.tanh(chunk(x if hidden is None else hidden))
        if chunk is last:
            return F.mse_loss(output, target) / num_microbatches
        return output

    return forward_step


def grads_of(chunks: dict[int, nn.Module]) -> Grads:
    return {
        f"{stage}.{name}": parameter.grad.clone()
        for stage, chunk in chunks.items()
        for name, parameter in chunk.named_parameters()
        if parameter.grad is not None
    }


def run_alone(num_stages: int, num_microbatches: int) -> tuple[list[float], Grads]:
    """No pipeline: microbatch after microbatch through all stages, by plain autograd."""
    stages = [make_stage(stage) for stage in range(num_stages)]
    losses = []
    for microbatch in range(num_microbatches):
        hidden, target = data(microbatch)
        for stage in stages:
            hidden = torch.tanh(stage(hidden))
        loss = F.mse_loss(hidden, target) / num_microbatches
        loss.backward()
        losses.append(loss.item())
    return losses, grads_of(dict(enumerate(stages)))


def pipeline_group(rank: int, size: int, *, host_memory: bool = True) -> Group:
    groups = ProcessGroups.create(
        Topology(world_size=size, pp=size), timeout_s=20.0, host_memory=host_memory
    )
    assert groups.pp.position == rank
    return groups.pp


def my_chunks(schedule: Schedule, rank: int) -> tuple[dict[int, nn.Module], nn.Module | None]:
    chunks = {stage: make_stage(stage) for stage in schedule.stages(rank)}
    return chunks, chunks.get(schedule.num_stages - 1)


def run_pipeline(
    rank: int, schedule: Schedule, receives: str, host_memory: bool
) -> tuple[list[float], Grads, list[float], Grads]:
    """Train two steps and evaluate in between; returns first losses and grads, then the others."""
    group = pipeline_group(rank, schedule.num_ranks, host_memory=host_memory)
    chunks, last = my_chunks(schedule, rank)
    executor = PipelineExecutor(
        schedule.program(rank, receives=receives),
        list(chunks.values()),
        group=group,
        activation=SPEC,
    )
    forward_step = make_forward_step(last, schedule.num_microbatches)
    losses = [loss.item() for loss in executor.run(forward_step)]
    grads = grads_of(chunks)
    evaluation = executor.run(forward_step, forward_only=True)
    assert all(not loss.requires_grad for loss in evaluation)
    for chunk in chunks.values():
        chunk.zero_grad()
    again = [loss.item() for loss in executor.run(forward_step)]
    assert again == [loss.item() for loss in evaluation]
    return losses, grads, again, grads_of(chunks)


@pytest.mark.parametrize("host_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize(("name", "pp", "chunks", "microbatches"), CASES)
def test_pipeline_equals_one_process_bit_for_bit(
    name: str, pp: int, chunks: int, microbatches: int, host_memory: bool
) -> None:
    schedule = build_schedule(name, num_ranks=pp, num_chunks=chunks, num_microbatches=microbatches)
    expected_losses, expected_grads = run_alone(schedule.num_stages, microbatches)
    results = run_ranks(pp, run_pipeline, schedule, "ahead", host_memory)
    assert results[-1][0] == expected_losses
    assert results[-1][2] == expected_losses
    assert all(losses == [] for losses, *_ in results[:-1])
    for which in (1, 3):
        grads: Grads = {}
        for result in results:
            grads |= result[which]
        assert grads.keys() == expected_grads.keys()
        for key, value in expected_grads.items():
            assert torch.equal(grads[key], value), key


@pytest.mark.parametrize("host_memory", [True, False], ids=["shared", "gloo"])
def test_receives_in_order_give_the_same(host_memory: bool) -> None:
    schedule = build_schedule("interleaved_1f1b", num_ranks=2, num_chunks=2, num_microbatches=5)
    expected_losses, expected_grads = run_alone(4, 5)
    results = run_ranks(2, run_pipeline, schedule, "in_order", host_memory)
    assert results[-1][0] == expected_losses
    assert all(
        torch.equal((results[0][1] | results[1][1])[k], g) for k, g in expected_grads.items()
    )


def test_v_placement_hands_over_on_the_rank_that_holds_both_stages() -> None:
    schedule = Schedule.from_text(
        "rank 0: 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\nrank 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1\n"
    )
    expected_losses, expected_grads = run_alone(4, 2)
    results = run_ranks(2, run_pipeline, schedule, "ahead", True)
    assert results[0][0] == expected_losses  # rank 0 holds the last stage
    assert results[1][0] == []
    assert all(
        torch.equal((results[0][1] | results[1][1])[k], g) for k, g in expected_grads.items()
    )


def run_recorded(rank: int, schedule: Schedule) -> list[TimedAction]:
    group = pipeline_group(rank, 2)
    chunks, last = my_chunks(schedule, rank)
    recorder = ActionRecorder(rank=rank)

    def slow_step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        time.sleep(0.02 if rank == 0 else 0.001)
        return make_forward_step(last, schedule.num_microbatches)(chunk, hidden, microbatch)

    forward_backward(
        list(chunks.values()), schedule, slow_step, group=group, activation=SPEC, recorder=recorder
    )
    return recorder.events()


def test_recorder_separates_compute_from_waiting() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=4)
    events: list[list[TimedAction]] = run_ranks(2, run_recorded, schedule)
    for rank in range(2):
        compute = [event for event in events[rank] if "RECV" not in event.action]
        assert [event.action for event in compute] == [str(a) for a in schedule.actions(rank)]
        assert all(event.end_us >= event.start_us for event in events[rank])
        ends = [event.end_us for event in compute]
        assert ends == sorted(ends)
    forwards = [
        e.end_us - e.start_us for e in events[0] if "F" in e.action and "RECV" not in e.action
    ]
    assert min(forwards) >= 19_000
    # Rank 1 is fast and waits for rank 0: that time belongs to its receives.
    waits = [e.end_us - e.start_us for e in events[1] if "RECV_F" in e.action]
    assert max(waits) >= 10_000
    assert "rank 1" in timeline_svg(events[0] + events[1])


def fail_in_forward(rank: int, schedule: Schedule) -> None:
    group = pipeline_group(rank, 2)
    chunks, last = my_chunks(schedule, rank)
    good = make_forward_step(last, schedule.num_microbatches)

    def forward_step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        if rank == 1 and microbatch == 2:
            raise KeyError("no such sample")
        return good(chunk, hidden, microbatch)

    executor = PipelineExecutor(
        schedule.program(rank), list(chunks.values()), group=group, activation=SPEC
    )
    executor.run(forward_step)


def test_an_error_in_forward_step_names_the_action() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=4)
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, fail_in_forward, schedule)
    text = str(failure.value)
    assert "KeyError: 'no such sample'" in text
    assert (
        "in pipeline action 1F2 (forward, stage 1, microbatch 2) on pipeline rank 1, step" in text
    )


def connect_to_a_dead_rank(rank: int, schedule: Schedule, host_memory: bool) -> str:
    group = pipeline_group(rank, 2, host_memory=host_memory)
    dist.all_reduce(torch.zeros(1), group=group.handle)  # the ranks are connected
    if rank == 1:
        os._exit(1)
    try:
        PipelineExecutor(schedule.program(rank), None, group=group, activation=SPEC)
    except RuntimeError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return ""


@pytest.mark.parametrize(
    ("host_memory", "named"),
    [
        (True, "lost a peer: the process of rank 1 (position 1, pid "),
        (False, "\nwhile opening the channel to pipeline rank 1 (rank 1)"),
    ],
    ids=["shared", "gloo"],
)
def test_a_rank_that_is_gone_before_the_first_step_is_named(host_memory: bool, named: str) -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    text = run_ranks(2, connect_to_a_dead_rank, schedule, host_memory, may_die={1})[0]
    assert named in text


def send_wrong_shape(rank: int, schedule: Schedule) -> str:
    group = pipeline_group(rank, 2)
    executor = PipelineExecutor(
        schedule.program(rank), [make_stage(rank)], group=group, activation=SPEC
    )
    if rank == 1:
        return ""
    try:
        executor.run(lambda chunk, _hidden, _microbatch: chunk(torch.zeros(BATCH + 1, WIDTH)))
    except ValueError as error:
        return "\n".join([str(error), *error.__notes__])
    return "no error"


def test_a_wrong_shape_is_refused_before_it_is_sent() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    text = run_ranks(2, send_wrong_shape, schedule)[0]
    assert "the output is [4, 6] torch.float32 on cpu, but stages exchange [3, 6]" in text
    assert "in pipeline action 0F0" in text


def run_other_order(rank: int) -> None:
    """Rank 0 sends the microbatches in order, rank 1 expects them in another one."""
    group = pipeline_group(rank, 2)
    texts = (
        "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n",
        "rank 0: 0F1 0F0 0B1 0B0\nrank 1: 1F1 1F0 1B1 1B0\n",
    )
    schedule = Schedule.from_text(texts[rank])
    chunks, last = my_chunks(schedule, rank)
    executor = PipelineExecutor(
        schedule.program(rank),
        list(chunks.values()),
        group=group,
        activation=SPEC,
        check_messages=True,
    )
    executor.run(make_forward_step(last, 2))


def test_debug_mode_names_both_messages_that_do_not_match() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, run_other_order)
    assert (
        "RuntimeError: pipeline rank 1 expected message 0, 1RECV_F1 (input of stage 1, microbatch "
        "1, [3, 6] torch.float32), but pipeline rank 0 sent message 0, 1RECV_F0 (input of stage 1, "
        "microbatch 0, [3, 6] torch.float32); the two ranks run programs that do not belong "
        "together"
    ) in str(failure.value)


WIDTHS = {0: 5, 1: 7, 2: 4}  # of the output of each stage but the last


def run_uneven(rank: int, schedule: Schedule, debug: bool) -> tuple[list[float], Grads]:
    group = pipeline_group(rank, schedule.num_ranks)
    torch.manual_seed(3)
    widths = [WIDTH, *WIDTHS.values(), WIDTH]
    every = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    chunks = {stage: every[stage] for stage in schedule.stages(rank)}
    executor = PipelineExecutor(
        schedule.program(rank),
        list(chunks.values()),
        group=group,
        activation={
            stage: ActivationSpec(shape=(BATCH, width), dtype=torch.float32, device="cpu")
            for stage, width in WIDTHS.items()
        },
        check_messages=debug,
    )
    last = chunks.get(schedule.num_stages - 1)
    losses = executor.run(make_forward_step(last, schedule.num_microbatches))
    return [loss.item() for loss in losses], grads_of(chunks)


@pytest.mark.parametrize("debug", [False, True])
def test_stages_may_exchange_different_shapes(debug: bool) -> None:
    schedule = build_schedule("zb_v", num_ranks=2, num_microbatches=4)
    alone = build_schedule("no_pipelining", num_ranks=1, num_chunks=4, num_microbatches=4)
    (expected,) = run_ranks(1, run_uneven, alone, False)
    results = run_ranks(2, run_uneven, schedule, debug)
    assert results[0][0] == expected[0]
    grads = results[0][1] | results[1][1]
    assert all(torch.equal(grads[key], grad) for key, grad in expected[1].items())


class Watched(torch.autograd.Function):
    """Keeps what it was given until its backward pass, as a layer does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (_,) = ctx.saved_tensors
        return grad.clone()


def count_alive(rank: int, schedule: Schedule) -> tuple[int, int, int]:
    """The most inputs and the most outputs of stages alive at once, and what is left at the end."""
    group = pipeline_group(rank, schedule.num_ranks)
    chunks, last = my_chunks(schedule, rank)
    good = make_forward_step(last, schedule.num_microbatches)
    inputs, outputs = weakref.WeakSet[Any](), weakref.WeakSet[Any]()
    peaks = [0, 0]

    def forward_step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        x = data(microbatch)[0] if hidden is None else hidden
        inputs.add(x.untyped_storage())
        peaks[0] = max(peaks[0], len(inputs))
        output = good(chunk, Watched.apply(x) if x.requires_grad else x, microbatch)
        output = output.clone()  # nothing in the graph keeps this one
        if chunk is not last:
            outputs.add(output.untyped_storage())
            peaks[1] = max(peaks[1], len(outputs))
        return output

    gc.disable()
    try:
        forward_backward(
            list(chunks.values()), schedule, forward_step, group=group, activation=SPEC
        )
        return peaks[0], peaks[1], len(inputs) + len(outputs)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_memory_is_bounded_by_what_the_schedule_holds(name: str) -> None:
    schedule = build_schedule(name, num_ranks=3, num_microbatches=12)
    held = schedule.simulate().peak_in_flight
    for rank, (inputs, outputs, left) in enumerate(run_ranks(3, count_alive, schedule)):
        assert 1 <= inputs <= held[rank]
        # An output lives until its receiver is known to have it: a round trip, not a backward.
        assert (rank < 2) <= outputs <= schedule.num_ranks - rank + 1
        assert left == 0


def evaluate_with_one_output(rank: int, num_microbatches: int, host_memory: bool) -> list[float]:
    """The first stage writes every output into the same memory; the second is slow to read it."""
    group = pipeline_group(rank, 2, host_memory=host_memory)
    size = 1 << 16  # more than a message that gloo sends at once
    held = torch.zeros(size)

    def step(_chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        if hidden is not None:
            time.sleep(0.02)
            return hidden.mean()
        return held.fill_(microbatch)

    executor = PipelineExecutor(
        build_schedule("1f1b", num_ranks=2, num_microbatches=num_microbatches).program(rank),
        [nn.Identity()],
        group=group,
        activation=ActivationSpec(shape=(size,), dtype=torch.float32, device="cpu"),
    )
    return [loss.item() for loss in executor.run(step, forward_only=True)]


@pytest.mark.parametrize("host_memory", [True, False], ids=["shared", "gloo"])
def test_in_evaluation_a_module_may_write_its_output_over_the_one_before(host_memory: bool) -> None:
    # More messages than a channel in shared memory has slots.
    assert run_ranks(2, evaluate_with_one_output, 9, host_memory)[1] == list(map(float, range(9)))
