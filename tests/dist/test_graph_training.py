"""Training with captured layers or steps: the bits of eager training, in every layout.

The emulated backend fills released static tensors with NaN and refuses what a real graph would not
do, so a buffer reused too early, a skipped hook or a frozen number shows here without a GPU.
Gradients are reduced and weights collected during the passes (ZeRO-1 with both overlaps). That all
of this was on is asserted of every training (`tests/support/graph_evidence.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.graphs.observe import Recording
from megatrain.config import Config
from megatrain.models.layers import RMSNorm
from megatrain.train.trainer import build_trainer
from tests.support.campaigns import representatives
from tests.support.configs import changed_config
from tests.support.distributed import RankFailed, run_ranks
from tests.support.graph_evidence import (
    GATHERED,
    REDUCED,
    StaticTensors,
    Trained,
    check_poison,
    check_sharding,
    counted_transfers,
    run_steps,
    static_tensors,
)

pytestmark = pytest.mark.dist

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_hidden_size": 24,
        "seq_length": 8,
        "vocab_size": 256,
        "vocab_pad_multiple": 64,
        "dropout": 0.1,
    },
    "train": {
        "steps": 50,
        "microbatch_size": 1,
        "global_batch_size": 4,
        "eval_interval": 0,
        "eval_steps": 2,
    },
    "optimizer": {
        "lr": 2e-3,
        "warmup": 5,
        "overlap": "all",
        # Two buckets on every rank: a graph of a whole step starts the first where it needs it.
        "bucket_numel": 1000,
    },
}
EXPERTS = {
    "moe.num_experts": 4,
    "moe.top_k": 2,
    "moe.ffn_hidden_size": 8,
    "moe.layer_pattern": "d(e)",
    "moe.shared_ffn_hidden_size": 8,
    "moe.aux_loss_coef": 1e-2,
    "moe.jitter": 0.01,
}
STATIC = {**EXPERTS, "moe.dispatcher": "static", "moe.static_budget": 4.0}
CHUNKS = {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2}

Changes = dict[str, Any]
SOON: Changes = {"graphs.warmup_steps": 1}
FULL: Changes = {"mode": "full"}
WITH_STEP: Changes = {"mode": "full_step"}


def partial(scopes: str) -> Changes:
    return {"mode": "partial", "scopes": scopes.split(",")}


def scope_sets(*parts: tuple[str, ...]) -> list[Changes]:
    """All sets of scopes with at most one of each part, and both graphs of whole steps."""
    sets = [",".join(filter(None, chosen)) for chosen in itertools.product(*parts)]
    return [*map(partial, filter(None, sets)), FULL, WITH_STEP]


OF_DENSE = scope_sets(("", "attn"), ("", "mlp"))
OF_EXPERTS = scope_sets(
    ("", "attn"), ("", "mlp"), ("", "moe_router", "moe_router,moe_preprocess", "moe")
)
NUM_MICROBATCHES = (4, 8, 16)
# (pp, number of microbatches): number of chunks and data-parallel ranks. With the choice in
# `settings_of`, every set of scopes meets every pp, number of microbatches and number of chunks.
LAYOUTS = {
    (1, 4): (1, 2),
    (1, 8): (1, 2),
    (1, 16): (1, 2),
    (2, 4): (1, 1),
    (2, 8): (2, 2),
    (2, 16): (2, 1),
    (4, 4): (2, 1),
    (4, 8): (2, 1),
    (4, 16): (1, 1),
}


def layout_of(pp: int, num_microbatches: int) -> tuple[int, Changes]:
    """Processes and settings of a layout."""
    return laid_out(pp, num_microbatches, *LAYOUTS[pp, num_microbatches])


def laid_out(pp: int, num_microbatches: int, chunks: int, dp: int) -> tuple[int, Changes]:
    """The same for any numbers of chunks and data-parallel ranks."""
    changes = {
        "parallel.pp": pp,
        "model.num_layers": max(2, pp * chunks),
        "train.global_batch_size": num_microbatches * dp,
        **(CHUNKS if chunks > 1 else {}),
    }
    return pp * dp, changes


def settings_of(every: list[Changes], pp: int, num_microbatches: int) -> list[Changes]:
    """A third of the settings of graphs, another one for each number of microbatches."""
    first = (NUM_MICROBATCHES.index(num_microbatches) - (1, 2, 4).index(pp)) % 3
    return every[first::3]


def make_config(world_size: int, changes: Changes, graphs: Changes) -> Config:
    return changed_config(world_size, {**BASE, "graphs": graphs}, changes)


def train(
    world_size: int, changes: Changes, graphs: Changes, steps: int, *, compare_every: int = 1
) -> Trained:
    """Train, and make sure of what all these trainings are to have in common.

    Args:
        world_size: Number of ranks.
        changes: Of the model and layout.
        graphs: Settings of graphs; none for eager steps.
        steps: How many.
        compare_every: See `run_steps`.
    """
    config = make_config(world_size, changes, graphs)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    check_sharding(trainer)
    with counted_transfers() as transfers:
        numbers = run_steps(trainer, steps, compare_every=compare_every)
        static, num_poisoned = None, 0
        if graphs:
            assert trainer.graphs is not None
            assert any(note.startswith("captured") for note in trainer.graphs.notes)
            static, num_poisoned = static_tensors(trainer), check_poison(trainer)
            assert num_poisoned > 0 or static.graphs == 0
        if steps >= 20:
            numbers["validation at the end"] = trainer.mean_validation_loss(trainer.evaluate())
    assert transfers[REDUCED] > 0
    assert transfers[GATHERED] > 0
    return Trained(numbers=numbers, static=static, num_poisoned=num_poisoned, transfers=transfers)


def compare(
    rank: int, world_size: int, changes: Changes, settings: list[Changes], steps: int
) -> list[str]:
    """The settings of graphs that change a number."""
    del rank
    expected = train(world_size, changes, {}, steps)
    differences = []
    for graphs in settings:
        found = train(world_size, changes, graphs, steps, compare_every=10)
        if difference := found.difference(expected):
            differences.append(f"{graphs}: {difference}")
    return differences


def check(world_size: int, changes: Changes, settings: list[Changes], *, steps: int) -> None:
    """Train once without graphs and with each of the settings, all in one set of processes."""
    if steps < 20:
        changes = {**changes, **SOON}
    timeout_s = 240 + 2 * steps * len(settings)
    for differing in run_ranks(
        world_size, compare, world_size, changes, settings, steps, timeout_s=timeout_s
    ):
        assert differing == []


# Processes, changes of the model and layout, settings of graphs to be compared with eager steps.
LONG_RUNS: dict[str, tuple[int, Changes, list[Changes]]] = {
    "dense, dp 2, m 4": (2, {"train.global_batch_size": 8}, OF_DENSE),
    "static experts, ep 2, m 4": (
        2,
        {**STATIC, "parallel.ep": 2, "train.global_batch_size": 8},
        [partial("attn,mlp,moe"), WITH_STEP],
    ),
    "experts, pp 2, 2 chunks, m 4": (
        2,
        {**EXPERTS, **CHUNKS, "parallel.pp": 2, "model.num_layers": 4},
        [partial("attn,mlp,moe_router,moe_preprocess")],
    ),
    "pp 4, zb_h1, m 8": (
        4,
        {
            "parallel.pp": 4,
            "pipeline.schedule": "zb_h1",
            "train.global_batch_size": 8,
            "model.num_layers": 4,
        },
        [partial("attn,mlp")],
    ),
}


@pytest.mark.parametrize("name", representatives(LONG_RUNS, ["static experts, ep 2, m 4"]))
def test_graphs_change_no_bit_in_50_steps(name: str) -> None:
    world_size, changes, settings = LONG_RUNS[name]
    check(world_size, changes, settings, steps=50)


@pytest.mark.parametrize(("pp", "num_microbatches"), representatives(LAYOUTS, [(1, 4), (2, 4)]))
def test_every_set_of_scopes_in_every_kind_of_pipeline(pp: int, num_microbatches: int) -> None:
    world_size, changes = layout_of(pp, num_microbatches)
    changes["parallel.ep"] = LAYOUTS[pp, num_microbatches][1]
    settings = settings_of(OF_EXPERTS, pp, num_microbatches)
    whole = {"moe", "full", "full_step"}
    reads = [s for s in settings if pp == 2 and not whole & {s["mode"], *s.get("scopes", ())}]
    check(world_size, {**changes, **STATIC}, [s for s in settings if s not in reads], steps=4)
    if reads:  # these leave room for the host to read sizes
        check(world_size, {**changes, **EXPERTS}, reads, steps=4)


MLA = {
    "model.num_kv_heads": 2,
    "model.mla": {
        "kv_rank": 8,
        "q_rank": 12,
        "nope_head_dim": 4,
        "rope_head_dim": 4,
        "v_head_dim": 6,
    },
}
AFTER = {
    "model.norm_position": "after",
    "model.qk_norm": "full",
    "model.num_kv_heads": 2,
}
SINKS = {
    **STATIC,
    "model.attention_sinks": True,
    "model.sliding_window": 4,
    "moe.activation": "clamped_swiglu",
    "moe.biases": True,
    "moe.shared_ffn_hidden_size": 0,
}
CHUNKS = {
    **STATIC,
    "model.sliding_window": 3,
    "model.window_pattern": "wf",
    "model.window_type": "chunk",
    "model.rotation_pattern": "rn",
    "model.query_scaling.beta": 0.5,
    "model.query_scaling.length": 2,
    "model.qk_norm": "unit",
    "moe.scale_inputs": True,
}
ARCHITECTURES: dict[str, tuple[Changes, list[Changes]]] = {
    "latent attention, tp 2": ({**MLA, "parallel.tp": 2}, [partial("attn"), FULL]),
    "latent attention and experts": (
        {**MLA, **STATIC, "parallel.ep": 2},
        [partial("attn,mlp,moe"), partial("attn,moe_router,moe_preprocess"), WITH_STEP],
    ),
    "latent attention, two stages": ({**MLA, "parallel.pp": 2}, [partial("attn,mlp")]),
    "norms after blocks, tp 2": ({**AFTER, "parallel.tp": 2}, [partial("attn,mlp"), FULL]),
    "sinks and biases": (
        {**SINKS, "parallel.ep": 2},
        [partial("attn,moe"), partial("attn,moe_router")],
    ),
    "chunks, scaled queries and inputs": (
        {**CHUNKS, "parallel.ep": 2},
        [partial("attn,moe"), partial("attn,moe_router"), WITH_STEP],
    ),
}


@pytest.mark.parametrize(
    "name",
    representatives(ARCHITECTURES, ["latent attention and experts"]),
)
def test_graphs_of_other_architectures_change_no_bit(name: str) -> None:
    changes, settings = ARCHITECTURES[name]
    check(2, {"train.global_batch_size": 8, **changes}, settings, steps=4)


@pytest.mark.parametrize(
    ("pp", "num_microbatches"), representatives([(1, 8), (2, 4), (4, 16)], [(1, 8), (2, 4)])
)
def test_every_set_of_scopes_of_a_model_without_experts(pp: int, num_microbatches: int) -> None:
    settings = settings_of(OF_DENSE, pp, num_microbatches)
    check(*layout_of(pp, num_microbatches), settings, steps=4)


def counted(
    rank: int, world_size: int, every: dict[int, Changes], graphs: Changes
) -> dict[int, StaticTensors]:
    """Static tensors after a captured step, by the number of microbatches."""
    del rank
    found = {}
    for num_microbatches, changes in every.items():
        config = make_config(world_size, changes, graphs)
        trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
        run_steps(trainer, 2)
        found[num_microbatches] = static_tensors(trainer)
    return found


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("pp", representatives([1, 2, 4], [1, 2]))
def test_as_many_static_tensors_for_any_number_of_microbatches(pp: int, chunks: int) -> None:
    """Those of a training, on every rank, as soon as a step has the peak of live microbatches."""
    every = {m: {**laid_out(pp, m, chunks, 1)[1], **SOON} for m in NUM_MICROBATCHES}
    graphs = partial("attn,mlp")
    for by_number in run_ranks(pp, counted, pp, every, graphs, timeout_s=120):
        fewest, *counts = (by_number[m] for m in NUM_MICROBATCHES)
        assert len(set(counts)) == 1
        assert 0 < counts[0].peak <= 2 * pp
        if counts[0].peak <= NUM_MICROBATCHES[0]:
            assert fewest == counts[0]
        else:  # four microbatches, each with static tensors of its own
            assert fewest.peak == NUM_MICROBATCHES[0]
            assert 0 < fewest.inputs < counts[0].inputs


def plant_a_wait() -> None:
    RMSNorm.forward = wait  # type: ignore[method-assign]


def wait(self: RMSNorm, x_SBH: Tensor, *added: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    x_SBH = x_SBH + added[0] if added else x_SBH
    y = x_SBH * self.weight * float(x_SBH.abs().max().item() < 1e30)
    return (x_SBH, y) if added else y


def plant_an_error() -> None:
    """Let layers raise where the emulated backend records them, and nowhere else."""
    capture, forward, recording = Recording.capture, RMSNorm.forward, [False]

    @contextmanager
    def noted(self: Recording) -> Iterator[None]:
        recording[0] = True
        try:
            with capture(self):
                yield
        finally:
            recording[0] = False

    def fail(self: RMSNorm, *x: Tensor) -> Any:
        if recording[0]:
            raise TypeError("planted")
        return forward(self, *x)

    Recording.capture = noted  # type: ignore[method-assign]
    RMSNorm.forward = fail  # type: ignore[method-assign]


def compare_with_a_mistake(
    rank: int, world_size: int, changes: Changes, graphs: Changes, plant: Callable[[], None]
) -> str:
    """Plant a mistake on the last rank only; return what all are told."""
    if rank == world_size - 1:
        plant()
    expected = train(world_size, changes, {}, 4)
    config = make_config(world_size, changes, graphs)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    for step in range(4):
        metrics = trainer.train_step(step)
    assert metrics.loss == expected.numbers["loss of step 4"]
    assert metrics.grad_norm == expected.numbers["gradient norm of step 4"]
    assert trainer.graphs is not None
    return trainer.graphs.notes[-1]


@pytest.mark.parametrize(
    ("mode", "changes", "plant", "said"),
    [
        ("partial", {"parallel.pp": 2}, plant_a_wait, "reads a number from the device"),
        ("partial", {"parallel.tp": 2}, plant_a_wait, "reads a number from the device"),
        ("full", {"parallel.pp": 2}, plant_a_wait, "reads a number from the device"),
        ("partial", {"parallel.pp": 2}, plant_an_error, "TypeError: planted"),
    ],
)
def test_a_rank_that_cannot_capture_takes_the_others_along(
    mode: str, changes: Changes, plant: Callable[[], None], said: str
) -> None:
    graphs, changes = {"mode": mode, "on_failure": "eager"}, {**changes, **SOON}
    if "parallel.tp" in changes:
        changes = {**changes, "model.num_kv_heads": 2}
    told = run_ranks(2, compare_with_a_mistake, 2, changes, graphs, plant, timeout_s=120)
    assert "goes on without graphs: another rank could not capture: rank 1: " in told[0]
    for text in told:
        assert said in text
        assert "test_graph_training.py:" in text


def stop_in_the_middle(rank: int, world_size: int, changes: Changes) -> None:
    if rank == world_size - 1:
        plant_an_error()
    train(world_size, {**changes, **SOON}, {**FULL, "on_failure": "eager"}, 4)


@pytest.mark.parametrize("changes", [{"parallel.pp": 2}, {"train.global_batch_size": 8}])
def test_a_rank_that_stops_in_the_middle_of_a_step_ends_the_run_at_once(changes: Changes) -> None:
    """Its messages are missing, so no rank could go on; none waits until a timeout."""
    with pytest.raises(
        RankFailed,
        match=r"(?s)rank 1 raised:.*CaptureError: .*TypeError: planted.*other ranks wait",
    ):
        run_ranks(2, stop_in_the_middle, 2, changes, timeout_s=60)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        (EXPERTS, [partial("attn,moe_router,moe_preprocess")]),
        pytest.param(
            STATIC, [partial("attn,mlp,moe"), FULL, WITH_STEP], marks=pytest.mark.campaign
        ),
    ],
)
def test_parts_of_layers_and_of_sequences(changes: Changes, settings: list[Changes]) -> None:
    """Collectives inside of what is captured: tensor, sequence, context and expert parallel."""
    layout = {
        "model.num_kv_heads": 2,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "parallel.cp": 2,
        "parallel.ep": 2,
    }
    check(4, {**layout, **changes}, settings, steps=4)
