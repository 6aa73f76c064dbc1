"""Clones while two microbatches are computed in turns: the bits of one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.moe.echo.clones import LayerClones, set_of_turn
from megacore.moe.echo.slots import SlotBuffers
from megacore.moe.echo.transports import MemoryClones, MessageClones
from megacore.ops.echo_counts import EchoCounts
from megacore.parallel.interleave import InterleavedPair, turn_index
from megatrain.plan.echo_estimate import estimate_echo
from megatrain.train.trainer import Trainer
from tests.dist.test_echo import ECHO, skewed_trainer
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks

STEPS = 3
MOE: dict[str, Any] = {
    **ECHO,
    "parallel.ep": 2,
    "moe.layer_pattern": "e",
    "model.dropout": 0.1,
    "train.microbatch_size": 1,
    "train.global_batch_size": 10,  # five microbatches
}
ONE = {**MOE, "train.global_batch_size": 6, "model.num_layers": 2}
PP2 = {**MOE, "parallel.pp": 2}
INTERLEAVED = {
    **PP2,
    "pipeline.schedule": "interleaved_1f1b",
    "pipeline.num_chunks": 2,
    "optimizer.overlap": "grads",
}
PEERS = {"moe.dispatcher": "static", "moe.static_transport": "peer"}
MESSAGES = {"moe.dispatcher": "static", "moe.static_transport": "collective"}
OVERLAP = {"pipeline.overlap_moe": True}
SPLIT = {"pipeline.overlap_moe": True, "pipeline.pairs": "split"}
PARTS = {"train.recompute": ["norm", "activation", "moe"]}
# By number of ranks: a run, and the ways to overlap it.
CASES: dict[int, dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]] = {
    2: {
        "one stage": ({**ONE, **PEERS, **PARTS}, [OVERLAP]),
        "one stage, messages": ({**ONE, **MESSAGES, "moe.echo.planner": "echo"}, [SPLIT]),
    },
    4: {
        "1f1b": (PP2, [OVERLAP, SPLIT]),
        "interleaved": (INTERLEAVED, [SPLIT]),
        "interleaved, recomputed": ({**INTERLEAVED, "train.recompute": ["full"]}, [OVERLAP]),
        "interleaved, peers": ({**INTERLEAVED, **PEERS}, [SPLIT]),
        "V": (
            {
                **PP2,
                **MESSAGES,
                "pipeline.schedule": "dualpipe_v",
                "train.global_batch_size": 12,
            },
            [OVERLAP],
        ),
        "two copies, peers": (
            {**PP2, **PEERS, "pipeline.schedule": "dualpipe", "train.global_batch_size": 12},
            [OVERLAP],
        ),
    },
}

KEPT = [(2, "one stage"), (2, "one stage, messages"), (4, "1f1b"), (4, "two copies, peers")]


class Log:
    """In which turn weights are sent and used, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[tuple[str, int]] = []
        for kind in (MessageClones, MemoryClones):
            for name in ("send_weights", "multiply"):
                self._watch(monkeypatch, kind, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str) -> None:
        run = getattr(kind, name)

        def logged(clones: LayerClones, *args: Any, **options: Any) -> None:
            self.entries.append((name, turn_index()))
            run(clones, *args, **options)

        monkeypatch.setattr(kind, name, logged)

    def num_beside(self) -> int:
        """How often weights were sent while those of another microbatch were there or coming."""
        unused = {0: 0, 1: 0}  # products that the clones of each turn are still needed for
        found = 0
        for name, place in self.entries:
            if name == "send_weights":
                found += unused[1 - place] > 0
                unused[place] = 2
            else:
                unused[place] -= 1
        return found


@dataclass(frozen=True)
class Trained:
    """One rank's view of a run.

    Attributes:
        numbers: Loss and norm of all gradients, of all steps.
        gradients: What the first step made of them, by name and place in the parameter.
        weights: After the last step.
        clones: By step and layer: clones per plan, and the highest load before and after.
        num_beside: See `Log`.
    """

    numbers: list[tuple[float, float]]
    gradients: dict[tuple[str, int], Tensor]
    weights: dict[tuple[str, int], Tensor]
    clones: list[list[tuple[float, float, float]]]
    num_beside: int


def pieces_of(trainer: Trainer, kind: str) -> dict[tuple[str, int], Tensor]:
    return {
        (piece.info.name, piece.start): piece.tensors[kind].clone()
        for piece in trainer.optimizer.pieces()
    }


def train(world_size: int, changes: dict[str, Any]) -> Trained:
    trainer = skewed_trainer(world_size, changes)
    numbers, clones, gradients = [], [], {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        log = Log(monkeypatch)
        for step in range(STEPS):
            metrics = trainer.train_step(step)
            numbers.append((metrics.loss, metrics.grad_norm))
            gradients = gradients or pieces_of(trainer, "exp_avg")
            layers = [
                EchoCounts.of_list(layer.echo.sums.tolist())
                for chunk in trainer.chunks
                for layer in chunk.moe_layers().values()
                if layer.echo is not None
            ]
            clones.append(
                [
                    (counts.num_clones / counts.num_plans, *highest)
                    for counts in layers
                    for highest in [(counts.highest_before, counts.highest_after)]
                ]
            )
    return Trained(numbers, gradients, pieces_of(trainer, "main_param"), clones, log.num_beside())


def train_all_ways(_rank: int, world_size: int, name: str) -> list[Trained]:
    changes, ways = CASES[world_size][name]
    return [train(world_size, {**changes, **way}) for way in ({}, *ways)]


def assert_equal(name: str, found: Trained, expected: Trained) -> None:
    assert found.numbers == expected.numbers, name
    for values, wanted in (
        (found.gradients, expected.gradients),
        (found.weights, expected.weights),
    ):
        assert values.keys() == wanted.keys()
        for key, value in values.items():
            assert torch.equal(value, wanted[key]), f"{name}, {key}"
        assert any("experts" in key for key, _ in values)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "name"),
    representatives(
        [(world_size, name) for world_size, cases in CASES.items() for name in cases], KEPT
    ),
)
def test_passes_in_turns_with_clones_change_no_bit(world_size: int, name: str) -> None:
    for plain, *overlapped in run_ranks(
        world_size, train_all_ways, world_size, name, timeout_s=120
    ):
        assert plain.num_beside == 0
        for each in overlapped:
            assert_equal(name, each, plain)
            assert each.clones == plain.clones, "plans and loads"
            assert len(each.clones) == STEPS
            for layers in each.clones:
                assert layers
                for num_clones, before, after in layers:
                    assert num_clones >= 1, f"{name}: no clone, so nothing is tested"
                    assert after < before, name
            assert each.num_beside >= 4 * STEPS, f"{name}: clones of two at a time"


def memory_of_slots(_rank: int) -> list[tuple[int, int]]:
    """Bytes in all slots, and what `megacore plan --echo` says of them."""
    found = []
    for changes in ({}, OVERLAP, PEERS, {**PEERS, **OVERLAP}):
        trainer = skewed_trainer(2, {**ONE, **changes})
        trainer.train_step(0)
        layer = next(iter(trainer.chunks[0].moe_layers().values()))
        assert layer.echo is not None
        planned = estimate_echo(trainer.config, trainer.groups.topology)
        held = layer.echo.slots.num_bytes()
        found.append((held, planned.slot_weight_bytes + planned.slot_grad_bytes))
    return found


@pytest.mark.dist
def test_a_second_set_of_weights_is_all_that_turns_cost() -> None:
    one = 2 * (3 * 16 * 32) * 4  # two slots of an expert in float32
    by_rank = run_ranks(2, memory_of_slots, timeout_s=60)
    assert by_rank[1] == [(held, held) for held in (2 * one, 3 * one, 2 * one, 3 * one)]
    # All clones are of experts of rank 0, so without windows nothing lies there.
    assert [planned for _, planned in by_rank[0]] == [2 * one, 3 * one, 2 * one, 3 * one]


def test_one_set_of_slots_is_refused_in_turns() -> None:
    slots = SlotBuffers(2)
    assert InterleavedPair().run(lambda: set_of_turn(slots.sets), lambda: 1) == (slots.sets[0], 1)
    with pytest.raises(ValueError, match="but spare slots have 1 set; make them with SlotBuffers"):
        InterleavedPair().run(lambda: None, lambda: set_of_turn(slots.sets))
    first, second = SlotBuffers(2, num_sets=2).sets
    both = (first, second)
    assert InterleavedPair().run(lambda: set_of_turn(both), lambda: set_of_turn(both)) == both
    assert set_of_turn(both) is first
