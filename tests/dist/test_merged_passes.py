"""1F1B and interleaved 1F1B in pairs: exchanges of a microbatch beside products of another."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacore._core import Action, ActionKind
from megacore.ops.gemm_cuda import PRODUCTS
from megacore.parallel import row_exchange
from megacore.parallel.async_collectives import PendingCollective
from megacore.pipeline.execution import ProgramRun
from megatrain.plan.layout import train_schedule
from megatrain.train.trainer import Trainer, build_trainer
from tests.dist.test_moe_invariance import EP2, PP2, make_config
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

MOE = {
    **EP2,
    "train.microbatch_size": 1,
    "moe.layer_pattern": "e",
    "model.dropout": 0.1,
}
INTERLEAVED = {
    **PP2,
    **MOE,
    "pipeline.schedule": "interleaved_1f1b",
    "pipeline.num_chunks": 2,
    "train.global_batch_size": 10,
}
# Five microbatches where not said otherwise: two ranks of each of two pipelines.
OF_FOUR: dict[str, dict[str, Any]] = {
    "shared experts": INTERLEAVED,
    "few microbatches": {**INTERLEAVED, "train.global_batch_size": 6},
    "groups of three": {**INTERLEAVED, "pipeline.group_size": 3, "train.global_batch_size": 12},
    "static": {
        **INTERLEAVED,
        "moe.dispatcher": "static",
        "moe.static_transport": "collective",
        "optimizer.overlap": "grads",
    },
    "peers": {
        **INTERLEAVED,
        "moe.dispatcher": "static",
        "moe.static_transport": "peer",
        "train.recompute": ["norm", "activation", "moe"],
    },
    "recomputed": {
        **INTERLEAVED,
        "train.recompute": ["full"],
        "optimizer.overlap": "grads",
    },
    "one chunk": {**PP2, **MOE, "pipeline.schedule": "1f1b", "train.global_batch_size": 12},
}
OF_TWO = {
    "one stage": {**MOE, "train.global_batch_size": 6},
    "one microbatch": {**MOE, "train.global_batch_size": 2},
}
WAYS = {
    "plain": {},
    "whole": {"pipeline.overlap_moe": True},
    "split": {"pipeline.overlap_moe": True, "pipeline.pairs": "split"},
}


def trainer_of(world_size: int, changes: dict[str, Any], way: str) -> Trainer:
    config = make_config(world_size, {**changes, **WAYS[way]})
    return build_trainer(config, world_size=world_size, device=torch.device("cpu"))


def train(world_size: int, changes: dict[str, Any], way: str) -> Any:
    trainer = trainer_of(world_size, changes, way)
    metrics = [trainer.train_step(step) for step in range(2)]
    numbers = [(step.loss, step.grad_norm, step.experts) for step in metrics]
    return numbers, [piece.tensors["main_param"].clone() for piece in trainer.pieces()]


def train_all_ways(_rank: int, world_size: int, changes: dict[str, Any]) -> list[str]:
    """The ways whose results differ from the plain ones."""
    different = []
    numbers, weights = train(world_size, changes, "plain")
    for way in ("whole", "split"):
        found, others = train(world_size, changes, way)
        same = all(torch.equal(*both) for both in zip(weights, others, strict=True))
        if found != numbers or not same:
            different.append(f"{way}: {found} instead of {numbers}")
    return different


@pytest.mark.parametrize(
    "name",
    representatives([*OF_TWO, *OF_FOUR], [*OF_TWO, "shared experts", "static"]),
)
def test_pairs_change_no_bit(name: str) -> None:
    world_size = 2 if name in OF_TWO else 4
    changes = {**OF_TWO, **OF_FOUR}[name]
    for different in run_ranks(world_size, train_all_ways, world_size, changes, timeout_s=120):
        assert different == []


# ---- what runs beside what ---------------------------------------------------------------------

# The action that the running thread is in.
ACTION: ContextVar[Action | None] = ContextVar("action", default=None)
INPUT = ActionKind.BACKWARD_INPUT
WEIGHTS = "megacore.grouped_product weight_grad"


class Log:
    """What a rank starts, waits for and multiplies, in its order, and in which action.

    Attributes:
        entries: ``(action, "start" or "wait", number of an exchange)``, or ``(action, "product",
            name of the operation)``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[tuple[str, str, Any]] = []
        numbers: dict[int, int] = {}
        handle, start, wait = (
            ProgramRun._handle,
            row_exchange.all_to_all_async,
            PendingCollective.wait,
        )

        def logged_handle(step: ProgramRun, handlers: Any, action: Action) -> None:
            token = ACTION.set(action)
            try:
                with _Products(lambda name: self._add("product", name)):
                    handle(step, handlers, action)
            finally:
                ACTION.reset(token)

        def logged_start(*args: Any) -> Any:
            result = start(*args)
            numbers[id(result[1])] = number = len(self.entries)
            self._add("start", number)
            return result

        def logged_wait(pending: PendingCollective) -> None:
            number = numbers.pop(id(pending), None)
            if number is not None:
                self._add("wait", number)
            wait(pending)

        monkeypatch.setattr(ProgramRun, "_handle", logged_handle)
        monkeypatch.setattr(row_exchange, "all_to_all_async", logged_start)
        monkeypatch.setattr(PendingCollective, "wait", logged_wait)

    def beside(self) -> list[tuple[str, set[tuple[str, str]]]]:
        """For each exchange its action, and the products that ran until it was waited for."""
        places = {(what, name): at for at, (_, what, name) in enumerate(self.entries)}
        spans = []
        for at, (action, what, number) in enumerate(self.entries):
            if what == "start":
                during = self.entries[at : places["wait", number]]
                spans.append((action, {(a, name) for a, w, name in during if w == "product"}))
        return spans

    def _add(self, what: str, name: Any) -> None:
        self.entries.append((str(ACTION.get()), what, name))


class _Products(TorchDispatchMode):
    def __init__(self, on_product: Callable[[str], None]) -> None:
        super().__init__()
        self._on_product = on_product

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if func is torch.ops.megacore.grouped_product.default:
            self._on_product(f"megacore.grouped_product {list(PRODUCTS)[args[3]]}")
        elif "mm" in name:
            self._on_product(name)
        return func(*args, **(kwargs or {}))


Pairs = list[tuple[str, str]]
Spans = list[tuple[str, set[tuple[str, str]]]]


def log_steps(_rank: int) -> dict[str, tuple[Pairs, Spans]]:
    """For each way the pairs of this rank, and what ran beside its exchanges."""
    found = {}
    for way in WAYS:
        trainer = trainer_of(4, INTERLEAVED, way)
        trainer.train_step(0)
        with pytest.MonkeyPatch.context() as monkeypatch:
            log = Log(monkeypatch)
            trainer.train_step(1)
        schedule, rank = train_schedule(trainer.config, 4), trainer.groups.pp.position
        actions = [str(action) for action in schedule.actions(rank)]
        pairs = [(actions[at], actions[at + 1]) for at in schedule.overlaps(rank)]
        found[way] = pairs, log.beside()
    return found


@pytest.fixture(scope="module")
def steps() -> list[dict[str, tuple[Pairs, Spans]]]:
    return run_ranks(4, log_steps, timeout_s=180)


def test_exchanges_lie_beside_products_of_another_microbatch(
    steps: list[dict[str, tuple[Pairs, Spans]]],
) -> None:
    for step in steps:
        pairs, spans = step["plain"]
        assert pairs == []
        assert spans
        # Only the shared expert of the same microbatch.
        assert all(own == action for action, beside in spans for own, _ in beside)
        for way in ("whole", "split"):
            pairs, spans = step[way]
            assert len(pairs) >= 4
            partners = dict(pairs) | {second: first for first, second in pairs}
            in_pairs = [(action, beside) for action, beside in spans if action in partners]
            # A layer sends rows and their weights, and gets results back.
            assert len(in_pairs) == 3 * 2 * len(pairs)
            # The last piece of a pass has no product: the shared expert is in the ones before it.
            others = [{other for other, _ in beside} for _, beside in in_pairs]
            is_beside = [
                partners[action] in found
                for (action, _), found in zip(in_pairs, others, strict=True)
            ]
            assert 3 * sum(is_beside) >= 2 * len(is_beside)
            for action, beside in in_pairs:
                assert beside, action
                assert Action.parse(partners[action]).microbatch != Action.parse(action).microbatch


def test_gradients_of_weights_fill_the_exchanges_of_their_own_backward_pass(
    steps: list[dict[str, tuple[Pairs, Spans]]],
) -> None:
    for step in steps:
        _, spans = step["split"]
        inputs = {action for action, _ in spans if Action.parse(action).kind == INPUT}
        assert len(inputs) == 2 * 5
        for action in inputs:
            own = [beside for other, beside in spans if other == action]
            # Those of the experts are done by the time the gradients of their rows travel back.
            assert [(action, WEIGHTS) in beside for beside in own] == [False, True, True]
