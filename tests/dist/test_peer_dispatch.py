"""Rows written into memory of peers: the bits of the all-to-all, whatever the routing."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import ConfigError, MegacoreError, PeerLostError
from megacore.moe.dispatchers import (
    AllToAllDispatcher,
    Capacity,
    ExpertPlacement,
    HostPeers,
    PeerDispatcher,
    PendingDispatch,
    StaticBudget,
    StaticDispatcher,
    device_peers,
    make_peers,
    static_receive_rows,
)
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.row_exchange import RowSplits
from tests.dist.test_dispatchers import (
    CASES,
    LAYOUTS,
    Choice,
    forward_backward,
    loop_over_tokens,
    make_choice,
    tokens_of,
    weights,
)
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

SHARED = {name: layout for name, layout in LAYOUTS.items() if layout["world_size"] > 1}


def peer_dispatcher(
    placement: ExpertPlacement,
    *,
    budget: float = 1e9,
    capacity: Capacity | None = None,
    peers: HostPeers | None = None,
) -> PeerDispatcher:
    return PeerDispatcher(
        placement,
        peers=HostPeers(placement.group) if peers is None else peers,
        receive_rows=static_receive_rows(placement, StaticBudget(budget), capacity),
        capacity=capacity,
    )


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    keys = ("output", "x", "probs", "w1", "w2")
    different = [key for key in keys if not torch.equal(a[key], b[key])]
    plans = a["plan"], b["plan"]
    for field in ("tokens_per_expert", "num_dropped"):
        if not torch.equal(*(getattr(plan, field) for plan in plans)):
            different.append(field)
    if not torch.equal(*(plan.arriving.sum(0) for plan in plans)):
        different.append("arriving")
    if any(plan.num_over_budget is not None and bool(plan.num_over_budget) for plan in plans):
        different.append("num_over_budget")
    return different


def compare_with_all_to_all(rank: int, layout: dict[str, int]) -> list[list[str]]:
    groups = ProcessGroups.create(Topology(**layout))
    peers = HostPeers(groups.etp_ep)
    found = []
    for case in CASES:
        placement = ExpertPlacement.of(groups, case["num_experts"])
        results = [
            forward_backward(
                dispatcher,
                tokens_of(rank, case["num_tokens"]),
                make_choice(**{**case, "rank": rank}),
                groups,
            )
            for dispatcher in (
                AllToAllDispatcher(placement),
                peer_dispatcher(placement, peers=peers),
            )
        ]
        found.append(same_bits(*results))
    return found


@pytest.mark.parametrize("layout", SHARED)
def test_any_routing_has_the_bits_of_the_all_to_all(layout: str) -> None:
    settings = SHARED[layout]
    for found in run_ranks(settings["world_size"], compare_with_all_to_all, settings):
        assert found == [[]] * len(CASES)


def place_by_list(choices: list[Choice], num_experts: int, num_parts: int, rows: int) -> list[Any]:
    """Which copies find room, by rank: the rows of a part by expert, then rank, then copy."""
    kept = [torch.zeros_like(choice.expert_ids, dtype=torch.bool) for choice in choices]
    taken = [0] * num_parts
    for expert in range(num_experts):
        part = expert * num_parts // num_experts
        for rank, choice in enumerate(choices):
            for t, j in (choice.expert_ids == expert).nonzero().tolist():
                kept[rank][t, j] = taken[part] < rows
                taken[part] += 1
    return kept


def run_over(rank: int, budget: float, kind: str) -> tuple[list[int], list[int], int, Tensor]:
    groups = ProcessGroups.create(Topology(world_size=2, ep=2))
    dispatcher = peer_dispatcher(ExpertPlacement.of(groups, 4), budget=budget)
    choice = make_choice(kind, rank, num_tokens=8, num_experts=4, top_k=2)
    result = forward_backward(dispatcher, tokens_of(rank, 8), choice, groups)
    plan = result["plan"]
    numbers = [int(plan.num_over_budget), int(plan.num_dropped)]
    return numbers, plan.tokens_per_expert.tolist(), result["rows"], result["output"]


@pytest.mark.parametrize("kind", ["one expert", "random", "half"])
@pytest.mark.parametrize("budget", [0.01, 0.8, 1.0, 1.5, 2.0])
def test_the_buffer_is_shared_and_what_it_has_no_room_for_is_counted(
    budget: float, kind: str
) -> None:
    rows = 2 * min(16, -(-int(8 * budget * 100) // 100))
    choices = [make_choice(kind, rank, num_tokens=8, num_experts=4, top_k=2) for rank in (0, 1)]
    kept = place_by_list(choices, 4, 2, rows)
    fc1, fc2 = weights(4)
    for rank, (numbers, counts, found_rows, output) in enumerate(
        run_ranks(2, run_over, budget, kind)
    ):
        choice = choices[rank]
        assert found_rows == rows
        assert numbers == [int((~kept[rank]).sum())] * 2
        assert counts == [int(kept[rank][choice.expert_ids == e].sum()) for e in range(4)]
        expected = loop_over_tokens(tokens_of(rank, 8), choice, fc1, fc2, kept[rank])
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def padded(rank: int) -> list[str]:
    groups = ProcessGroups.create(Topology(world_size=2, ep=2))
    placement = ExpertPlacement.of(groups, 4)
    capacity = Capacity(factor=0.7, drop_by="probs", pad=True)
    choice = make_choice("one expert", rank, num_tokens=9, num_experts=4, top_k=2)
    results = [
        forward_backward(dispatcher, tokens_of(rank, 9), choice, groups)
        for dispatcher in (
            StaticDispatcher(placement, budget=StaticBudget(0.1), capacity=capacity),
            peer_dispatcher(placement, budget=0.1, capacity=capacity),
        )
    ]
    assert int(results[1]["plan"].num_over_budget) == 0
    assert int(results[1]["plan"].num_dropped) > 0
    assert results[0]["rows"] == results[1]["rows"]
    return same_bits(*results)


def test_padding_to_a_capacity_leaves_room_for_all_that_it_keeps() -> None:
    assert run_ranks(2, padded) == [[], []]


def back_to_back(rank: int, num_rounds: int) -> list[str]:
    """Layers of random sizes, two at a time under way, nobody waiting for anybody in between."""
    groups = ProcessGroups.create(Topology(world_size=4, ep=4))
    placement = ExpertPlacement.of(groups, 8)
    peers = HostPeers(groups.etp_ep)
    sizes = random.Random(1)
    delays = random.Random(rank)
    found = []
    for number in range(num_rounds):
        num_tokens = sizes.choice([1, 3, 8, 8, 20])
        kind = sizes.choice(["random", "one expert", "last experts", "half"])
        layers = []
        for layer in range(2):
            dispatcher = peer_dispatcher(placement, peers=peers)
            choice = make_choice(kind, rank, num_tokens=num_tokens, num_experts=8, top_k=2)
            x = tokens_of(100 * number + 10 * layer + rank, num_tokens).requires_grad_()
            plan = dispatcher.preprocess(choice)
            layers.append((dispatcher, x, choice, plan, dispatcher.dispatch(x, plan, RowSplits())))
            if delays.random() < 0.1:
                time.sleep(delays.random() * 0.01)
        for dispatcher, x, choice, plan, pending in layers:
            arrived = pending.finish()
            owner = torch.arange(2).repeat_interleave(arrived.m_splits) + placement.first_local
            filled = torch.zeros(arrived.rows.shape[0])
            filled[: len(owner)] = owner + 1.0
            rows = arrived.rows * (filled * arrived.probs)[:, None]
            output = dispatcher.postprocess(dispatcher.combine(rows, arrived, RowSplits()), plan)
            factor = (choice.probs * (choice.expert_ids + 1)).sum(1, keepdim=True)
            output.backward(torch.ones_like(output))
            if not torch.allclose(output, x * factor, rtol=1e-5, atol=1e-6):
                found.append(f"output of round {number}")
            if not torch.allclose(x.grad, factor.expand_as(x), rtol=1e-5, atol=1e-6):
                found.append(f"gradient of round {number}")
            if delays.random() < 0.1:
                time.sleep(delays.random() * 0.01)
    return found


def test_hundreds_of_layers_follow_each_other_without_a_reset() -> None:
    assert run_ranks(4, back_to_back, 150, timeout_s=120) == [[], [], [], []]


def abandoned(rank: int) -> list[bool]:
    """Rows of pushes after a pull for which a slow rank writes rows, and which does not start."""
    groups = ProcessGroups.create(Topology(world_size=2, ep=2))
    dispatcher = peer_dispatcher(ExpertPlacement.of(groups, 4))
    choice = make_choice("random", rank, num_tokens=8, num_experts=4, top_k=2)
    x, plan = tokens_of(rank, 8), dispatcher.preprocess(choice)

    def push() -> PendingDispatch:
        return dispatcher.dispatch(x, plan, RowSplits())

    expected = push().finish()
    assert expected.sent_next is not None
    rows = expected.sent_next.results()
    if rank == 0:
        time.sleep(0.3)
    rows.fill_(7.0)
    num_rows = int(expected.m_splits.sum())
    pushes = [push(), push()]  # one of them to the slot of the pull
    found = [pending.finish().rows[:num_rows] for pending in pushes]
    return [torch.equal(rows, expected.rows[:num_rows]) for rows in found]


def test_nobody_pushes_over_the_rows_of_a_pull_that_does_not_start() -> None:
    assert run_ranks(2, abandoned) == [[True, True], [True, True]]


# A rank that has returned waits for the others; what is kept here has not left its group then.
KEPT: list[PeerDispatcher] = []


def one_stops(rank: int, how: str) -> str:
    groups = ProcessGroups.create(Topology(world_size=2, ep=2), timeout_s=4.0)
    dispatcher = peer_dispatcher(ExpertPlacement.of(groups, 4))
    choice = make_choice("random", rank, num_tokens=4, num_experts=4, top_k=2)
    plan = dispatcher.preprocess(choice)
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        KEPT.append(dispatcher)
        return ""
    try:
        dispatcher.dispatch(tokens_of(rank, 4), plan, RowSplits()).finish()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("how", "said"), [("killed", "lost a peer: the process of rank 1"), ("stalled", "timed out")]
)
def test_a_rank_that_stops_in_between_is_named_in_bounded_time(how: str, said: str) -> None:
    text = run_ranks(2, one_stops, how, may_die=[1])[0]
    assert said in text
    assert re.search(r"rank 1 \(position 1", text)


def uneven(rank: int, first: int) -> tuple[str, list[str]]:
    """A call with other sizes than before, after one with ``first`` tokens, and what comes then."""
    groups = ProcessGroups.create(Topology(world_size=2, ep=2))
    peers = HostPeers(groups.etp_ep)
    placement = ExpertPlacement.of(groups, 4)

    def choices(num_tokens: int) -> Choice:
        return make_choice("random", rank, num_tokens=num_tokens, num_experts=4, top_k=2)

    def results(num_tokens: int) -> list[dict[str, Any]]:
        return [
            forward_backward(d, tokens_of(rank, num_tokens), choices(num_tokens), groups)
            for d in (AllToAllDispatcher(placement), peer_dispatcher(placement, peers=peers))
        ]

    if first > 0:
        results(first)
    with pytest.raises(ValueError, match="all need equally many tokens") as error:
        peer_dispatcher(placement, peers=peers).preprocess(choices(4 + rank))
    return str(error.value), same_bits(*results(5))


# Room for the rows need not grow, must grow on one rank, or is made for the first time.
@pytest.mark.parametrize("first", [9, 4, 0])
def test_ranks_with_unequal_buffers_are_told_so(first: int) -> None:
    (one, after_one), (other, after_other) = run_ranks(2, uneven, first)
    assert one.startswith("rank 1 keeps 20 rows for its experts, but rank 0 16;")
    assert other.startswith("rank 0 keeps 16 rows for its experts, but rank 1 20;")
    assert after_one == after_other == []


def too_many(rank: int) -> str:
    groups = ProcessGroups.create(Topology(world_size=2, ep=2))
    dispatcher = peer_dispatcher(ExpertPlacement.of(groups, 4))
    choice = make_choice("random", rank, num_tokens=4, num_experts=4, top_k=2)
    plan = dispatcher.preprocess(choice)
    under_way = [dispatcher.dispatch(tokens_of(rank, 4), plan, RowSplits()) for _ in range(2)]
    with pytest.raises(RuntimeError, match="more than 2 exchanges of rows") as error:
        dispatcher.dispatch(tokens_of(rank, 4), plan, RowSplits())
    for pending in under_way:
        pending.finish()
    return str(error.value)


def test_a_third_exchange_at_a_time_is_refused() -> None:
    run_ranks(2, too_many)


def without_memory(_rank: int) -> list[str]:
    groups = ProcessGroups.create(Topology(world_size=2, ep=2), host_memory=False)
    options = {"device": torch.device("cpu"), "row_bytes": 4}
    assert make_peers(groups.etp_ep, transport="auto", **options) is None
    with pytest.raises(ConfigError) as error:
        make_peers(groups.etp_ep, transport="peer", **options)
    shared = ProcessGroups.create(Topology(world_size=2, ep=2))
    assert make_peers(shared.etp_ep, transport="collective", **options) is None
    assert isinstance(make_peers(shared.etp_ep, transport="auto", **options), HostPeers)
    return [str(error.value)]


def test_without_shared_memory_rows_take_collectives_or_the_wish_for_peers_is_refused() -> None:
    for (text,) in run_ranks(2, without_memory):
        assert "moe.static_transport = peer needs ranks that reach each other's memory" in text
        assert "set it to auto or collective" in text


def test_a_group_of_one_sends_nothing() -> None:
    group = ProcessGroups.single().etp_ep
    assert make_peers(group, torch.device("cpu"), transport="peer", row_bytes=4) is None


def of_other_sizes(rank: int) -> list[str]:
    groups = ProcessGroups.create(Topology(world_size=2, ep=2))
    dispatcher = peer_dispatcher(ExpertPlacement.of(groups, 4))
    choice = make_choice("random", rank, num_tokens=8, num_experts=4, top_k=2)
    plan = dispatcher.preprocess(choice)
    found = []
    for tokens in (tokens_of(rank, 7), tokens_of(rank, 9), tokens_of(rank, 8)[None]):
        with pytest.raises(ValueError, match="must be a matrix of 8 rows") as error:
            dispatcher.dispatch(tokens, plan, RowSplits())
        found.append(str(error.value))
    arrived = dispatcher.dispatch(tokens_of(rank, 8), plan, RowSplits()).finish()
    with pytest.raises(ValueError, match="must be a matrix of 32 rows") as error:
        dispatcher.combine(arrived.rows[:2], arrived, RowSplits())
    return [*found, str(error.value)]


def test_rows_that_are_not_those_of_the_plan_are_refused() -> None:
    texts = run_ranks(2, of_other_sizes)[0]
    assert texts[0].startswith("tokens (7, 6) float32 on cpu must be a matrix of 8 rows")
    assert texts[3].startswith("results (2, 6) float32 on cpu must be a matrix of 32 rows")


def weights_in_other_formats(rank: int) -> list[str]:
    groups = ProcessGroups.create(Topology(world_size=2, ep=2))
    placement = ExpertPlacement.of(groups, 4)
    choice = make_choice("random", rank, num_tokens=8, num_experts=4, top_k=2)
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        results = []
        for dispatcher in (AllToAllDispatcher(placement), peer_dispatcher(placement)):
            probs = choice.probs.to(dtype).requires_grad_()
            plan = dispatcher.preprocess(replace(choice, probs=probs))
            splits = dispatcher.read_splits(plan)
            arrived = dispatcher.dispatch(tokens_of(rank, 8), plan, splits).finish()
            rows = arrived.rows * arrived.probs[:, None]
            output = dispatcher.postprocess(dispatcher.combine(rows, arrived, splits), plan)
            output.sum().backward()
            assert probs.grad is not None
            assert probs.grad.dtype == dtype
            results.append((output.detach().float(), probs.grad.float()))
        for a, b in zip(*results, strict=True):
            if not torch.allclose(a, b, rtol=1e-5, atol=1e-6):
                found.append(f"{dtype}: {a} {b}")
    return found


def test_weights_in_other_formats_travel_in_float32() -> None:
    assert run_ranks(2, weights_in_other_formats) == [[], []]


def with_small_files(rank: int) -> str:
    groups = ProcessGroups.create(Topology(world_size=2, ep=2))
    dispatcher = peer_dispatcher(ExpertPlacement.of(groups, 4))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        with pytest.raises(MegacoreError) as error:
            dispatcher.preprocess(
                make_choice("random", rank, num_tokens=64, num_experts=4, top_k=2)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return str(error.value)


def test_too_little_memory_on_one_rank_is_told_by_all() -> None:
    for text in run_ranks(2, with_small_files):
        assert re.match(r"group etp_ep: not every rank has [\d,]+ bytes of shared memory", text)
        assert "lower moe.static_budget, or set moe.static_transport = collective" in text


def in_bfloat16(rank: int) -> list[str]:
    groups = ProcessGroups.create(Topology(world_size=2, ep=1, etp=2))
    placement = ExpertPlacement.of(groups, 4)
    choice = make_choice("random", rank, num_tokens=16, num_experts=4, top_k=2)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        results = []
        for dispatcher in (AllToAllDispatcher(placement), peer_dispatcher(placement)):
            x = tokens_of(rank, 16).to(dtype).requires_grad_()
            plan = dispatcher.preprocess(choice)
            splits = dispatcher.read_splits(plan)
            arrived = dispatcher.dispatch(x, plan, splits).finish()
            rows = arrived.rows * 1.7
            output = dispatcher.postprocess(dispatcher.combine(rows, arrived, splits), plan)
            output.backward(torch.linspace(-1, 1, output.numel()).view_as(output).to(dtype))
            results.append((output.detach(), x.grad))
        found += [str(dtype) for a, b in zip(*results, strict=True) if not torch.equal(a, b)]
    return found


def test_other_number_formats_have_the_bits_of_the_all_to_all_too() -> None:
    assert run_ranks(2, in_bfloat16) == [[], []]


def try_faulty_peers(rank: int, way: str) -> list[str]:
    """Exchange a pattern where one member's rows arrive wrong; what each transport becomes."""
    groups = ProcessGroups.create(Topology(world_size=3, ep=3))
    options: dict[str, Any] = {"device": torch.device("cpu"), "row_bytes": 4}
    assert isinstance(make_peers(groups.etp_ep, transport="peer", **options), HostPeers)
    real = getattr(HostPeers, way)

    def faulty(peers: HostPeers, first: Any, x: Tensor, *others: Any) -> Any:
        if rank == 1 and way == "start_pull":
            x = x.flip(0)  # what this member publishes
        found = real(peers, first, x, *others)
        if rank == 1 and way == "finish_push":
            x[1, 200] += 1.0  # what this member received
        return found

    def timed_out(*args: Any) -> Any:
        del args
        raise PeerLostError("group ep: rank 1 did not send its rows within 1 s")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostPeers, way, timed_out if way == "plan_copies" else faulty)
        with pytest.warns(UserWarning, match="exchanges rows by collectives, not in memory of"):
            assert make_peers(groups.etp_ep, transport="auto", **options) is None
        with pytest.raises(ConfigError) as caught:
            make_peers(groups.etp_ep, transport="peer", **options)
    return [str(caught.value)]


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("finish_push", "on rank 1"),
        ("start_pull", "on rank 0"),
        ("plan_copies", "rank 1 did not send its rows within 1 s on rank 0"),
    ],
)
def test_peer_memory_that_does_not_arrive_is_not_used(way: str, named: str) -> None:
    for (message,) in run_ranks(3, try_faulty_peers, way):
        assert "needs ranks that reach each other's memory, but here is" in message
        assert named in message


def reasons(rank: int) -> list[str]:
    """Return the reasons against memory of peers as each step of the decision fails on rank 1."""
    group = ProcessGroups.create(Topology(world_size=2, ep=2)).ep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_peers, "kernel_obstacle", lambda _: "old driver" if rank else None)
        found = [device_peers.reason_against(group, torch.device("cpu"))]
        patch.setattr(device_peers, "kernel_obstacle", lambda _: None)

        def allocate(*_: Any) -> None:
            if rank:
                raise RuntimeError("no handle")

        patch.setattr(device_peers, "symmetric_memory", allocate)
        found.append(device_peers.reason_against(group, torch.device("cpu")))
        patch.setattr(device_peers, "symmetric_memory", lambda *_: None)
        found.append(device_peers.reason_against(group, torch.device("cpu")))
        patch.setattr("socket.gethostname", lambda: f"host{rank}")
        found.append(device_peers.reason_against(group, torch.device("cpu")))
    return found


def test_ranks_agree_on_what_prevents_memory_of_peers() -> None:
    first, second = run_ranks(2, reasons)
    assert first[:3] == [
        "our kernels cannot run on rank 1",
        "no symmetric memory on rank 1",
        "",
    ]
    assert second[:3] == ["old driver on rank 1", "no symmetric memory (no handle) on rank 1", ""]
    assert first[3].startswith("a group over several hosts")
