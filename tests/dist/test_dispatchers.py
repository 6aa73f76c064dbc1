"""Dispatchers on real ranks, against a loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.moe.dispatchers import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Capacity,
    Dispatcher,
    ExpertPlacement,
    LocalDispatcher,
    StaticBudget,
    StaticDispatcher,
)
from megacore.ops.activations import swiglu
from megacore.ops.gemm import grouped_gemm
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.row_exchange import RowSplits, start_exchange
from tests.support.distributed import run_ranks

HIDDEN, FFN = 6, 8


@dataclass(frozen=True)
class Choice:
    """Decisions in place of a router's."""

    probs: Tensor
    expert_ids: Tensor
    num_copies: Tensor | None = None


def make_dispatcher(
    name: str, placement: ExpertPlacement, *, capacity: Capacity | None = None, budget: float = 1e9
) -> Dispatcher:
    if name == "static":
        return StaticDispatcher(placement, budget=StaticBudget(budget), capacity=capacity)
    kinds = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher}
    kinds["local"] = LocalDispatcher
    return kinds[name](placement, capacity=capacity)


def make_choice(kind: str, rank: int, *, num_tokens: int, num_experts: int, top_k: int) -> Choice:
    """Choices of one rank's tokens: random, all tokens to the first experts, or uneven."""
    generator = torch.Generator().manual_seed(100 + rank)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if kind == "one expert":
        scores[:, :top_k] += 10.0
    elif kind == "last experts":  # ranks of the first experts get no token
        scores[:, -top_k:] += 10.0
    elif kind == "half":  # the experts of one half get none
        scores[:, num_experts // 2 :] -= 10.0
    probs, ids = scores.softmax(-1).topk(top_k, dim=-1)
    return Choice(probs, ids)


def weights(num_experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    fc1 = torch.randn(num_experts, 2, FFN, HIDDEN, generator=generator)
    return fc1, torch.randn(num_experts, HIDDEN, FFN, generator=generator)


def tokens_of(rank: int, num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(rank))


def loop_over_tokens(
    x: Tensor, choice: Choice, fc1: Tensor, fc2: Tensor, kept: Tensor | None = None
) -> Tensor:
    """The definition: a weighted sum of what each chosen expert makes of a token."""
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros(HIDDEN)
        for j, expert in enumerate(choice.expert_ids[t].tolist()):
            if kept is None or kept[t, j]:
                gate, up = fc1[expert] @ x[t]
                inner = torch.nn.functional.silu(gate) * up
                total = total + choice.probs[t, j] * (fc2[expert] @ inner)
        rows.append(total)
    return torch.stack(rows) if rows else x[:0]


def forward_backward(
    dispatcher: Dispatcher, x: Tensor, choice: Choice, groups: ProcessGroups
) -> dict[str, Any]:
    """Run one layer; return output, gradients and what the plan says."""
    placement = dispatcher.placement
    fc1, fc2 = weights(placement.num_experts)
    mine = slice(placement.first_local, placement.first_local + placement.num_local)
    width = FFN // groups.etp.size
    share = slice(groups.etp.position * width, (groups.etp.position + 1) * width)
    w1 = fc1[mine, :, share].contiguous().requires_grad_()
    w2 = fc2[mine, :, share].contiguous().requires_grad_()
    x, probs = x.clone().requires_grad_(), choice.probs.clone().requires_grad_()
    plan = dispatcher.preprocess(Choice(probs, choice.expert_ids))
    splits = dispatcher.read_splits(plan)
    arrived = dispatcher.dispatch(x, plan, splits).finish()
    sent = arrived.sent_next
    grad_out, out = (None, None) if sent is None else (sent.input_grads, sent.results)
    wide = grouped_gemm(arrived.rows, w1.flatten(1, 2), arrived.m_splits, grad_out=grad_out)
    rows = grouped_gemm(swiglu(wide, arrived.probs), w2, arrived.m_splits, out=out)
    rows = dispatcher.combine(rows, arrived, splits)
    output = dispatcher.postprocess(rows, plan)
    (output * direction(output)).sum().backward()
    return {
        "output": output.detach(),
        "x": x.grad,
        "probs": probs.grad,
        "w1": w1.grad,
        "w2": w2.grad,
        "where": (mine, share),
        "plan": plan,
        "rows": arrived.rows.shape[0],
    }


def direction(x: Tensor) -> Tensor:
    return torch.arange(1.0, x.numel() + 1).view_as(x).sin()


def run_case(rank: int, layout: dict[str, int], name: str, case: dict[str, Any]) -> dict[str, Any]:
    groups = ProcessGroups.create(Topology(**layout))
    placement = ExpertPlacement.of(groups, case["num_experts"])
    dispatcher = make_dispatcher(name, placement)
    choice = make_choice(**{**case, "rank": rank})
    return forward_backward(dispatcher, tokens_of(rank, case["num_tokens"]), choice, groups)


def check_against_loop(results: list[dict[str, Any]], case: dict[str, Any]) -> None:
    fc1, fc2 = (weight.requires_grad_() for weight in weights(case["num_experts"]))
    for rank, result in enumerate(results):
        x = tokens_of(rank, case["num_tokens"]).requires_grad_()
        choice = make_choice(**{**case, "rank": rank})
        probs = choice.probs.requires_grad_()
        output = loop_over_tokens(x, choice, fc1, fc2)
        (output * direction(output)).sum().backward()
        torch.testing.assert_close(result["output"], output.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result["x"], x.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result["probs"], probs.grad, rtol=1e-4, atol=1e-5)
    for key, full in (("w1", fc1.grad), ("w2", fc2.grad)):
        total = torch.zeros_like(full)
        for result in results:
            mine, share = result["where"]
            total[mine, :, share] += result[key]
        torch.testing.assert_close(total, full, rtol=1e-4, atol=1e-4)


LAYOUTS = {
    "1": {"world_size": 1},
    "ep2": {"world_size": 2, "ep": 2},
    "etp2": {"world_size": 2, "ep": 1, "etp": 2},
    "ep2 etp2": {"world_size": 4, "ep": 2, "etp": 2},
    "ep4": {"world_size": 4, "ep": 4},
}
CASES = [
    {"kind": "random", "num_tokens": 7, "num_experts": 4, "top_k": 2},
    {"kind": "one expert", "num_tokens": 5, "num_experts": 4, "top_k": 1},
    {"kind": "last experts", "num_tokens": 5, "num_experts": 8, "top_k": 2},
    {"kind": "half", "num_tokens": 3, "num_experts": 8, "top_k": 3},
    {"kind": "random", "num_tokens": 6, "num_experts": 4, "top_k": 4},
    {"kind": "random", "num_tokens": 1, "num_experts": 8, "top_k": 1},
]


def run_all_cases(rank: int, layout: dict[str, int]) -> list[dict[str, Any]]:
    return [
        run_case(rank, layout, name, case)
        for name in ("allgather", "alltoall", "static")
        for case in CASES
    ]


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_routing_gives_what_a_loop_over_tokens_gives(layout: str) -> None:
    settings = LAYOUTS[layout]
    by_rank = run_ranks(settings["world_size"], run_all_cases, settings)
    cases = CASES * 3
    for index, case in enumerate(cases):
        check_against_loop([results[index] for results in by_rank], case)


def test_splits_that_do_not_fit_are_refused() -> None:
    group = ProcessGroups.single().etp_ep
    with pytest.raises(ValueError, match="the counts 2 sum to 2, but there are 3 rows"):
        start_exchange(torch.zeros(3, 2), group, RowSplits(sent=(2,), received=(2,)))


def limited(
    rank: int, name: str, capacity: Capacity, case: dict[str, Any]
) -> tuple[list[int], int, dict[str, Any]]:
    groups = ProcessGroups.create(Topology(world_size=2, ep=2))
    placement = ExpertPlacement.of(groups, case["num_experts"])
    dispatcher = make_dispatcher(name, placement, capacity=capacity)
    choice = make_choice(**{**case, "rank": rank})
    result = forward_backward(dispatcher, tokens_of(rank, case["num_tokens"]), choice, groups)
    plan = result.pop("plan")
    return plan.tokens_per_expert.tolist(), int(plan.num_dropped), result


@pytest.mark.dist
@pytest.mark.parametrize("name", ["allgather", "alltoall", "static"])
@pytest.mark.parametrize("drop_by", ["probs", "position"])
@pytest.mark.parametrize("pad", [False, True])
def test_a_capacity_drops_what_it_says(name: str, drop_by: Any, pad: bool) -> None:
    case = {"kind": "half", "num_tokens": 9, "num_experts": 4, "top_k": 2}
    capacity = Capacity(factor=1.0, drop_by=drop_by, pad=pad)
    assert capacity.rows(18, 4) == 5
    fc1, fc2 = weights(4)
    for rank, (counts, num_dropped, result) in enumerate(
        run_ranks(2, limited, name, capacity, case)
    ):
        choice = make_choice(**{**case, "rank": rank})
        kept = torch.zeros(9, 2, dtype=torch.bool)
        for expert in range(4):
            copies = (choice.expert_ids == expert).nonzero().tolist()
            if drop_by == "probs":
                copies.sort(key=lambda at: -choice.probs[at[0], at[1]].item())
            for t, j in copies[:5]:
                kept[t, j] = True
        assert num_dropped == int((~kept).sum()) > 0
        assert counts == [int(kept[choice.expert_ids == e].sum()) for e in range(4)]
        expected = loop_over_tokens(tokens_of(rank, 9), choice, fc1, fc2, kept)
        torch.testing.assert_close(result["output"], expected, rtol=1e-5, atol=1e-5)
        assert (result["probs"][~kept] == 0).all()
        if name == "static" and pad:
            assert result["rows"] == 2 * 2 * 5  # members x local experts x capacity


def over_budget(rank: int, budget: float) -> tuple[int, int, int, Tensor]:
    case = {"kind": "one expert", "num_tokens": 8, "num_experts": 4, "top_k": 2}
    groups = ProcessGroups.create(Topology(world_size=2, ep=2))
    placement = ExpertPlacement.of(groups, 4)
    dispatcher = make_dispatcher("static", placement, budget=budget)
    choice = make_choice(**{**case, "rank": rank})
    result = forward_backward(dispatcher, tokens_of(rank, 8), choice, groups)
    plan = result["plan"]
    return int(plan.num_over_budget), int(plan.num_dropped), result["rows"], result["output"]


@pytest.mark.dist
@pytest.mark.parametrize(("budget", "missing"), [(1.0, 8), (1.5, 4), (2.0, 0), (100.0, 0)])
def test_a_static_buffer_counts_what_it_has_no_room_for(budget: float, missing: int) -> None:
    """All 16 copies of each rank go to one rank, whose fair share is 8."""
    fc1, fc2 = weights(4)
    case = {"kind": "one expert", "num_tokens": 8, "num_experts": 4, "top_k": 2}
    for rank, (num_over, num_dropped, rows, output) in enumerate(run_ranks(2, over_budget, budget)):
        assert num_over == num_dropped == missing
        assert rows == 2 * min(16, int(8 * budget))
        choice = make_choice(**{**case, "rank": rank})
        kept = torch.ones(8, 2, dtype=torch.bool)
        # Copies for the last expert go first, the last tokens before the others.
        last = (choice.expert_ids == 1).nonzero().tolist()
        for t, j in last[len(last) - missing :]:
            kept[t, j] = False
        expected = loop_over_tokens(tokens_of(rank, 8), choice, fc1, fc2, kept)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def unequal(rank: int, name: str, host_memory: bool) -> tuple[str, list[bool]]:
    groups = ProcessGroups.create(Topology(world_size=2, ep=2), host_memory=host_memory)
    placement = ExpertPlacement.of(groups, 4)
    dispatcher = make_dispatcher(name, placement)
    mine = make_choice("random", rank, num_tokens=4 + rank, num_experts=4, top_k=2)
    with pytest.raises((ValueError, RuntimeError)) as error:
        dispatcher.preprocess(mine)
    equal = make_choice("random", rank, num_tokens=5, num_experts=4, top_k=2)
    results = [
        forward_backward(d, tokens_of(rank, 5), equal, groups)
        for d in (dispatcher, make_dispatcher("alltoall", placement))
    ]
    same = [torch.equal(results[0][key], results[1][key]) for key in ("output", "x", "w1")]
    text = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    return f"{error.type.__name__}: {text}", same


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "host_memory"), [("static", True), ("static", False), ("allgather", False)]
)
def test_unequal_numbers_of_tokens_are_an_error_on_all_ranks(name: str, host_memory: bool) -> None:
    """Before any row travels; afterwards the group works on."""
    for text, same in run_ranks(2, unequal, name, host_memory):
        assert text == (
            "ValueError: group etp_ep: unequal numbers of tokens in one call: 4 on rank 0; 5 on "
            f"rank 1. The {name} dispatcher needs equally many on all ranks that share experts: "
            "pad to 5, or use alltoall"
        )
        assert same == [True, True, True]


@pytest.mark.dist
def test_shared_memory_compares_the_numbers_of_tokens_of_allgather() -> None:
    for rank, (text, same) in enumerate(run_ranks(2, unequal, "allgather", True)):
        error, note = text.split("\n")
        assert error.startswith("RuntimeError: the ranks of a group are in different calls: rank 0")
        assert "all_gather of 8 int64 per member" in error
        assert "all_gather of 10 int64 per member" in error
        assert note == (
            f"while gathering the choices of {4 + rank} tokens, 2 each; the allgather dispatcher "
            "needs equally many tokens on all ranks that share experts: pad to the largest number, "
            "or use alltoall"
        )
        assert same == [True, True, True]


@pytest.mark.parametrize("drop_by", [None, "probs", "position"])
def test_one_rank_computes_the_same_bits_without_an_exchange(drop_by: str | None) -> None:
    groups = ProcessGroups.single()
    placement = ExpertPlacement.of(groups, 8)
    capacity = None if drop_by is None else Capacity(factor=0.75, drop_by=drop_by)
    for seed, num_tokens in enumerate((0, 1, 2, 31)):
        choice = make_choice("random", seed, num_tokens=num_tokens, num_experts=8, top_k=3)
        x = tokens_of(seed, num_tokens)
        made = [
            forward_backward(kind(placement, capacity=capacity), x, choice, groups)
            for kind in (LocalDispatcher, AllToAllDispatcher)
        ]
        for key in ("output", "x", "probs", "w1", "w2"):
            assert torch.equal(made[0][key], made[1][key]), key
        plans = [each["plan"] for each in made]
        assert torch.equal(*(plan.tokens_per_expert for plan in plans))
        assert plans[0].num_over_budget is plans[1].num_over_budget is None
        if capacity is None:
            assert plans[0].num_dropped is None
            assert int(plans[1].num_dropped) == 0
        else:
            assert int(plans[0].num_dropped) == int(plans[1].num_dropped)


def test_a_plan_has_the_fields_that_its_dispatcher_declares() -> None:
    placement = ExpertPlacement.of(ProcessGroups.single(), 4)
    choice = make_choice("random", 0, num_tokens=5, num_experts=4, top_k=2)
    for name in ("allgather", "alltoall", "local", "static"):
        dispatcher = make_dispatcher(name, placement)
        plan = dispatcher.preprocess(choice)
        fields = {field: getattr(plan, field) for field in dispatcher.captured_fields}
        if name == "local":
            assert fields.pop("num_dropped") is None, "it drops by capacity only"
        assert all(isinstance(value, Tensor) for value in fields.values())
        # Everything that is not declared is fixed before the routing is known.
        others = set(vars(plan)) - set(fields)
        assert all(getattr(plan, field) is None for field in others), name
