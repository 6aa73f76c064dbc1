"""Operations on the memory of peer GPUs, without a GPU: emulated kernels, all members in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore._core import CloneLayout, PeerLayout, peer_flags_bytes
from megacore.ops import clone_exchange, peer_exchange  # noqa: F401  registers
from megacore.ops.permutation import sort_by_expert
from tests.unit.ops.test_gpu_operations import define_emulated

PEERS = ("send_counts", "send_sums", "plan", "map_copies", "start_push", "finish_push")
PULLS = ("reserve_pull", "start_pull", "finish_pull")
CLONES = ("open", "push", "wait", "reserve_grads", "offer_grads", "collect")
NAMES = [*(f"peer_{name}" for name in (*PEERS, *PULLS)), *(f"clones_{name}" for name in CLONES)]
R, L, T, K, H = 2, 2, 5, 2, 8  # ranks, experts of a rank, tokens, choices, width


@pytest.fixture(scope="module")
def emulated() -> Iterator[Any]:
    yield from define_emulated(NAMES)


def memories(num_bytes: int) -> tuple[Tensor, list[Tensor]]:
    """Addresses of the ranks' memory, and the memory of each."""
    aligned = []
    for _ in range(R):
        memory = torch.zeros(num_bytes + 256, dtype=torch.uint8)
        aligned.append(memory[-memory.data_ptr() % 256 :][:num_bytes])
    return torch.tensor([memory.data_ptr() for memory in aligned]), aligned


class Members:
    """All members of an exchange of rows, which take every step together."""

    def __init__(self, ops: Any, num_experts: int) -> None:
        self.ops, self.num_experts, self.capacity = ops, num_experts, R * T * K
        sizes = num_experts, self.capacity, 4 * H
        names = ("max_experts", "max_capacity", "max_row_bytes")
        layout = PeerLayout(num_members=R, **dict(zip(names, sizes, strict=True)))
        addresses, self.memory = memories(peer_flags_bytes(R) + layout.bytes)
        states = [torch.zeros(64, dtype=torch.int64) for _ in range(R)]
        self.members = [(addresses, states[rank], rank, *sizes, 20.0) for rank in range(R)]

    def each(self, name: str, arguments: Callable[[int], tuple[tuple[Any, ...], ...]]) -> list[Any]:
        """Call an operation for each member, with arguments before and behind the members."""
        operation = getattr(self.ops, f"_peer_{name}")
        return [
            operation(*before, *self.members[rank], *behind)
            for rank, (before, behind) in ((rank, arguments(rank)) for rank in range(R))
        ]

    def maps(self, ids: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        shapes = [(self.num_experts, R, rank, self.capacity) for rank in range(R)]
        if self.num_experts <= 512:
            sorting = self.each("send_counts", lambda rank: ((ids[rank],), shapes[rank]))
        else:
            sorted_, counts = zip(*(sort_by_expert(x, self.num_experts) for x in ids), strict=True)
            self.each("send_sums", lambda rank: ((counts[rank],), shapes[rank]))
            sorting = list(sorted_)
        plans = self.each("plan", lambda rank: ((), (*shapes[rank], T * K)))
        owners = torch.arange(R)[:, None]
        return [
            self.ops._peer_map_copies(each, order, plan[0], owners, self.capacity)
            for each, order, plan in zip(ids, sorting, plans, strict=True)
        ], plans


@pytest.mark.parametrize("num_experts", [R * L, 514])  # the second is too many for the sort
def test_rows_go_to_their_experts_and_back(emulated: Any, num_experts: int) -> None:
    random = torch.Generator().manual_seed(num_experts)
    local = num_experts // R
    ids = [torch.randint(-1, num_experts, (T, K), generator=random) for _ in range(R)]
    tokens = [torch.randn(T, H, generator=random) for _ in range(R)]
    probs = [torch.rand(T, K, generator=random) for _ in range(R)]
    members = Members(emulated, num_experts)
    maps, plans = members.maps([each.t().contiguous().t() for each in ids])
    for row_map, each in zip(maps, ids, strict=True):
        assert (row_map.shape, row_map.dtype) == (each.shape, each.dtype)

    capacity, arrived = members.capacity, [plan[3][0] for plan in plans]
    members.each(
        "start_push",
        lambda rank: ((tokens[rank], probs[rank], maps[rank]), (0, K, capacity)),
    )
    rows = [torch.zeros(capacity, H) for _ in range(R)]
    numbers = [torch.zeros(capacity) for _ in range(R)]
    members.each("finish_push", lambda rank: ((rows[rank], numbers[rank], arrived[rank]), (0,)))
    for rank in range(R):
        copies = [
            (tokens[sender][t], probs[sender][t, choice])
            for expert in range(rank * local, (rank + 1) * local)
            for sender in range(R)
            for t, choice in (ids[sender] == expert).nonzero().tolist()
        ]
        assert int(arrived[rank]) == len(copies) == int(plans[rank][2].sum())
        assert torch.equal(rows[rank][: len(copies)], torch.stack([x for x, _ in copies]))
        assert torch.equal(numbers[rank][: len(copies)], torch.stack([p for _, p in copies]))

    members.each("reserve_pull", lambda _: ((), (1,)))
    doubled = [2 * each for each in rows]
    members.each(
        "start_pull",
        lambda rank: ((doubled[rank], numbers[rank], arrived[rank]), (1, False)),
    )
    sums, back = [torch.zeros(T, H) for _ in range(R)], [torch.zeros(T, K) for _ in range(R)]
    members.each(
        "finish_pull",
        lambda rank: ((sums[rank], back[rank], maps[rank]), (1, K, capacity)),
    )
    for rank in range(R):
        is_there = ids[rank] >= 0
        expected = 2 * tokens[rank] * is_there.sum(1, keepdim=True)
        torch.testing.assert_close(sums[rank], expected)
        assert torch.equal(back[rank], probs[rank] * is_there)


def test_rows_that_do_not_fit_are_refused(emulated: Any) -> None:
    members = Members(emulated, R * L)
    ids = [torch.zeros(T, K, dtype=torch.int64) for _ in range(R)]
    maps, _ = members.maps(ids)
    tokens = torch.zeros(T, H)

    def push(rows: Tensor, probs: Tensor | None, row_map: Tensor) -> None:
        capacity = members.capacity
        emulated._peer_start_push(rows, probs, row_map, *members.members[0], 0, K, capacity)

    for arguments, message in (
        ((tokens.double(), None, maps[0]), "rows must be float32, .* moe.static_transport"),
        ((tokens[:, ::2], None, maps[0]), r"rows must be \(M, H\), contiguous, got \(5, 4\)"),
        ((tokens, torch.ones(T), maps[0]), "probs must have 2 float32 numbers per row"),
        ((tokens, None, maps[0][1:]), r"row_map must be \(5, 2 r\) int64, contiguous, got \(4, 2"),
    ):
        with pytest.raises(ValueError, match=message):
            push(*arguments)
    with pytest.raises(ValueError, match=r"experts must be \(T, k\) int64, got \(5, 2\)"):
        members.each("send_counts", lambda rank: ((torch.zeros(T, K),), (R * L, R, rank, 1)))
    sorting, shift = torch.zeros(1, dtype=torch.int32), torch.zeros(R * L, dtype=torch.int64)
    with pytest.raises(ValueError, match="sorting must come from peer_send_counts"):
        emulated._peer_map_copies(ids[0], sorting, shift, torch.arange(R)[:, None], 1)
    with pytest.raises(ValueError, match=r"state must have .* bytes of int64"):
        emulated._peer_reserve_pull(shift, shift[:1], *members.members[0][2:], 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clones_get_weights_and_give_gradients(emulated: Any, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    size = dtype.itemsize
    sizes = 24 * size, 16 * size, 24 * 4, 16 * 4
    names = ("fc1_bytes", "fc2_bytes", "fc1_grad_bytes", "fc2_grad_bytes")
    layout = CloneLayout(num_slots=1, **dict(zip(names, sizes, strict=True)))
    addresses, memory = memories(layout.bytes(R))
    table = torch.tensor([[2], [1]])  # each rank clones an expert of the other one
    failures = [torch.zeros(1, dtype=torch.int64) for _ in range(R)]

    def each(name: str, tensors: Any = (None, None), *, plan: Tensor | None = table) -> None:
        for rank in range(R):
            getattr(emulated, f"_clones_{name}")(
                *(addresses, failures[rank], plan, tensors[rank], 1),
                *(1, R * L, rank, *sizes, 20.0),
            )

    weights = [torch.randn(L, 16, generator=random).to(dtype) for _ in range(R)]
    each("open", plan=None)
    each("push", weights)
    each("wait")
    begin = layout.weights_offset(R, 1)
    slots = [each[begin : begin + sizes[1]].view(dtype) for each in memory]
    assert torch.equal(slots[0], weights[1][0])
    assert torch.equal(slots[1], weights[0][1])
    each("reserve_grads", plan=None)
    begin = layout.grads_offset(R, 1)
    grads = [torch.randn(16, generator=random) for _ in range(R)]
    for own, grad in zip(memory, grads, strict=True):
        own[begin : begin + sizes[3]].view(torch.float32).copy_(grad)
    each("offer_grads")
    totals = [torch.ones(L, 16) for _ in range(R)]
    each("collect", totals)
    expected = torch.ones(R * L, 16)
    expected[2] += grads[0]
    expected[1] += grads[1]
    assert torch.equal(torch.cat(totals), expected)
    assert not any(failures)
    with pytest.raises(ValueError, match="slot_expert must be given"):
        each("wait", plan=None)
    with pytest.raises(
        ValueError, match=f"tensor must be contiguous, of {sizes[1]} bytes for each"
    ):
        each("push", [x[:1] for x in weights])
    with pytest.raises(ValueError, match=r"slot_expert must be \(2, 1\) int64, got \(1, 1\)"):
        each("offer_grads", plan=table[:1])
