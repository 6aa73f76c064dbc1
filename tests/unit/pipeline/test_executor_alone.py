"""The executor in one process: the same code without any message, its checks, and its recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.parallel import Group
from megacore.pipeline import (
    ActionRecorder,
    ActivationSpec,
    PipelineExecutor,
    Schedule,
    build_schedule,
    forward_backward,
)

SPEC = ActivationSpec(shape=(3, 4), dtype=torch.float32, device="cpu")
ForwardStep = Callable[[nn.Module, Tensor | None, int], Tensor]


def make_chunks(count: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Linear(4, 4) for _ in range(count)]


def make_step(last: nn.Module) -> ForwardStep:
    def step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        x = torch.full((3, 4), microbatch + 1.0) if hidden is None else hidden
        output = torch.tanh(chunk(x))
        return output.square().mean() if chunk is last else output

    return step


def one_rank(num_chunks: int, num_microbatches: int = 3) -> Schedule:
    return build_schedule(
        "interleaved_1f1b",
        num_ranks=1,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
    )


def make_executor(
    schedule: Schedule, chunks: list[nn.Module], recorder: ActionRecorder | None = None
) -> PipelineExecutor:
    return PipelineExecutor(
        schedule.program(0), chunks, group=Group.solo(), activation=SPEC, recorder=recorder
    )


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_one_rank_needs_no_process_group(num_chunks: int) -> None:
    chunks = make_chunks(num_chunks)
    losses = make_executor(one_rank(num_chunks), chunks).run(make_step(chunks[-1]))
    grads = [parameter.grad for chunk in chunks for parameter in chunk.parameters()]

    expected, plain = [], make_chunks(num_chunks)
    for microbatch in range(3):
        hidden = torch.full((3, 4), microbatch + 1.0)
        for chunk in plain:
            hidden = torch.tanh(chunk(hidden))
        loss = hidden.square().mean()
        loss.backward()
        expected.append(loss)
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected]
    assert not any(loss.requires_grad for loss in losses)
    plain_grads = [parameter.grad for chunk in plain for parameter in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(grads, plain_grads, strict=True))


def test_forward_only_leaves_no_gradient_and_gives_the_same_losses() -> None:
    chunks = make_chunks(2)
    executor, step = make_executor(one_rank(2), chunks), make_step(chunks[-1])
    seen: list[bool] = []

    def watching(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        output = step(chunk, hidden, microbatch)
        seen.append(output.requires_grad)
        return output

    losses = executor.run(watching, forward_only=True)
    assert seen == [False] * 6
    assert all(parameter.grad is None for chunk in chunks for parameter in chunk.parameters())
    assert [a.item() for a in losses] == [a.item() for a in executor.run(step)]
    evaluation = make_executor(one_rank(2).forward_only(), chunks)
    assert [a.item() for a in losses] == [a.item() for a in evaluation.run(step, forward_only=True)]
    with pytest.raises(ValueError, match="no backward passes; pass forward_only=True"):
        evaluation.run(step)


def test_the_convenience_function_does_the_same() -> None:
    chunks = make_chunks(1)
    losses = forward_backward(
        chunks, one_rank(1), make_step(chunks[-1]), group=Group.solo(), activation=SPEC
    )
    again = make_executor(one_rank(1), chunks).run(make_step(chunks[-1]), forward_only=True)
    assert [a.item() for a in losses] == [a.item() for a in again]


def test_a_frozen_first_stage_and_a_stage_that_ignores_its_input_work() -> None:
    chunks = make_chunks(3)
    chunks[0].requires_grad_(False)
    good = make_step(chunks[-1])

    def step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        return good(chunk, torch.ones(3, 4) if chunk is chunks[1] else hidden, microbatch)

    make_executor(one_rank(3), chunks).run(step)
    assert chunks[0].weight.grad is None
    assert chunks[1].weight.grad is not None
    assert chunks[2].weight.grad.abs().sum() > 0


def test_errors_name_the_action_and_the_executor_can_go_on() -> None:
    chunks = make_chunks(2)
    executor, good = make_executor(one_rank(2), chunks), make_step(chunks[-1])

    def failing(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        if chunk is chunks[1] and microbatch == 1:
            raise ZeroDivisionError("as planned")
        return good(chunk, hidden, microbatch)

    with pytest.raises(ZeroDivisionError) as failure:
        executor.run(failing)
    (note,) = failure.value.__notes__
    assert note.startswith("in pipeline action 1F1 (forward, stage 1, microbatch 1)")
    assert "on pipeline rank 0, step" in note
    assert len(executor.run(good)) == 3


def test_errors_of_the_backward_pass_name_the_action_too() -> None:
    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: object, _grad: Tensor) -> Tensor:
            raise ZeroDivisionError("in backward")

    chunks = make_chunks(1)
    good = make_step(chunks[-1])
    executor = make_executor(one_rank(1), chunks)
    with pytest.raises(ZeroDivisionError) as failure:
        executor.run(lambda chunk, hidden, mb: Explode.apply(good(chunk, hidden, mb)))
    assert "in pipeline action 0B0 (backward, stage 0" in failure.value.__notes__[0]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (torch.zeros(3, 4), r"the last stage returned \[3, 4\] torch.float32"),
        (torch.zeros((), dtype=torch.int64), r"the last stage returned \[\] torch.int64"),
    ],
)
def test_a_loss_must_be_one_float(output: Tensor, text: str) -> None:
    executor = make_executor(one_rank(1), make_chunks(1))
    with pytest.raises(ValueError, match=text):
        executor.run(lambda _chunk, _hidden, _mb: output, forward_only=True)


@pytest.mark.parametrize(
    "output", [torch.zeros(3, 5), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(12)]
)
def test_an_activation_must_be_as_announced(output: Tensor) -> None:
    executor = make_executor(one_rank(2), make_chunks(2))
    with pytest.raises(ValueError, match=r"stages exchange \[3, 4\] torch.float32 on cpu"):
        executor.run(lambda _chunk, _hidden, _mb: output, forward_only=True)


def test_the_shape_of_an_activation_may_be_a_list() -> None:
    spec = ActivationSpec(shape=[2, 3], dtype=torch.float32, device="cpu")
    spec.require(torch.zeros(2, 3), "the output")
    assert spec == ActivationSpec(shape=(2, 3), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(("shape", "dtype"), [((1,) * 9, torch.float32), ((2, 3), torch.complex64)])
def test_messages_that_no_header_describes_are_refused_before_a_rank_dies(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    schedule = build_schedule("interleaved_1f1b", num_ranks=1, num_chunks=2, num_microbatches=1)
    spec = ActivationSpec(shape=shape, dtype=dtype, device="cpu")
    with pytest.raises(ValueError, match="checked messages have up to 8 dimensions"):
        PipelineExecutor(
            schedule.program(0), None, group=Group.solo(), activation=spec, check_messages=True
        )


def test_programs_chunks_and_groups_must_belong_together() -> None:
    with pytest.raises(ValueError, match=r"runs the 2 stages \[0, 1\], but 1 model chunks"):
        make_executor(one_rank(2), make_chunks(1))
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match="that of rank 0 of 2, but this is position 0 of 1"):
        make_executor(schedule, make_chunks(1))


def test_the_recorder_has_every_action_in_order() -> None:
    chunks, recorder = make_chunks(2), ActionRecorder(rank=7)
    schedule = one_rank(2)
    make_executor(schedule, chunks, recorder).run(make_step(chunks[-1]))
    events = recorder.events()
    assert [event.action for event in events] == [str(action) for action in schedule.actions(0)]
    assert {event.rank for event in events} == {7}
    times = [time for event in events for time in (event.start_us, event.end_us)]
    assert times == sorted(times)
    recorder.clear()
    assert recorder.events() == []


def test_the_recorder_synchronizes_before_each_time_stamp() -> None:
    calls: list[None] = []
    recorder = ActionRecorder(rank=0, synchronize=lambda: calls.append(None))
    chunks = make_chunks(1)
    make_executor(one_rank(1, 2), chunks, recorder).run(make_step(chunks[-1]))
    assert len(calls) == 2 * 4


def test_activations_by_stage_must_be_complete() -> None:
    schedule, chunks = one_rank(3), make_chunks(3)

    def make(activation: dict[int, ActivationSpec]) -> PipelineExecutor:
        return PipelineExecutor(
            schedule.program(0), chunks, group=Group.solo(), activation=activation
        )

    make({0: SPEC, 1: SPEC}).run(make_step(chunks[-1]))
    with pytest.raises(ValueError, match=r"stages \[0, 2\], but those .* are \[0, 1\]"):
        make({0: SPEC, 2: SPEC})
    other = ActivationSpec(shape=(3, 4), dtype=torch.float32, device="meta")
    with pytest.raises(ValueError, match=r"names the devices \['cpu', 'meta'\]"):
        make({0: SPEC, 1: other})
    wide = ActivationSpec(shape=(3, 5), dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"is \[3, 4\] .* exchange \[3, 5\]"):
        make({0: SPEC, 1: wide}).run(make_step(chunks[-1]))


def test_numbers_of_tokens_add_up_and_come_from_the_last_stage_only() -> None:
    chunks = make_chunks(2)
    good, executor = make_step(chunks[-1]), make_executor(one_rank(2), chunks)

    def counting(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Any:
        output = good(chunk, hidden, microbatch)
        return (output, microbatch + 1) if chunk is chunks[-1] else output

    losses = executor.run(counting)
    assert losses.num_tokens.item() == 1 + 2 + 3
    assert executor.run(good).num_tokens is None
    with pytest.raises(ValueError, match="not the last one returned a tuple"):
        executor.run(lambda chunk, hidden, mb: (good(chunk, hidden, mb), 1))
    with pytest.raises(ValueError, match="the last stage returned 'no loss'"):
        executor.run(lambda c, h, mb: good(c, h, mb) if c is chunks[0] else "no loss")


def test_an_output_may_be_a_view_of_the_input() -> None:
    """Outputs are not kept, so nothing is freed under a view."""
    schedule = Schedule.from_text("rank 0: 0F0 1F0 2F0 2I0 2W0 1I0 1W0 0I0 0W0\n")
    chunks = make_chunks(3)
    good = make_step(chunks[-1])

    def step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        return hidden.view(3, 4) if chunk is chunks[1] else good(chunk, hidden, microbatch)

    make_executor(schedule, chunks).run(step)
    plain = make_chunks(3)
    x = torch.full((3, 4), 1.0)
    torch.tanh(plain[2](torch.tanh(plain[0](x)))).square().mean().backward()
    assert torch.equal(chunks[0].weight.grad, plain[0].weight.grad)
    assert torch.equal(chunks[2].bias.grad, plain[2].bias.grad)
    assert chunks[1].weight.grad is None
