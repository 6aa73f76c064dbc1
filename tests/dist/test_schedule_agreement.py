"""Ranks of a pipeline with different schedules: one error on all of them, before any message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.errors import ConfigError
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.process_groups import Group
from megacore.pipeline import (
    ActivationSpec,
    PipelineExecutor,
    Schedule,
    agreement,
    build_schedule,
    get_forward_backward_func,
)
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

SPEC = ActivationSpec(shape=(2, 3), dtype=torch.float32, device="cpu")


def pipeline_group(size: int, *, host_memory: bool = True) -> Group:
    topology = Topology(world_size=size, pp=size)
    return ProcessGroups.create(topology, timeout_s=20.0, host_memory=host_memory).pp


def make_executor(schedule: Schedule, group: Group) -> PipelineExecutor:
    program = schedule.program(group.position)
    return PipelineExecutor(program, None, group=group, activation=SPEC, schedule=schedule)


def evaluate(executor: PipelineExecutor, schedule: Schedule, group: Group) -> list[float]:
    """One step in which every stage adds one to zeros."""

    def forward_step(_chunk: nn.Module, hidden: Tensor | None, _microbatch: int) -> Tensor:
        output = (torch.zeros(SPEC.shape) if hidden is None else hidden) + 1
        return output.mean() if group.position == group.size - 1 else output

    chunks = [nn.Identity() for _ in schedule.stages(group.position)]
    return [x.item() for x in executor.run(forward_step, forward_only=True, chunks=chunks)]


def disagree(rank: int, schedules: list[Schedule], host_memory: bool) -> tuple[str, list[float]]:
    group = pipeline_group(len(schedules), host_memory=host_memory)
    with pytest.raises(ConfigError) as error:
        make_executor(schedules[rank], group)
    executor = make_executor(schedules[0], group)
    return str(error.value), evaluate(executor, schedules[0], group)


@pytest.mark.parametrize("host_memory", [True, False])
def test_every_rank_is_told_who_has_which_schedule(host_memory: bool) -> None:
    """Afterwards the group works on."""
    usual = build_schedule("1f1b", num_ranks=4, num_microbatches=4)
    other = build_schedule("1f1b", num_ranks=4, num_microbatches=5)
    # Its ranks have other peers: the first and the last rank exchange messages.
    loop = build_schedule("interleaved_1f1b", num_ranks=4, num_microbatches=4, num_chunks=2)
    results = run_ranks(4, disagree, [usual, other, usual, loop], host_memory)
    assert {text for text, _ in results} == {
        "group pp: the ranks of a pipeline have different schedules: 1f1b with 4 ranks, 1 chunk, 4 "
        "microbatches on ranks 0, 2; 1f1b with 4 ranks, 1 chunk, 5 microbatches on rank 1; "
        "interleaved_1f1b with 4 ranks, 2 chunks, 4 microbatches on rank 3. Give all of them the "
        "same settings, and make their executors in one order"
    }
    assert results[3][1] == [4.0] * 4


def test_another_order_of_the_same_sizes_is_told_apart() -> None:
    texts = (
        "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n",
        "rank 0: 0F1 0F0 0B1 0B0\nrank 1: 1F1 1F0 1B1 1B0\n",
    )
    (text, _), (same, _) = run_ranks(2, disagree, list(map(Schedule.from_text, texts)), True)
    assert text == same
    first, second = text.split(": ")[2].split(". ")[0].split("; ")
    assert first.replace("rank 0", "rank 1") != second
    for part, rank in ((first, 0), (second, 1)):
        assert " with 2 ranks, 1 chunk, 2 microbatches (order " in part
        assert part.endswith(f") on rank {rank}")


def agree(rank: int, schedules: list[Schedule]) -> list[float]:
    group = pipeline_group(2)
    return evaluate(make_executor(schedules[rank], group), schedules[rank], group)


def test_a_name_of_its_own_makes_no_other_schedule() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=3)
    renamed = Schedule.from_text(schedule.to_text().replace("name=1f1b", f"name={'é' * 30}"))
    assert run_ranks(2, agree, [schedule, renamed])[1] == [2.0] * 3


class Stage(nn.Linear):
    """A stage in the manner of Megatron-LM."""

    def set_input_tensor(self, hidden: Tensor | None) -> None:
        self.hidden = hidden


def forward_step(data: Any, chunk: Stage) -> tuple[Tensor, Any]:
    x = next(data) if chunk.hidden is None else chunk.hidden
    return chunk(x), lambda output: (output.mean(), None)


def steps_of_unequal_numbers(rank: int) -> tuple[list[int], str]:
    run_step = get_forward_backward_func("1f1b", group=pipeline_group(2), activation=SPEC)
    num_compared = 0
    all_gather = agreement.all_gather

    def counted(*args: Any) -> None:
        nonlocal num_compared
        num_compared += 1
        all_gather(*args)

    agreement.all_gather = counted  # type: ignore[assignment]

    def step(num_microbatches: int, *, forward_only: bool = False) -> int:
        run_step(
            forward_step_func=forward_step,
            data_iterator=iter([torch.ones(SPEC.shape)] * num_microbatches),
            model=Stage(3, 3),
            num_microbatches=num_microbatches,
            forward_only=forward_only,
        )
        return num_compared

    counts = [step(2, forward_only=True), step(2), step(2), step(3), step(3, forward_only=True)]
    counts.append(step(2))
    with pytest.raises(ConfigError) as error:
        step(4 + rank)
    return counts, str(error.value)


def test_schedules_are_compared_once_each() -> None:
    for counts, text in run_ranks(2, steps_of_unequal_numbers):
        assert counts == [1, 1, 1, 2, 2, 2]
        assert "1f1b with 2 ranks, 1 chunk, 4 microbatches on rank 0; 1f1b with 2 ranks" in text
