"""Graphs in training: changes between capture and replay, failures, what they leave behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megacore.graphs import CaptureError, ReplayError
from megacore.graphs.observe import Recording
from megacore.moe.dispatchers.peer_memory import Slots
from megacore.parallel.batch import Microbatch
from megatrain.models.layers import RMSNorm
from megatrain.train.trainer import Trainer
from tests.support.campaigns import representatives
from tests.support.graphed_training import (
    FULL,
    OVERLAPS,
    PARTIAL,
    STATIC,
    STEPS,
    WITH_STEP,
    make_trainer,
    run,
)


def shorter(trainer: Trainer) -> Callable[..., Microbatch]:
    """Batches with half of the tokens."""
    whole = trainer._batches(trainer.data.train)

    def batches(step: int, number: int) -> Microbatch:
        batch = whole(step, number)
        assert batch.labels is not None
        return replace(batch, tokens=batch.tokens[:, :4], labels=batch.labels[:, :4])

    return batches


@pytest.mark.parametrize("graphs", [PARTIAL, FULL])
def test_another_shape_is_an_error_or_a_new_capture(graphs: dict[str, Any]) -> None:
    trainer = make_trainer(graphs)
    run(trainer, 3)
    with pytest.raises(ReplayError, match=r"batch shape \(1, 4\), not \(1, 8\)"):
        trainer.step.train(3, shorter(trainer), lr=1e-3)
    found, expected = (
        [
            *(t.train_step(step).loss for step in range(3)),
            *(t.step.train(s, shorter(t), lr=1e-3).loss for s in (3, 4)),
        ]
        for t in (make_trainer({**graphs, "on_failure": "recapture"}), make_trainer())
    )
    assert found == expected


def test_a_new_budget_is_captured_again() -> None:
    moe = {**STATIC, "static_budget": 0.3, "over_budget": "rerun", "num_experts": 2}
    for graphs in ({"mode": "partial", "scopes": ["attn", "moe"]}, FULL):
        trainer = make_trainer(graphs, moe=moe)
        found = []
        for step in range(STEPS):
            if step == 3:
                for chunk in trainer.chunks:
                    chunk.moe_budget.grow()
            found.append(trainer.train_step(step).loss)
        assert trainer.graphs is not None
        assert any("captured again" in note for note in trainer.graphs.take_notes())
        plain = make_trainer(moe=moe)
        assert found == [plain.train_step(step).loss for step in range(STEPS)]


def wait(self: RMSNorm, x_SBH: Tensor, *added: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    x_SBH = x_SBH + added[0] if added else x_SBH
    y = x_SBH * self.weight * float(x_SBH.abs().max().item() < 1e30)
    return (x_SBH, y) if added else y


@pytest.mark.parametrize("graphs", [PARTIAL, FULL])
def test_a_planted_wait_is_named_and_training_goes_on_if_asked(
    graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RMSNorm, "forward", wait)
    for reaction in ("error", "recapture"):
        with pytest.raises(
            CaptureError,
            match=r"capture of .*reads a number from the device.*test_graph_failures.py:",
        ):
            run(make_trainer({**graphs, "on_failure": reaction}))
    expected = run(make_trainer())
    trainer = make_trainer({**graphs, "on_failure": "eager"})
    assert run(trainer) == expected
    assert trainer.graphs is not None
    assert any("goes on without graphs" in note for note in trainer.graphs.take_notes())


def held_bytes(trainer: Trainer) -> int:
    """Bytes of all tensors that Python can reach; on ``meta`` their addresses are all 0.

    Data read ahead are dropped: their number depends on the step.
    """
    for source in trainer.prefetched.values():
        futures.wait(source._ahead.values())
    trainer.prefetched.clear()
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (Tensor, Parameter)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("graphs", representatives([PARTIAL, FULL, WITH_STEP], [WITH_STEP]))
def test_what_is_given_up_leaves_nothing(graphs: dict[str, Any]) -> None:
    trainer = make_trainer(graphs, optimizer=OVERLAPS)
    assert trainer.graphs is not None
    held = []
    for step in (1, 2, 3):  # what the first one leaves, such as masks, is there for good
        trainer.train_step(step)
        trainer.train_step(step)
        trainer.mean_validation_loss(trainer.evaluate())
        with_graphs = held_bytes(trainer)
        trainer.graphs.reset()
        held.append(held_bytes(trainer))
        assert held[-1] < with_graphs
    assert held[1] == held[2]


@pytest.mark.parametrize("graphs", representatives([PARTIAL, FULL, WITH_STEP], [PARTIAL]))
def test_a_capture_that_fails_leaves_nothing_and_all_as_it_was(
    graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RMSNorm, "forward", wait)
    changes = {"moe": STATIC, "optimizer": OVERLAPS}
    trainer = make_trainer(graphs, **changes)
    trainer.train_step(0)
    trainer.optimizer.finish_param_gather()
    model = [*trainer.chunks[0].parameters(), *trainer.chunks[0].buffers()]
    state = [value for piece in trainer.pieces() for value in piece.tensors.values()]
    kept, addresses = [t.detach().clone() for t in (*model, *state)], [p.data_ptr() for p in model]
    counts, held = trainer.optimizer.scalars(), []
    for _ in range(3):
        with pytest.raises(CaptureError, match=r"test_graph_failures\.py:"):
            trainer.train_step(1)
        held.append(held_bytes(trainer))
    assert all(map(torch.equal, kept, (*model, *state)))
    assert addresses == [p.data_ptr() for p in model]
    assert trainer.optimizer.scalars() == counts
    assert held[1] == held[2]
    # A capture that succeeds later has the bits of one that did not fail before.
    monkeypatch.undo()
    plain = make_trainer(**changes)
    monkeypatch.setattr(RMSNorm, "forward", wait)
    plain.train_step(0)
    monkeypatch.undo()
    assert [trainer.train_step(s).loss for s in (1, 2)] == [
        plain.train_step(s).loss for s in (1, 2)
    ]


class OpenExchange:
    """Memory of peers in which a recording has begun an exchange that it does not finish."""

    def __init__(self) -> None:
        self.slots = Slots()

    def forget_exchanges(self) -> None:
        self.slots.free_all()


@pytest.mark.parametrize("graphs", [PARTIAL, FULL])
def test_slots_of_exchanges_that_a_failed_capture_has_begun_are_free_again(
    graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members fail at different places, but they must agree on the slots of the next exchange."""
    monkeypatch.setattr(RMSNorm, "forward", wait)
    trainer = make_trainer({**graphs, "on_failure": "eager"})
    peers = OpenExchange()
    taken = [peers.slots.take(), peers.slots.take()]
    trainer.chunks[0].moe_peers = peers  # type: ignore[assignment]
    trainer.train_step(0)
    with pytest.raises(RuntimeError, match="under way"):
        peers.slots.take()
    trainer.train_step(1)
    assert [peers.slots.take(), peers.slots.take()] == taken


class FailsInCapture:
    """Layers that raise at their n-th call in a recording, forward or backward, and work else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, backward: bool) -> None:
        self._left, self._is_recording = at, False
        capture, forward = Recording.capture, RMSNorm.forward

        @contextmanager
        def noted(recording: Recording) -> Iterator[None]:
            self._is_recording = True
            try:
                with capture(recording):
                    yield
            finally:
                self._is_recording = False

        def failing(norm: RMSNorm, x_SBH: Tensor, *added: Tensor) -> Any:
            self._left -= self._is_recording
            if self._left == 0 and self._is_recording:
                if not backward:
                    raise TypeError("planted")
                x_SBH = Raising.apply(x_SBH)  # type: ignore[no-untyped-call]
            return forward(norm, x_SBH, *added)

        monkeypatch.setattr(Recording, "capture", noted)
        monkeypatch.setattr(RMSNorm, "forward", failing)


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx, grads
        raise TypeError("planted")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("graphs", [PARTIAL, FULL, WITH_STEP])
def test_any_error_in_a_capture_is_named_and_training_goes_on_if_asked(
    graphs: dict[str, Any], at: int, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(make_trainer(optimizer=OVERLAPS), steps=4)
    FailsInCapture(monkeypatch, at, backward=backward)
    trainer = make_trainer({**graphs, "on_failure": "eager"}, optimizer=OVERLAPS)
    assert run(trainer, steps=4) == expected
    assert trainer.graphs is not None
    (note,) = [text for text in trainer.graphs.take_notes() if "without graphs" in text]
    assert "TypeError: planted (at test_graph_failures.py:" in note


def test_a_validation_that_cannot_be_captured_goes_on_without_if_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = RMSNorm.forward

    def wait_in_validation(self: RMSNorm, *x: Tensor) -> Any:
        return wait(self, *x) if not self.training else forward(self, *x)

    monkeypatch.setattr(RMSNorm, "forward", wait_in_validation)
    with pytest.raises(CaptureError, match="capture of the validation failed"):
        run(make_trainer(FULL))
    trainer = make_trainer({**FULL, "on_failure": "eager"})
    assert run(trainer) == run(make_trainer())
    assert trainer.graphs is not None
    assert any("validations go on without" in note for note in trainer.graphs.take_notes())
