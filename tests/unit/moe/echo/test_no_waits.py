"""An MoE layer with fixed sizes never makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.moe.balance import inject_gradient
from megacore.moe.dispatchers import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Capacity,
    Dispatcher,
    ExpertPlacement,
    StaticBudget,
    StaticDispatcher,
)
from megacore.moe.dispatchers.base import constant
from megacore.moe.echo.device_plan import DevicePlan
from megacore.moe.echo.layer import Echo, ReceiveBudget
from megacore.moe.echo.memory import CloneMemory
from megacore.moe.echo.slots import SlotBuffers
from megacore.moe.experts import GroupedExperts
from megacore.moe.layer import MoELayer
from megacore.moe.options import EchoOptions, RouterOptions
from megacore.moe.router import TokenNames, TopKRouter, update_expert_biases
from megacore.ops.counter_random import StepKeys
from megacore.ops.recompute import RecomputeCache
from megacore.parallel import ProcessGroups
from tests.support.waits import WouldWait, waiting_is_an_error

HIDDEN, WIDTH, EXPERTS, TOKENS, BATCH = 16, 8, 8, 12, 2
SLOTS = 3  # of a rank, for clones
PLACEMENT = ExpertPlacement.of(ProcessGroups.single(), EXPERTS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer, by what differs from the plainest one."""

    router: dict[str, Any]
    capacity: Capacity | None = None
    budget: float = 2.0
    force_balanced: bool = False


CASES = {
    "plain": Case(router={}),
    "capacity by weight": Case(router={}, capacity=Capacity(factor=1.0)),
    "capacity by position": Case(router={}, capacity=Capacity(factor=1.0, drop_by="position")),
    "padded": Case(router={}, capacity=Capacity(factor=1.5, pad=True)),
    "tight budget": Case(router={}, budget=0.5),
    "loss per sequence": Case(router={"aux_loss_coef": 0.1, "z_loss_coef": 0.01, "jitter": 0.1}),
    "loss per batch": Case(router={"aux_loss_coef": 0.1, "aux_loss_type": "batch"}),
    "deepseek": Case(
        router={
            "score_function": "sigmoid",
            "bias_rate": 1e-3,
            "num_groups": 4,
            "groups_top_k": 2,
            "scaling_factor": 2.5,
        }
    ),
    "softmax of the best": Case(router={"score_function": "softmax_after_top_k"}),
    "balanced by force": Case(router={}, force_balanced=True),
}

ECHOES = {
    "balanced": EchoOptions(num_spare_slots=SLOTS, tolerance=0.0),
    "echo": EchoOptions(num_spare_slots=SLOTS, planner="echo", min_imbalance=1.1),
}


def make_layer(
    case: Case, dispatcher: Dispatcher | None = None, echo: Echo | None = None
) -> MoELayer:
    config = RouterOptions(
        num_experts=EXPERTS, top_k=2, force_balanced=case.force_balanced, **case.router
    )
    if dispatcher is None:
        budget = StaticBudget(case.budget)
        dispatcher = StaticDispatcher(PLACEMENT, budget=budget, capacity=case.capacity)

    def weight(*shape: int) -> nn.Parameter:
        made = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
        made.main_grad = torch.empty(shape)  # type: ignore[attr-defined]
        return made

    return MoELayer(
        router=TopKRouter(config, weight(EXPERTS, HIDDEN)),
        dispatcher=dispatcher,
        experts=GroupedExperts(
            weight(EXPERTS, 2, WIDTH, HIDDEN), weight(EXPERTS, HIDDEN, WIDTH), activation="swiglu"
        ),
        shared=nn.SiLU(),
        echo=echo,
    )


def make_names(layer: MoELayer) -> TokenNames:
    keys = StepKeys(layer.router.random_uses, device=layer.router.weight.device)
    return TokenNames(
        step=0, sample_ids_B=torch.arange(BATCH), positions_S=torch.arange(TOKENS), keys=keys
    )


def tokens() -> Tensor:
    return torch.empty(TOKENS, BATCH, HIDDEN, dtype=torch.bfloat16)


def run(layer: MoELayer, loss_factor: float | Tensor = 1.0) -> Callable[[], Tensor]:
    """The forward and the backward pass, its arguments being there."""
    x_SBH, names = tokens().requires_grad_(), make_names(layer)
    grad = torch.empty_like(x_SBH)
    # Made in the first pass of a process.
    for numbers in (PLACEMENT.members, (0,), (), tuple(range(EXPERTS))):
        constant(numbers, x_SBH.device)

    def step() -> Tensor:
        y_SBH: Tensor = layer(x_SBH, names, loss_factor=loss_factor)
        y_SBH.backward(grad)
        update_expert_biases([layer.router])
        layer.reset_counts()
        return y_SBH

    return step


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("per_sequence", [False, True])
def test_a_step_of_the_layer_waits_for_nothing(name: str, per_sequence: bool) -> None:
    with torch.device("meta"):
        layer = make_layer(CASES[name])
        step = run(layer, torch.empty(BATCH) if per_sequence else 0.5)
    with waiting_is_an_error():
        y_SBH = step()
    assert y_SBH.shape == (TOKENS, BATCH, HIDDEN)
    assert layer.router.weight.grad is not None


@pytest.mark.parametrize("dispatcher", [AllGatherDispatcher, AllToAllDispatcher])
def test_dispatchers_that_read_sizes_are_found_out(dispatcher: type[Dispatcher]) -> None:
    with torch.device("meta"):
        step = run(make_layer(CASES["plain"], dispatcher(PLACEMENT)))
    with pytest.raises(WouldWait, match="the host reads the rows"), waiting_is_an_error():
        step()


class MetaCloneMemory(CloneMemory):
    """Slots without values, which remembers what was asked of it."""

    asked: list[str]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked = []

    def open(self) -> None:
        self.asked.append("open")

    def push(self, projection: int, weights: Tensor, plan: DevicePlan) -> None:
        self._check(projection, weights)
        assert plan.slot_expert.shape == (PLACEMENT.ep_size, SLOTS)
        self.asked.append(f"push {projection}")

    def wait_for_weights(self, projection: int, plan: DevicePlan) -> Tensor:
        assert plan.slot_expert.device.type == "meta"
        self.asked.append(f"weights {projection}")
        return self._slots(projection, self._dtype)

    def reserve_grads(self, projection: int) -> Tensor:
        self.asked.append(f"grads {projection}")
        return self._slots(projection, self._grad_dtype)

    def offer_grads(self, projection: int, plan: DevicePlan) -> None:
        assert plan.slot_expert.device.type == "meta"
        self.asked.append(f"offer {projection}")

    def collect(self, projection: int, total: Tensor, plan: DevicePlan) -> None:
        assert plan.slot_expert.device.type == "meta"
        self._check(projection, total)
        self.asked.append(f"collect {projection}")

    def _slots(self, projection: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(SLOTS, *self._shapes[projection], dtype=dtype, device="meta")


class ReadingMemory(MetaCloneMemory):
    """Asks the host which slots are in use."""

    def wait_for_weights(self, projection: int, plan: DevicePlan) -> Tensor:
        (plan.slot_expert >= 0).any().item()
        return super().wait_for_weights(projection, plan)


def make_echo_layer(case: Case, options: EchoOptions, *, tries_memory: bool = True) -> MoELayer:
    """A layer of which experts may have clones."""
    budget = StaticBudget(case.budget)
    echo = Echo(
        PLACEMENT,
        options,
        ep=PLACEMENT.group,
        slots=SlotBuffers(SLOTS),
        capacity=case.capacity,
        budget=ReceiveBudget(case.budget, budget),
        tries_memory=tries_memory,
        device=torch.device("meta"),
    )
    dispatcher = StaticDispatcher(echo.places, budget=budget, receive_rows=echo.receive_rows)
    return make_layer(case, dispatcher, echo)


def use_memory(monkeypatch: pytest.MonkeyPatch, kind: type[MetaCloneMemory]) -> list[CloneMemory]:
    """Let layers have clone memory of this kind; the list gets what was made."""
    made: list[CloneMemory] = []

    def make(*args: Any, num_sets: int) -> tuple[CloneMemory, ...]:
        assert num_sets == 1
        made.append(kind(*args))
        return (made[-1],)

    monkeypatch.setattr("megacore.moe.echo.slots.make_clone_memory", make)
    return made


@pytest.mark.parametrize("name", ["plain", "capacity by weight", "tight budget", "deepseek"])
@pytest.mark.parametrize("planner", ECHOES)
def test_a_step_of_a_layer_with_clones_waits_for_nothing(
    name: str, planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = use_memory(monkeypatch, MetaCloneMemory)
    with torch.device("meta"):
        layer = make_echo_layer(CASES[name], ECHOES[planner])
        step = run(layer, 0.5)
    with waiting_is_an_error():
        y_SBH = step()
    assert y_SBH.shape == (TOKENS, BATCH, HIDDEN)
    assert layer.router.weight.grad is not None
    (memory,) = made
    assert isinstance(memory, MetaCloneMemory)
    grads = [f"{what} {p}" for p in (1, 0) for what in ("weights", "grads", "offer", "collect")]
    assert memory.asked == [
        *("open", "push 0", "push 1", "weights 0", "weights 1"),
        *("open", "push 1", "push 0", *grads),
    ]


def test_clone_memory_that_asks_the_host_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    use_memory(monkeypatch, ReadingMemory)
    with torch.device("meta"):
        step = run(make_echo_layer(CASES["plain"], ECHOES["balanced"]))
    with pytest.raises(WouldWait, match="_local_scalar_dense"), waiting_is_an_error():
        step()


def test_clones_as_messages_plan_without_waiting_and_are_found_out() -> None:
    with torch.device("meta"):
        layer = make_echo_layer(CASES["tight budget"], ECHOES["balanced"], tries_memory=False)
        x_SBH, names, cache = tokens(), make_names(layer), RecomputeCache()
        run(layer)  # makes constants
    with waiting_is_an_error():
        tokens_SBH, routing = layer.route(x_SBH, names, loss_factor=1.0, cache=cache)
        plan = layer.plan(routing, cache=cache)
        with pytest.raises(WouldWait, match="the host reads the plan of clones"):
            layer.finish(x_SBH, tokens_SBH, plan, cache=cache)


PLANTED: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: x.sum().item(),
    "a list": lambda x: x.tolist(),
    "a condition": lambda x: bool(x.sum() > 0),
    "positions": lambda x: x.nonzero(),
    "a mask as index": lambda x: x[x > 0],
    "a mask to write to": lambda x: x.clone().index_put_((x > 0,), x.sum()),
    "a selection": lambda x: x.masked_select(x > 0),
    "counts": lambda x: x.long().bincount(),
    "one of each": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "a new tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "a number as a tensor": lambda x: torch.as_tensor(1.0, device=x.device),
    "a copy to the device": lambda x: x + torch.ones(4, device="cpu").to(x.device),
    "a copy into the device": lambda x: x.clone().copy_(torch.ones(4, device="cpu")),
    "an index of the host": lambda x: x[torch.tensor([1, 2], device="cpu")],
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_waits_are_found(name: str) -> None:
    x = torch.empty(4, device="meta")
    with pytest.raises(WouldWait), waiting_is_an_error():
        PLANTED[name](x)


def test_what_does_not_wait_is_let_through() -> None:
    x = torch.empty(4, device="meta")
    with waiting_is_an_error():
        x[x.long()] = x.masked_fill(x > 0, 1.0).repeat_interleave(1)
        x.repeat_interleave(x.long(), output_size=7)
        torch.ones(4, device="cpu")[torch.tensor([True, False, True, False])].tolist()
        torch.as_tensor(x, device="meta")


def test_a_factor_of_the_host_becomes_a_gradient_on_the_device() -> None:
    x, loss = (torch.empty(3, device="meta", requires_grad=True) for _ in range(2))
    with waiting_is_an_error():
        inject_gradient(x, loss, 0.5).sum().backward()
    assert loss.grad is not None
    assert loss.grad.device.type == "meta"
