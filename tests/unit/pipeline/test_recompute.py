"""Which microbatches are recomputed, and that nothing else is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.parallel import Group, ProcessGroups
from megacore.pipeline import (
    ActionKind,
    ActivationSpec,
    Lowering,
    PipelineExecutor,
    Recompute,
    build_schedule,
)
from megatrain.config import MoEConfig
from megatrain.models.gpt import GPTChunk
from tests.support.models import params_by_name, random_batch, tiny_config
from tests.support.storages import Storages

NUM_MICROBATCHES = 4
MODEL = tiny_config(dropout=0.1, num_layers=4, qk_norm="head")
MOE = MoEConfig(
    num_experts=4,
    top_k=2,
    ffn_hidden_size=16,
    layer_pattern="dd(e)",
    shared_ffn_hidden_size=16,
    aux_loss_coef=1e-2,
    z_loss_coef=1e-3,
    expert_bias=True,
    jitter=0.1,
)
PARTS = frozenset({"norm", "attention", "activation", "moe"})


class Counted(nn.Module):
    """How often the attention of the layers ran."""

    def __init__(self, chunks: list[GPTChunk]) -> None:
        super().__init__()
        self.num_runs = 0
        for chunk in chunks:
            for layer in chunk.layers:
                layer.attention.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_runs += 1


def run(
    schedule_name: str, *, recompute: frozenset[str], keep: int, num_chunks: int = 1
) -> tuple[list[float], dict[str, Tensor], int, int, list[Any]]:
    """Losses, gradients, runs of attention, bytes before the first backward pass, counts."""
    schedule = build_schedule(
        schedule_name, num_ranks=1, num_microbatches=NUM_MICROBATCHES, num_chunks=num_chunks
    )
    length = MODEL.num_layers // num_chunks
    chunks = [
        GPTChunk(
            MODEL,
            layers=range(stage * length, (stage + 1) * length),
            has_embedding=stage == 0,
            has_head=stage == num_chunks - 1,
            groups=ProcessGroups.single(),
            moe=MOE,
            recompute=recompute,
        )
        for stage in range(num_chunks)
    ]
    lowering = Lowering(receives="ahead", recompute=Recompute(keep=keep))
    program = schedule.lower(lowering)[0]
    dropped = {(a.stage, a.microbatch) for a in program.actions if a.kind == ActionKind.RECOMPUTE}
    executor = PipelineExecutor(
        program,
        chunks,
        group=Group.solo(),
        activation=ActivationSpec(
            shape=(MODEL.seq_length, 3, MODEL.hidden_size), dtype=torch.float32, device="cpu"
        ),
    )
    counted, most = Counted(chunks), 0

    def forward_step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
        batch = random_batch(MODEL, step=microbatch)
        keeps = (chunks.index(chunk), microbatch) not in dropped
        return chunk(hidden, batch, keep_activations=keeps)

    def before_backward(_stage: int, _microbatch: int) -> None:
        nonlocal most
        most = most or storages.live_bytes()

    with Storages(*(p for chunk in chunks for p in chunk.parameters())) as storages:
        losses = executor.run(forward_step, before_backward=before_backward)
    grads = {name: parameter.grad for name, parameter in params_by_name(*chunks).items()}
    counts = [
        (layer.tokens_per_expert.tolist(), layer.router.tokens_seen.tolist(), layer.losses.tolist())
        for chunk in chunks
        for layer in chunk.moe_layers().values()
    ]
    executor.run(forward_step, forward_only=True)
    counted.num_runs -= MODEL.num_layers * NUM_MICROBATCHES
    return [loss.item() for loss in losses], grads, counted.num_runs, most, counts


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_v", "looped_bfs"])
@pytest.mark.parametrize("parts", [frozenset({"layer"}), PARTS], ids=["full", "selective"])
def test_recomputation_changes_no_bit_and_counts_nothing_twice(
    name: str, parts: frozenset[str]
) -> None:
    num_chunks = 2 if name in ("zb_v", "looped_bfs") else 1
    expected = run(name, recompute=frozenset(), keep=0, num_chunks=num_chunks)
    found = run(name, recompute=parts, keep=0, num_chunks=num_chunks)
    assert found[0] == expected[0]
    for tensor_name, grad in expected[1].items():
        assert torch.equal(found[1][tensor_name], grad), tensor_name
    assert found[4] == expected[4]
    assert found[2] == 2 * expected[2], "each attention runs once more, in split passes, too"


def test_memory_and_work_follow_the_plan() -> None:
    """GPipe holds all four microbatches; of these `keep` are held in full."""
    plain = run("gpipe", recompute=frozenset(), keep=0)
    work, memory = [], []
    for keep in range(NUM_MICROBATCHES + 1):
        found = run("gpipe", recompute=frozenset({"layer"}), keep=keep)
        assert found[0] == plain[0]
        work.append(found[2] // MODEL.num_layers)
        memory.append(found[3])
    assert work == [8, 7, 6, 5, 4]
    assert memory[4] == plain[3]
    steps = [later - earlier for earlier, later in pairwise(memory)]
    assert all(step == pytest.approx(steps[0], rel=0.05) for step in steps), memory
    assert memory[0] < 0.25 * memory[4], memory


def test_parts_of_layers_save_less_than_layers() -> None:
    plain = run("gpipe", recompute=frozenset(), keep=0)[3]
    default = run("gpipe", recompute=frozenset({"norm", "attention", "activation"}), keep=0)[3]
    full = run("gpipe", recompute=frozenset({"layer"}), keep=0)[3]
    assert full < default < 0.8 * plain
