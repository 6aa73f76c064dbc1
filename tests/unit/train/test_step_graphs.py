"""Graphs in training: bits, predicted bytes, planted mistakes, settings."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.buffers import StaleWeightsError
from megacore.errors import ConfigError, MegacoreError
from megacore.graphs import BufferRole, FullIterationGraph, ReplayError, StepOrder, plan_capture
from megacore.graphs.layer import CapturedLayer
from megacore.graphs.replay import GraphedCallable
from megacore.moe.dispatchers import LocalDispatcher
from megacore.ops.counter_random import StepKeys
from megacore.ops.cuda_module import DeviceFacts, assume_device
from megacore.ops.kernel_choice import leaving
from megacore.optim import DistributedOptimizer
from megacore.parallel.batch import Microbatch
from megacore.pipeline import ActionRecorder, build_schedule
from megatrain.config import Config, ResolvedConfig
from megatrain.config.graph_rules import graph_scopes
from megatrain.models.layers import ResidualDropout
from megatrain.train import graphs as graphs_of_steps
from megatrain.train.trainer import Trainer
from tests.support.graphed_training import (
    EXPERTS,
    FULL,
    OVERLAPS,
    PARTIAL,
    STATIC,
    STEPS,
    WITH_STEP,
    make_trainer,
    run,
)


@pytest.mark.parametrize(
    ("graphs", "changes"),
    [
        (PARTIAL, {"train": {"recompute": ["selective"]}}),
        (PARTIAL, {"train": {"recompute": ["full"]}}),
        (FULL, {"train": {"recompute": ["full"]}}),
        (PARTIAL, {"train": {"loss_normalization": "token"}, "moe": EXPERTS}),
        (FULL, {"train": {"loss_normalization": "token"}, "moe": STATIC}),
        (PARTIAL, {"train": {"dtype": "float16"}}),
        (FULL, {"train": {"dtype": "float16"}}),
        (PARTIAL, {"moe": {**EXPERTS, "dispatcher": "allgather", "expert_bias": True}}),
        (FULL, {"moe": {**STATIC, "expert_bias": True, "jitter": 0.1}}),
        (PARTIAL, {"model": {"num_mtp_layers": 1}}),
        (FULL, {"optimizer": OVERLAPS}),
        (WITH_STEP, {"optimizer": {**OVERLAPS, "warmup": 4, "clip_grad": 0.1}}),
        (WITH_STEP, {"train": {"dtype": "float16"}, "optimizer": {"loss_scale_interval": 2}}),
        (WITH_STEP, {"train": {"dtype": "bfloat16"}, "optimizer": {"moments_dtype": "bfloat16"}}),
        (WITH_STEP, {"optimizer": {"name": "lion", "lr": 3e-4}}),
        (WITH_STEP, {"optimizer": {"name": "muon"}}),
        (WITH_STEP, {"optimizer": {"name": "adamw_8bit"}}),
        (WITH_STEP, {"train": {"loss_normalization": "token"}, "moe": STATIC}),
        (WITH_STEP, {"model": {"num_mtp_layers": 1}, "optimizer": {"distributed": False}}),
    ],
)
def test_graphs_change_no_bit(graphs: dict[str, Any], changes: dict[str, Any]) -> None:
    trainer, plain = make_trainer(graphs, **changes), make_trainer(**changes)
    assert repr(run(trainer)) == repr(run(plain))  # a skipped step may have the norm NaN
    assert trainer.optimizer.scalars() == plain.optimizer.scalars()
    assert trainer.graphs is not None
    assert trainer.graphs.includes_update is (graphs["mode"] == "full_step")
    assert any(note.startswith("captured") for note in trainer.graphs.take_notes())


def test_layers_that_are_recomputed_in_graphs_count_once() -> None:
    changes: dict[str, Any] = {
        "moe": {**STATIC, "z_loss_coef": 0.1},
        "train": {"recompute": ["full"]},
    }
    trainers = [
        make_trainer({"mode": "partial", "scopes": ["attn", "moe"]}, **changes),
        make_trainer(**changes),
    ]
    for step in range(3):
        graphed, plain = (trainer.train_step(step).experts for trainer in trainers)
        assert graphed is not None
        assert plain is not None
        assert (graphed.load, graphed.z_loss) == (plain.load, plain.z_loss)


def test_predicted_bytes_are_the_measured_ones() -> None:
    whole = {"mode": "partial", "scopes": ["attn", "moe"]}
    for moe, graphs in (({}, PARTIAL), (EXPERTS, PARTIAL), (STATIC, PARTIAL), (STATIC, whole)):
        trainer = make_trainer(graphs, moe=moe)
        run(trainer, 2)
        assert trainer.graphs is not None
        partial, predicted = trainer.graphs.partial, trainer.graphs.predicted
        assert partial is not None
        assert predicted is not None
        measured = partial.static_bytes()
        assert predicted.num_graphs == partial.num_graphs
        assert predicted.static_inputs == measured["static_inputs"]
        boundary = measured["output_grads"] + measured["results"]
        assert predicted.boundary == pytest.approx(boundary, rel=0.05)


@pytest.mark.parametrize("graphs", [FULL, WITH_STEP])
@pytest.mark.parametrize("eval_interval", [0, 1])
def test_predicted_inputs_of_a_step_are_the_measured_ones(
    graphs: dict[str, Any], eval_interval: int
) -> None:
    trainer = make_trainer(graphs, train={"eval_interval": eval_interval})
    trainer.train_step(0)
    trainer.train_step(1)
    if eval_interval > 0:
        trainer.mean_validation_loss(trainer.evaluate())
    assert trainer.graphs is not None
    predicted, measured = trainer.graphs.predicted, trainer.graphs.measured
    assert predicted is not None
    assert measured is not None
    assert measured.num_graphs == predicted.num_graphs
    assert measured.static_inputs == predicted.static_inputs
    notes = trainer.graphs.take_notes()
    assert notes[0].startswith("capturing")
    assert f"static inputs {measured.static_inputs / 2**20:.1f} (" in notes[-1]


def test_what_weight_halves_wait_for_is_predicted_too() -> None:
    for moe in ({}, EXPERTS):
        whole, split = (
            make_trainer(PARTIAL, moe=moe, pipeline={"schedule": name})
            for name in ("1f1b", "zb_h1")
        )
        for trainer in (whole, split):
            run(trainer, 2)
            assert trainer.graphs is not None
        measured = split.graphs.partial.static_bytes()["kept"]
        assert measured > 0
        assert whole.graphs.partial.static_bytes()["kept"] == 0
        assert split.graphs.predicted.pool - whole.graphs.predicted.pool == measured


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_static_buffers_do_not_grow_with_microbatches(ranks: int, chunks: int) -> None:
    name = "interleaved_1f1b" if chunks > 1 else "1f1b"
    counts = set()
    for num_microbatches in (16, 32, 64):
        schedule = build_schedule(
            name, num_ranks=ranks, num_microbatches=num_microbatches, num_chunks=chunks
        )
        order = StepOrder.of(schedule.program(0), has_parts=[True] * chunks)
        plan = plan_capture(order.order, num_layers_per_chunk=2)
        counts.add((len(plan.captures), len(plan.buffer_signatures(BufferRole.INPUT))))
    assert len(counts) == 1


@pytest.mark.parametrize("scopes", ["attn", "attn,mlp,moe", "moe_router,moe_preprocess"])
def test_gradients_arrive_as_static_ones_lie(scopes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over a gradient with other strides could round differently than eager ones."""
    load, differing = GraphedCallable._load_grads, []

    def compared(self: GraphedCallable, grads: tuple[Tensor | None, ...]) -> None:
        for static, given in zip(self._site.output_grads, grads, strict=True):
            if static is not None and given is not None and given.stride() != static.stride():
                differing.append((given.shape, given.stride()))
        load(self, grads)

    monkeypatch.setattr(GraphedCallable, "_load_grads", compared)
    moe = {**STATIC, "layer_pattern": "d(e)"}
    graphs = {"mode": "partial", "scopes": scopes.split(",")}
    run(make_trainer(graphs, moe=moe, train={"microbatch_size": 2}), steps=3)
    assert differing == []


# ---- planted mistakes ----------------------------------------------------------------------------


def nothing(*_: Any) -> None:
    """What a forgotten step does."""


def test_a_slot_reused_too_early_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(make_trainer(pipeline={"schedule": "gpipe"}))
    planned = GraphedCallable._release

    def too_early(self: GraphedCallable, *args: Any, **kwargs: Any) -> Any:
        results = forward(self, *args, **kwargs)
        planned(self)  # before the backward pass has read them
        return results

    forward = GraphedCallable.run_forward
    monkeypatch.setattr(GraphedCallable, "run_forward", too_early)
    found: list[float] = []
    # Autograd notices the poison before the loss shows it.
    with suppress(RuntimeError):
        found = run(make_trainer(PARTIAL, pipeline={"schedule": "gpipe"}))
    assert found != expected


def test_a_skipped_hook_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = {"overlap": "params"}
    assert run(make_trainer(PARTIAL, optimizer=overlap)) == run(make_trainer(optimizer=overlap))
    monkeypatch.setattr(CapturedLayer, "run_hooks", nothing)
    with pytest.raises(StaleWeightsError):
        run(make_trainer(PARTIAL, optimizer=overlap))


def test_a_forgotten_field_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = tuple(name for name in LocalDispatcher.captured_fields if name != "arriving")
    monkeypatch.setattr(LocalDispatcher, "captured_fields", fields)
    with pytest.raises(TypeError, match="subscriptable"):
        run(make_trainer(PARTIAL, moe=EXPERTS))


@pytest.mark.parametrize("graphs", [PARTIAL, FULL])
def test_a_frozen_number_shows(graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scale = iter(range(1, 10**6))

    def forward(self: ResidualDropout, x_SBH: Tensor, batch: Microbatch) -> Tensor:
        del self, batch
        return x_SBH * (1.0 + 1e-3 * next(scale))

    monkeypatch.setattr(ResidualDropout, "forward", forward)
    with pytest.raises(ReplayError, match=r"aten.mul\(1.\d+\), and was .*test_step_graphs.py"):
        run(make_trainer(graphs))


def test_keys_that_stand_still_change_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(make_trainer())
    monkeypatch.setattr(StepKeys, "set_step", nothing)
    assert run(make_trainer(PARTIAL)) != expected


def test_a_step_that_does_not_tell_python_of_its_gradients_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real graph runs no hooks; the emulated one does, so undo what they noted."""
    expected = run(make_trainer())
    noted = DistributedOptimizer.note_replay

    def as_real(self: DistributedOptimizer, marks: Any, *, updated: bool) -> None:
        for buffer in self.buffers:
            buffer.zero_grads()
        noted(self, marks, updated=updated)

    monkeypatch.setattr(DistributedOptimizer, "note_replay", as_real)
    assert run(make_trainer(FULL)) == expected
    monkeypatch.setattr(
        DistributedOptimizer,
        "note_replay",
        lambda self, marks, updated: as_real(self, marks[:0], updated=updated),
    )
    with pytest.raises(ValueError, match="zip"):
        run(make_trainer(FULL))


@pytest.mark.parametrize("graphs", [FULL, WITH_STEP])
def test_python_knows_no_more_than_behind_a_real_graph(
    graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations, traced steps and checkpoints between replays that ran no Python."""
    overlap = {"optimizer": OVERLAPS}
    replay = FullIterationGraph.__call__

    def without_python(self: FullIterationGraph, inputs: Sequence[Tensor]) -> Any:
        reducer, gatherer = trainer.optimizer._reducer, trainer.optimizer._gatherer
        kept = [(part, copy.copy(vars(part))) for part in (reducer, gatherer) if part]
        lists = [
            (part, {k: list(v) for k, v in own.items() if type(v) is list}) for part, own in kept
        ]
        results = replay(self, inputs)
        for (part, own), (_, copied) in zip(kept, lists, strict=True):
            vars(part).update(own)
            for name, values in copied.items():
                getattr(part, name)[:] = values
        for buffer in trainer.optimizer.buffers:
            buffer.zero_grads()
        return results

    def steps(trainer: Trainer) -> list[float]:
        numbers = []
        for step in range(8):
            recorder = ActionRecorder(rank=0) if step == 5 else None
            numbers.append(trainer.train_step(step, recorder=recorder).loss)
            numbers += [trainer.mean_validation_loss(trainer.evaluate())] if step == 3 else []
            if step == 6:
                trainer.optimizer.finish_param_gather()
                numbers += [p.tensors["main_param"].sum().item() for p in trainer.pieces()]
        return numbers

    expected = steps(make_trainer(**overlap))
    trainer = make_trainer(graphs, **overlap)
    monkeypatch.setattr(FullIterationGraph, "__call__", without_python)
    assert steps(trainer) == expected


def test_a_graph_with_the_optimizer_skips_on_its_own() -> None:
    found: list[Any] = []
    expected: list[Any] = []
    for numbers, graphs in ((found, WITH_STEP), (expected, None)):
        trainer = make_trainer(graphs, train={"dtype": "float16"})
        scales = []
        for step in range(8):
            if step == 4:  # the loss scale that no gradient survives
                trainer.optimizer._state[2] = 2.0**60
            if step == 5:
                trainer.optimizer._state[2] = 2.0**10
            metrics = trainer.train_step(step)
            scales.append(trainer.optimizer.loss_scale)
            numbers += [metrics.loss, metrics.skipped]
        numbers += [
            trainer.optimizer.scalars(),
            scales,
            trainer.mean_validation_loss(trainer.evaluate()),
        ]
        assert metrics.skipped is False
        assert trainer.optimizer.num_skipped == 1
    assert found == expected


def test_a_learning_rate_that_is_frozen_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    step = DistributedOptimizer.step

    def frozen(self: DistributedOptimizer, *, lr: Any, **others: Any) -> Any:
        return step(self, lr=next(rates) if isinstance(lr, Tensor) else lr, **others)

    rates = iter([1e-3 * number for number in range(1, 99)])
    monkeypatch.setattr(DistributedOptimizer, "step", frozen)
    with pytest.raises(ReplayError, match=r"aten.fill_\(0.003\), and was aten.fill_\(0.002\)"):
        run(make_trainer(WITH_STEP))


def test_a_graph_with_the_optimizer_repeats_a_step_without_room() -> None:
    moe = {**STATIC, "static_budget": 0.3, "over_budget": "rerun", "num_experts": 2}
    found: list[Any] = []
    reruns: list[bool] = []
    expected: list[Any] = []
    for numbers, graphs in ((found, WITH_STEP), (expected, None)):
        trainer = make_trainer(graphs, moe=moe)
        for step in range(STEPS):
            if step == 3:
                for chunk in trainer.chunks:
                    chunk.moe_budget.factor = 0.3
            metrics = trainer.train_step(step)
            assert metrics.experts is not None
            numbers += [metrics.loss, metrics.grad_norm, metrics.experts.num_reruns]
            reruns.append(metrics.experts.num_reruns > 0)
        numbers += [trainer.optimizer.scalars(), trainer.mean_validation_loss(trainer.evaluate())]
    assert found == expected
    assert any(reruns)


def test_a_graph_with_the_optimizer_changes_nothing_if_no_room_is_an_error() -> None:
    trainer = make_trainer(WITH_STEP, moe={**STATIC, "over_budget": "error"})
    run(trainer, 3)
    before = [value.clone() for piece in trainer.pieces() for value in piece.tensors.values()]
    counts = trainer.optimizer.scalars()
    for chunk in trainer.chunks:
        chunk.moe_budget.factor = 0.3
    with pytest.raises(MegacoreError, match="found no room"):
        trainer.train_step(3)
    after = [value for piece in trainer.pieces() for value in piece.tensors.values()]
    assert trainer.optimizer.scalars() == counts
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("graphs", [PARTIAL, FULL, WITH_STEP])
def test_a_resumed_run_captures_anew_and_goes_on(graphs: dict[str, Any]) -> None:
    first = make_trainer(graphs)
    for step in range(4):
        first.train_step(step)
    saved = [{name: value.clone() for name, value in p.tensors.items()} for p in first.pieces()]
    second = make_trainer(graphs)
    for piece, values in zip(second.pieces(), saved, strict=True):
        for name, value in values.items():
            piece.tensors[name].copy_(value)
    second.optimizer.load_scalars(first.optimizer.scalars())
    second.optimizer.finish_load(first.optimizer.step_count)
    assert [second.train_step(step).loss for step in range(4, 8)] == [
        first.train_step(step).loss for step in range(4, 8)
    ]


# ---- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graphs", "changes", "message"),
    [
        ({"mode": "partial", "scopes": ["mlp"]}, {"moe": EXPERTS}, "every layer has experts"),
        ({"mode": "partial", "scopes": ["moe_router"]}, {}, "the model has no experts"),
        (
            {"mode": "partial", "scopes": ["moe"]},
            {"moe": EXPERTS},
            "asks the device how many tokens",
        ),
        ({"mode": "full"}, {"moe": EXPERTS}, "asks the device how many tokens"),
        (
            {"mode": "partial", "scopes": ["attn"]},
            {"train": {"recompute": ["full"]}},
            "runs whole layers again",
        ),
        ({**PARTIAL, "backend": "cuda"}, {}, "needs a GPU"),
        (
            {"mode": "partial", "scopes": ["attn"]},
            {"data": {"document_mask": True}},
            'captures attention.*set graphs.mode = "partial"',
        ),
        ({"mode": "full"}, {"data": {"document_mask": True}}, "captures attention"),
        (
            {"mode": "full"},
            {"parallel": {"pp": 2}, "debug": {"check_messages": True}},
            "lets the host check every message",
        ),
    ],
)
def test_settings_that_do_not_go_together(
    graphs: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(graphs, **changes)


@pytest.mark.parametrize(
    ("scopes", "message"),
    [
        ("moe_preprocess", "begins with the router"),
        ("moe,moe_router", "leave one out"),
        ("attention", "scopes.0 must be 'attn', 'mlp', 'moe'"),
    ],
)
def test_scopes_that_do_not_go_together(scopes: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(graphs={"mode": "partial", "scopes": scopes.split(",")})


REPLACED = "our grouped products are left out, see run.kernels"


@pytest.mark.parametrize(
    ("settings", "train", "left"),
    [
        (FULL, {}, "graphs capture attn, moe_router, moe_preprocess"),
        (WITH_STEP, {}, "graphs capture attn, moe_router, moe_preprocess"),
        ({"mode": "partial", "scopes": ["moe"]}, {}, "graphs capture moe_router, moe_preprocess"),
        (
            {"mode": "partial", "scopes": ["attn", "moe"]},
            {"recompute": ["moe"]},
            "graphs capture attn",
        ),
        (FULL, {"recompute": ["full"]}, "the run goes on without graphs"),
    ],
)
def test_replaced_products_of_captured_experts_leave_them_out(
    settings: dict[str, Any], train: dict[str, Any], left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def obstacle(config: ResolvedConfig, device: torch.device) -> str | None:
        del device
        captures = config.graphs.is_full or "moe" in graph_scopes(config)
        return REPLACED if captures else None

    expected = run(make_trainer(None, moe=STATIC, train=train))
    trainer, other = (make_trainer(settings, moe=STATIC, train=train) for _ in range(2))
    assert trainer.graphs is not None
    assert other.graphs is not None
    monkeypatch.setattr(graphs_of_steps, "_experts_obstacle", obstacle)
    [note] = trainer.graphs.leave_out_experts()
    assert note == (
        f'graphs.mode = "{settings["mode"]}" cannot capture the experts: {REPLACED}; {left}'
    )
    assert trainer.graphs.leave_out_experts() == ()
    assert run(trainer) == expected
    assert (trainer.graphs.partial is not None) == left.startswith("graphs")
    run(other, steps=2)
    assert note in other.graphs.take_notes(), "the capture decides if nothing else did"


@pytest.mark.parametrize(
    ("capability", "dtype", "is_left", "outcome"),
    [
        ((9, 0), "bfloat16", True, "captured"),  # by torch's kernel
        ((9, 0), "float16", True, "left out"),
        ((8, 0), "bfloat16", True, "left out"),
        ((8, 0), "bfloat16", False, "refused"),
    ],
)
def test_only_replaced_products_are_worked_around(
    capability: tuple[int, int], dtype: str, is_left: bool, outcome: str
) -> None:
    config, device = (
        make_trainer(moe={**STATIC, "ffn_hidden_size": 16}).config,
        torch.device("cuda"),
    )
    changes = {
        "graphs": config.graphs.model_copy(update=FULL),
        "train": config.train.model_copy(update={"dtype": dtype}),
    }
    config = config.model_copy(update=changes)
    left = ["grouped_product"] if is_left else []
    with assume_device(DeviceFacts(capability=capability)), leaving(left, "cuda"):
        refused = pytest.raises(ConfigError, match="captures the experts, which needs the grouped")
        with refused if outcome == "refused" else nullcontext():
            graphs_of_steps._check_experts(config, device)
        reason = graphs_of_steps._experts_obstacle(config, device)
    assert (reason is None) == (outcome == "captured")


@pytest.mark.parametrize("settings", [FULL, {"mode": "partial", "scopes": ["moe"]}])
def test_captured_experts_without_a_kernel_are_refused_at_the_start(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def obstacle(*arguments: Any) -> str:
        sizes.append(arguments[1:])
        return "megacore was built without CUTLASS's headers"

    monkeypatch.setattr(graphs_of_steps, "grouped_obstacle", obstacle)
    config = make_trainer(moe=STATIC).config
    graphs = config.graphs.model_copy(update=settings)
    config = config.model_copy(update={"graphs": graphs})
    with pytest.raises(ConfigError, match="needs the grouped kernel: megacore was built without"):
        graphs_of_steps._check_experts(config, torch.device("cuda"))
    experts, width = config.moe.num_experts, config.moe.ffn_hidden_size
    assert sizes == [(experts, config.model.hidden_size, width)]
    graphs_of_steps._check_experts(config, torch.device("cpu"))
