"""The executor on a GPU: the results of one process, and times that cover the queued work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megacore.parallel import Group
from megacore.pipeline import (
    ActionRecorder,
    ActivationSpec,
    PipelineExecutor,
    build_schedule,
    receives_for,
)

pytestmark = pytest.mark.gpu

SIZE = 4096


def make_chunks() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2)]


def x_of(microbatch: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(microbatch)
    return torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16, generator=generator)


def test_two_chunks_on_one_gpu_equal_plain_autograd_and_are_timed() -> None:
    schedule = build_schedule("interleaved_1f1b", num_ranks=1, num_chunks=2, num_microbatches=3)
    chunks = make_chunks()

    def step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        output = chunk(x_of(microbatch) if hidden is None else hidden)
        return output.float().square().mean() if chunk is chunks[-1] else output

    spec = ActivationSpec(shape=(SIZE, SIZE), dtype=torch.bfloat16, device="cuda")
    assert receives_for(Group.solo(), spec) == "ahead"
    recorder = ActionRecorder(rank=0, synchronize=torch.cuda.synchronize)
    executor = PipelineExecutor(
        schedule.program(0), chunks, group=Group.solo(), activation=spec, recorder=recorder
    )
    executor.run(step)
    for chunk in chunks:
        chunk.zero_grad()
    recorder.clear()
    losses = executor.run(step)

    plain = make_chunks()
    for microbatch, loss in enumerate(losses):
        expected = plain[1](plain[0](x_of(microbatch))).float().square().mean()
        expected.backward()
        assert torch.equal(loss, expected.detach())
    for mine, theirs in zip(chunks, plain, strict=True):
        assert torch.equal(mine.weight.grad, theirs.weight.grad)

    # One product of this size is 0.14 Tflop: no GPU of today does it in less than 40 us.
    durations = {event.action: event.end_us - event.start_us for event in recorder.events()}
    assert min(durations.values()) > 40
    assert durations["1B2"] > durations["1F2"] * 1.2
