"""A whole MoE layer on the GPU: nothing waits, and a captured one follows any routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.moe.dispatchers import Capacity, ExpertPlacement, StaticBudget, StaticDispatcher
from megacore.moe.experts import GroupedExperts
from megacore.moe.layer import MoELayer
from megacore.moe.options import RouterOptions
from megacore.moe.router import TokenNames, TopKRouter
from megacore.ops.counter_random import StepKeys
from megacore.ops.gemm_cuda import takes_kernel
from megacore.parallel import ProcessGroups
from tests.support.gpu import capture, synchronising_is_an_error

pytestmark = pytest.mark.gpu

HIDDEN, WIDTH, EXPERTS, TOKENS, BATCH = 64, 32, 8, 48, 2

LOSSES: dict[str, Any] = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01, "jitter": 0.1}
POOLED: dict[str, Any] = {"aux_loss_coef": 0.1, "aux_loss_type": "batch"}
DEEPSEEK: dict[str, Any] = {
    "score_function": "sigmoid",
    "bias_rate": 1e-3,
    "num_groups": 4,
    "groups_top_k": 2,
    "scaling_factor": 2.5,
}
CASES: dict[str, tuple[dict[str, Any], float, Capacity | None]] = {
    "small": ({}, 8.0, None),
    "tight budget": ({}, 0.5, None),
    "capacity": (LOSSES, 8.0, Capacity(factor=1.0)),
    "padded": (
        {"aux_loss_coef": 0.1, "aux_loss_type": "batch"},
        1.0,
        Capacity(factor=1.5, pad=True),
    ),
    "deepseek": (DEEPSEEK, 8.0, None),
}


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    rows = torch.empty(8, HIDDEN, dtype=torch.bfloat16, device="cuda")
    if not takes_kernel(rows, EXPERTS, 2 * WIDTH, HIDDEN):
        pytest.skip("this build has no grouped product that reads its counts on the device")


def make_layer(case: str) -> MoELayer:
    settings, budget, capacity = CASES[case]
    random = torch.Generator("cuda").manual_seed(1)

    def weight(*shape: int) -> nn.Parameter:
        values = torch.randn(shape, generator=random, device="cuda") * 0.2
        made = nn.Parameter(values.bfloat16())
        made.main_grad = torch.zeros(shape, device="cuda")  # type: ignore[attr-defined]
        return made

    placement = ExpertPlacement.of(ProcessGroups.single(), EXPERTS)
    return MoELayer(
        router=TopKRouter(
            RouterOptions(num_experts=EXPERTS, top_k=2, **settings), weight(EXPERTS, HIDDEN)
        ),
        dispatcher=StaticDispatcher(placement, budget=StaticBudget(budget), capacity=capacity),
        experts=GroupedExperts(
            weight(EXPERTS, 2, WIDTH, HIDDEN), weight(EXPERTS, HIDDEN, WIDTH), activation="swiglu"
        ),
        shared=nn.SiLU(),
    )


def skewed(seed: int) -> Tensor:
    """Tokens that prefer some experts, more with every seed: at last most experts get none."""
    random = torch.Generator("cuda").manual_seed(seed)
    x_SBH = torch.randn(TOKENS, BATCH, HIDDEN, generator=random, device="cuda")
    favourite = torch.randn(HIDDEN, generator=random, device="cuda")
    return (x_SBH + 0.25 * seed * favourite).bfloat16()


def step_of(layer: MoELayer, x_SBH: Tensor, factor: float | Tensor) -> Callable[..., Any]:
    """The forward and the backward pass; gives the result and all gradients."""
    names = TokenNames(
        step=0,
        sample_ids_B=torch.arange(BATCH, device="cuda"),
        positions_S=torch.arange(TOKENS, device="cuda"),
        keys=StepKeys(layer.router.random_uses, device="cuda"),
    )
    grad = skewed(0)
    main_grads = [layer.experts.fc1.main_grad, layer.experts.fc2.main_grad]

    def step() -> tuple[Tensor, ...]:
        x_SBH.grad = layer.router.weight.grad = None
        layer.reset_counts()
        for main_grad in main_grads:
            main_grad.zero_()
        y_SBH = layer(x_SBH, names, loss_factor=factor)
        y_SBH.backward(grad)
        grads = [x_SBH.grad, layer.router.weight.grad, *(g.clone() for g in main_grads)]
        return y_SBH.detach(), *grads, layer.tokens_per_expert.clone()

    return step


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("factor", ["number", "per sequence"])
def test_a_step_of_the_layer_waits_for_nothing(case: str, factor: str) -> None:
    layer, x_SBH = make_layer(case), skewed(1).requires_grad_()
    factors = 0.5 if factor == "number" else torch.rand(BATCH, device="cuda")
    step = step_of(layer, x_SBH, factors)
    expected = step()  # constants and kernels are loaded once in a process
    torch.cuda.synchronize()
    with synchronising_is_an_error():
        found = step()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert all(bool(result.isfinite().all()) and bool(result.any()) for result in found)


@pytest.mark.parametrize("case", CASES)
def test_a_captured_layer_follows_twenty_routings(case: str) -> None:
    layer, x_SBH = make_layer(case), skewed(0).requires_grad_()
    step = step_of(layer, x_SBH, 1.0)
    graph, outputs = capture(step)
    counts = set()
    for seed in range(20):
        with torch.no_grad():
            x_SBH.copy_(skewed(seed))
        graph.replay()
        found = [output.clone() for output in outputs]
        for one, other in zip(found, step(), strict=True):
            assert torch.equal(one, other), f"routing {seed}"
        counts.add(tuple(found[-1].tolist()))
    assert len(counts) > 10
    if case in ("small", "deepseek"):  # nothing is dropped
        assert all(sum(each) == 2 * TOKENS * BATCH for each in counts)
        assert any(0 in each for each in counts)
