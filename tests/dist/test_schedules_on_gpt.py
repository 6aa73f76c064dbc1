"""Every schedule trains a GPT of four stages, and computes what a run without a pipeline does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from megacore.parallel import ProcessGroups, Topology
from megacore.pipeline import (
    ActionKind,
    ActivationSpec,
    PipelineExecutor,
    Schedule,
    build_schedule,
    partition_layers,
    schedule_catalog,
)
from megatrain.config import ModelConfig
from megatrain.models import gpt
from megatrain.models.gpt import GPTChunk
from tests.support.distributed import run_ranks
from tests.support.models import params_by_name, random_batch, tiny_config

pytestmark = pytest.mark.dist

NUM_STAGES, NUM_MICROBATCHES, BATCH = 4, 8, 2
Grads = dict[str, Tensor]


def config(dropout: float) -> ModelConfig:
    return tiny_config(
        hidden_size=16, num_layers=4, seq_length=8, dropout=dropout, tie_embeddings=False
    )


def stage_chunk(model: ModelConfig, stage: int) -> GPTChunk:
    layers = partition_layers(model.num_layers, num_ranks=NUM_STAGES)
    return GPTChunk(
        model,
        layers=layers[stage],
        has_embedding=stage == 0,
        has_head=stage == NUM_STAGES - 1,
        groups=ProcessGroups.single(),
    )


def forward_step(model: ModelConfig) -> Callable[[nn.Module, Tensor | None, int], Tensor]:
    def step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        output = chunk(hidden, random_batch(model, batch=BATCH, step=microbatch))
        return output / NUM_MICROBATCHES if output.dim() == 0 else output

    return step


def grads_of(chunks: Iterable[GPTChunk]) -> Grads:
    return {name: p.grad.clone() for name, p in params_by_name(*chunks).items()}


@cache
def reference(dropout: float) -> tuple[list[float], Grads]:
    """No pipeline: plain autograd, microbatch after microbatch."""
    model = config(dropout)
    chunks, step, losses = (
        [stage_chunk(model, stage) for stage in range(NUM_STAGES)],
        forward_step(model),
        [],
    )
    for microbatch in range(NUM_MICROBATCHES):
        hidden = None
        for chunk in chunks:
            hidden = step(chunk, hidden, microbatch)
        hidden.backward()
        losses.append(hidden.item())
    return losses, grads_of(chunks)


def all_schedules(num_ranks: int) -> list[Schedule]:
    """Every named schedule that places this model's four stages on so many ranks."""
    schedules = []
    for info in schedule_catalog():
        chains = 2 if info.placement == "bidirectional" else 1
        num_chunks = NUM_STAGES * chains // num_ranks
        if info.num_chunks not in (0, num_chunks) or (num_ranks > 1) == (
            info.name == "no_pipelining"
        ):
            continue
        if num_ranks == 1 and info.placement != "loop":
            continue
        schedules.append(
            build_schedule(
                info.name,
                num_ranks=num_ranks,
                num_microbatches=NUM_MICROBATCHES,
                num_chunks=num_chunks,
            )
        )
    return schedules


def adds_in_order(schedule: Schedule) -> bool:
    """Whether every stage adds gradients in the order of the microbatches, as one process does."""
    adding = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
    for rank in range(schedule.num_ranks):
        for stage in schedule.stages(rank):
            numbers = [
                action.microbatch
                for action in schedule.actions(rank)
                if action.stage == stage and action.kind in adding
            ]
            if numbers != sorted(numbers):
                return False
    return schedule.num_chains == 1


def run_all(
    rank: int, schedules: list[Schedule], receives: str, debug: bool, channels: bool
) -> list[tuple[list[float], Grads, list[float]]]:
    size = schedules[0].num_ranks
    groups = ProcessGroups.create(
        Topology(world_size=size, pp=size), timeout_s=40.0, pp_channels=channels
    )
    results = []
    for schedule in schedules:
        for dropout in (0.0, 0.2):
            model = config(dropout)
            chunks = [stage_chunk(model, s % NUM_STAGES) for s in schedule.stages(rank)]
            executor = PipelineExecutor(
                schedule.program(rank, receives=receives),
                chunks,
                group=groups.pp,
                activation=ActivationSpec(
                    shape=(model.seq_length, BATCH, model.hidden_size),
                    dtype=torch.float32,
                    device="cpu",
                ),
                channels=groups.pp_channels,
                check_messages=debug,
            )
            losses = [loss.item() for loss in executor.run(forward_step(model))]
            grads = {
                f"{stage // NUM_STAGES}/{name}": grad
                for stage, chunk in zip(schedule.stages(rank), chunks, strict=True)
                for name, grad in grads_of([chunk]).items()
            }
            evaluated = executor.run(forward_step(model), forward_only=True)
            results.append((losses, grads, [loss.item() for loss in evaluated]))
    return results


def check(
    schedules: list[Schedule],
    receives: str = "ahead",
    *,
    debug: bool = False,
    channels: bool = False,
) -> None:
    size = schedules[0].num_ranks
    results = run_ranks(size, run_all, schedules, receives, debug, channels, timeout_s=120.0)
    cases = [(schedule, dropout) for schedule in schedules for dropout in (0.0, 0.2)]
    for number, (schedule, dropout) in enumerate(cases):
        expected_losses, expected = reference(dropout)
        of_ranks = [result[number] for result in results]
        # Of two chains the first one, which ends on the last rank, has the first microbatches.
        in_order = reversed(of_ranks) if schedule.num_chains == 2 else of_ranks
        losses, evaluated = [], []
        for rank_losses, _, rank_evaluated in in_order:
            losses += rank_losses
            evaluated += rank_evaluated
        assert losses == evaluated == expected_losses, schedule.name
        total: Grads = {}
        for _, grads, _ in of_ranks:
            for key, grad in grads.items():
                name = key.partition("/")[2]
                total[name] = total[name] + grad if name in total else grad
        assert total.keys() == expected.keys()
        for name, grad in expected.items():
            if adds_in_order(schedule):
                assert torch.equal(total[name], grad), (schedule.name, dropout, name)
            else:
                error = (total[name] - grad).norm() / grad.norm()
                assert error < 1e-6, (schedule.name, dropout, name)


def test_four_stages_on_four_ranks() -> None:
    schedules = all_schedules(4)
    names = {schedule.name for schedule in schedules}
    assert {"gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved_zb", "dualpipe"} <= names
    in_order = {schedule.name for schedule in schedules if adds_in_order(schedule)}
    assert {"gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved_zb"} <= in_order
    check(schedules)


def test_four_stages_with_logits_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "block_columns", lambda *_: 7)
    reference.cache_clear()
    try:
        check(all_schedules(4))
    finally:
        reference.cache_clear()


def test_four_stages_on_two_ranks_of_two_chunks() -> None:
    schedules = all_schedules(2)
    names = {schedule.name for schedule in schedules}
    assert {"interleaved_1f1b", "zb_v", "v_half", "v_min", "1f1b_v", "dualpipe_v"} <= names
    check(schedules)


def test_four_stages_on_one_rank() -> None:
    check(all_schedules(1))


def test_other_transports_give_the_same() -> None:
    schedules = [schedule for schedule in all_schedules(2) if schedule.name in ("zb_v", "1f1b_v")]
    check(schedules, receives="in_order")
    check(schedules, debug=True)


def test_channels_of_two_give_the_same() -> None:
    names = ("gpipe", "zb_h1", "dualpipe")
    check([schedule for schedule in all_schedules(4) if schedule.name in names], channels=True)


def test_every_named_schedule_is_covered() -> None:
    covered = {schedule.name for size in (1, 2, 4) for schedule in all_schedules(size)}
    assert covered == {info.name for info in schedule_catalog()}
