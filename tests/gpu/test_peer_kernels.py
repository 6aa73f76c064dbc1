"""Kernels that write into memory of peers: several members, all on one GPU, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import PeerLostError
from megacore.moe.dispatchers import ExpertPlacement
from megacore.moe.dispatchers.device_peers import DevicePeers
from megacore.moe.dispatchers.peer_memory import CopyMap, PeerPlan, PendingPull
from megacore.ops import has_cuda_kernels, peer_exchange, permute, sort_by_expert, unpermute
from megacore.ops.permutation import permute_probs
from megacore.parallel.process_groups import Group
from tests.support.gpu import capture, poisoned_memory, synchronising_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_cuda_kernels(), reason="built without CUDA kernels"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class OneGpu(DevicePeers):
    """A member whose peers are on the same device: memory is handed out by ``memory``.

    The sums of a pull are queued when it is finished: streams of one device may share a queue, in
    which the wait of one member would come before the rows of another.
    """

    def __init__(self, group: Group, memory: Memory, timeout_s: float) -> None:
        super().__init__(group, torch.device("cuda"), timeout_s=timeout_s)
        self._source = memory
        self._later: list[tuple[Any, ...]] = []

    def _allocate(self, num_bytes: int) -> tuple[Tensor, Tensor, object]:
        addresses, buffers = self._source.of(num_bytes)
        return addresses, buffers[self.group.position], buffers

    def _sum(self, *arguments: Any) -> None:
        self._later.append(arguments)

    def finish_pull(self, pull: PendingPull) -> None:
        super()._sum(*self._later.pop(0))
        super().finish_pull(pull)


class Memory:
    """The memory of all members by size; the first who asks makes it."""

    def __init__(self, num_members: int) -> None:
        self._num_members = num_members
        self._made: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def of(self, num_bytes: int) -> tuple[Tensor, list[Tensor]]:
        if num_bytes not in self._made:
            buffers = [
                torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
                for _ in range(self._num_members)
            ]
            addresses = [buffer.data_ptr() for buffer in buffers]
            self._made[num_bytes] = torch.tensor(addresses, device="cuda"), buffers
        return self._made[num_bytes]


class WithSums(OneGpu):
    """The only member of a group, which queues sums at once."""

    def __init__(self, member: OneGpu) -> None:
        super().__init__(member.group, member._source, member._timeout_s)

    _sum, finish_pull = DevicePeers._sum, DevicePeers.finish_pull


class Team:
    """All members of a group, which take every step together."""

    def __init__(
        self, num_members: int, num_experts: int, *, num_parts: int = 0, timeout_s: float = 20.0
    ) -> None:
        num_parts = num_parts or num_members
        ranks = tuple(range(num_members))
        groups = [Group("ep", ranks, p, object()) for p in ranks]  # type: ignore[arg-type]
        memory = Memory(num_members)
        self.peers = [OneGpu(group, memory, timeout_s) for group in groups]
        members = tuple(tuple(range(part, num_members, num_parts)) for part in range(num_parts))
        self._owners = torch.tensor(members, device="cuda")
        self.placements = [
            ExpertPlacement(
                group=group, members=members, ep_position=p % num_parts, num_experts=num_experts
            )
            for p, group in enumerate(groups)
        ]

    def plans(self, ids: list[Tensor], capacity: int) -> list[PeerPlan]:
        """Kernels of all members in the order in which they would meet: sends before plans."""
        sent = []
        for peers, placement, each in zip(self.peers, self.placements, ids, strict=True):
            memory = peers._reserve(placement.num_experts, capacity, 0)
            shape = [placement.num_experts, placement.ep_size, placement.ep_position, capacity]
            members = peers._members(memory)
            sent.append((members, shape, peer_exchange.send_counts(each, *members, *shape)))
        plans = []
        for each, (members, shape, sorting) in zip(ids, sent, strict=True):
            shift, kept, m_splits, totals = peer_exchange.plan(*members, *shape, each.numel())
            rows = peer_exchange.map_copies(each, sorting, shift, self._owners, capacity)
            plans.append(PeerPlan(rows=rows, kept=kept, m_splits=m_splits, totals=totals))
        return plans

    def maps(self, ids: list[Tensor], capacity: int) -> list[CopyMap]:
        """Where the copies of each member's tokens lie."""
        return [
            CopyMap(
                rows=plan.rows,
                num_choices=each.shape[1],
                capacity=capacity,
                num_arrived=plan.totals[0],
            )
            for each, plan in zip(ids, self.plans(ids, capacity), strict=True)
        ]

    def push(
        self, tokens: list[Tensor], probs: list[Tensor] | None, maps: list[CopyMap]
    ) -> list[tuple[Tensor, Tensor]]:
        tickets = [
            peers.start_push(x, None if probs is None else probs[p], maps[p])
            for p, (peers, x) in enumerate(zip(self.peers, tokens, strict=True))
        ]
        results = []
        for peers, ticket, x, copies in zip(self.peers, tickets, tokens, maps, strict=True):
            rows = x.new_empty(copies.capacity, x.shape[1])
            row_probs = x.new_empty(copies.capacity, dtype=torch.float32)
            peers.finish_push(ticket, rows, None if probs is None else row_probs, copies)
            results.append((rows, row_probs))
        return results

    def pull(
        self,
        rows: list[Tensor],
        probs: list[Tensor],
        maps: list[CopyMap],
        *,
        in_place: bool = False,
    ) -> list[tuple[Tensor, Tensor]]:
        pulls, results = [], []
        for peers, each, weights, copies in zip(self.peers, rows, probs, maps, strict=True):
            pull = peers.reserve_pull(copies, each)
            x = each.new_empty(copies.rows.shape[0], each.shape[1])
            x_probs = each.new_empty(copies.rows.shape[0], copies.num_choices, dtype=torch.float32)
            published = pull.rows.copy_(each) if in_place else each
            peers.start_pull(pull, published, weights, x, x_probs)
            pulls.append(pull)
            results.append((x, x_probs))
        for peers, pull in zip(self.peers, pulls, strict=True):
            peers.finish_pull(pull)
        return results


def random_ids(
    num_members: int, num_tokens: int, top_k: int, num_experts: int, seed: int
) -> list[Tensor]:
    """Different experts for each token; even to one hot expert, some copies not there."""
    random = torch.Generator().manual_seed(seed)
    heat = torch.randn(num_experts, generator=random) * (seed % 4)
    ids = []
    for _ in range(num_members):
        scores = torch.randn(num_tokens, num_experts, generator=random) + heat
        chosen = scores.topk(top_k).indices
        if seed % 3 == 1:
            chosen[torch.rand(chosen.shape, generator=random) < 0.2] = -1
        ids.append(chosen.cuda())
    return ids


def addresses(copies: CopyMap) -> Tensor:
    """Where each copy's row is, whether it travels or is copied there; -1 for none."""
    return torch.where(copies.rows < -1, -2 - copies.rows, copies.rows)


def by_concatenation(tokens: list[Tensor], maps: list[CopyMap], capacity: int) -> list[Tensor]:
    """What a push leaves on every member, by the operations for one rank."""
    joined = torch.cat([addresses(copies) for copies in maps])
    everything = permute(torch.cat(tokens), joined, len(maps) * capacity)
    return list(everything.split(capacity))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_members", "num_parts", "num_experts"), [(1, 1, 4), (2, 2, 8), (4, 2, 8), (8, 8, 64)]
)
def test_rows_go_where_one_rank_would_put_them_and_come_back(
    num_members: int, num_parts: int, num_experts: int, dtype: torch.dtype
) -> None:
    team = Team(num_members, num_experts, num_parts=num_parts)
    for seed, width in enumerate((8, 7, 1024, 64)):
        ids = random_ids(num_members, 33, 3, num_experts, seed)
        capacity = [4000, 60, 33 * 3 * num_members, 1][seed]
        with poisoned_memory():
            maps = team.maps(ids, capacity)
            tokens = [torch.randn(33, width, device="cuda").to(dtype) for _ in ids]
            probs = [torch.rand(33, 3, device="cuda") for _ in ids]
            pushed = team.push(tokens, probs, maps)
            results = [rows for rows, _ in pushed], [p for _, p in pushed], maps
            pulled, in_place = team.pull(*results), team.pull(*results, in_place=True)
        expected = by_concatenation(tokens, maps, capacity)
        repeats = num_members // num_parts
        joined = torch.cat([addresses(copies) for copies in maps])
        weights = torch.cat(probs).repeat_interleave(repeats, dim=1)
        row_probs = permute_probs(weights, joined, num_members * capacity).split(capacity)
        for p in range(num_members):
            arrived = int(maps[p].num_arrived)
            assert torch.equal(pushed[p][0][:arrived], expected[p][:arrived])
            assert torch.equal(pushed[p][1][:arrived], row_probs[p][:arrived])
            assert pushed[p][0][arrived:].isnan().all(), "rows of nobody are not written"
            sums = unpermute(torch.cat(expected), addresses(maps[p]))
            torch.testing.assert_close(pulled[p][0], sums, rtol=1e-6, atol=1e-6)
            kept = (maps[p].rows.view(33, 3, repeats) != -1).sum(-1)
            torch.testing.assert_close(pulled[p][1], probs[p] * kept)
            assert torch.equal(pulled[p][0], in_place[p][0])
            assert torch.equal(pulled[p][1], in_place[p][1])
    for peers in team.peers:
        peers.check()


def test_a_captured_exchange_follows_changing_ids_for_hundreds_of_replays() -> None:
    team = Team(4, 16)
    static_ids = random_ids(4, 32, 2, 16, 0)
    tokens = [torch.randn(32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    probs = [torch.rand(32, 2, device="cuda") for _ in range(4)]

    def run() -> tuple[Tensor, ...]:
        maps = team.maps(static_ids, 70)
        pushed = team.push(tokens, probs, maps)
        pulled = team.pull([rows for rows, _ in pushed], [p for _, p in pushed], maps)
        return (*(x for x, _ in pulled), *(copies.rows for copies in maps))

    run()
    with synchronising_is_an_error():
        run()
    graph, outputs = capture(run)
    for seed in range(300):
        for static, ids in zip(static_ids, random_ids(4, 32, 2, 16, seed), strict=True):
            static.copy_(ids)
        graph.replay()
        if seed % 30 == 0:
            for p in range(4):
                kept = (outputs[4 + p] != -1).sum(1, keepdim=True)
                expected = (tokens[p].float() * kept).bfloat16()
                assert torch.equal(outputs[p], expected), seed
    for peers in team.peers:
        peers.check()


def test_a_member_that_does_not_come_is_named_and_the_results_are_nan() -> None:
    team = Team(2, 4, timeout_s=0.2)
    ids = random_ids(2, 8, 2, 4, 0)
    maps = team.maps(ids, 64)
    x = torch.randn(8, 16, device="cuda")
    here = team.peers[0]
    ticket = here.start_push(x, None, maps[0])
    rows = x.new_empty(64, 16)
    here.finish_push(ticket, rows, None, maps[0])
    with pytest.raises(PeerLostError, match=r"rank 1 did not send its rows within 0\.2 s"):
        here.check()
    assert rows[: int(maps[0].num_arrived)].isnan().all()
    # What follows ends at once, and says the same.
    pull = here.reserve_pull(maps[0], rows)
    here.start_pull(pull, rows, None, x, None)
    here.finish_pull(pull)
    with pytest.raises(PeerLostError, match="rank 1 did not send its rows"):
        here.check()
    assert x.isnan().all()


def test_a_graph_uses_the_memory_of_rows_in_flight_again() -> None:
    team = Team(1, 4)
    copies = team.maps(random_ids(1, 512, 2, 4, 0), 1024)[0]
    x = torch.randn(512, 1024, device="cuda")
    peers = WithSums(team.peers[0])

    def exchanges(count: int) -> None:
        for _ in range(count):
            ticket = peers.start_push(x + 1.0, None, copies)
            rows = x.new_empty(1024, 1024)
            peers.finish_push(ticket, rows, None, copies)
            pull = peers.reserve_pull(copies, rows)
            peers.start_pull(pull, rows + 1.0, None, torch.empty_like(x), None)
            peers.finish_pull(pull)

    exchanges(1)
    pools = []
    for count in (1, 8):
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            exchanges(count)
        pools.append(torch.cuda.memory_reserved() - before)
        del graph
    assert pools[1] == pools[0]


@pytest.mark.parametrize(
    ("num_experts", "num_tokens", "top_k"), [(8, 3001, 6), (512, 700, 8), (640, 90, 4)]
)
def test_plans_of_many_tokens_and_of_more_experts_than_a_kernel_sorts(
    num_experts: int, num_tokens: int, top_k: int
) -> None:
    team = Team(2, num_experts)
    ids = random_ids(2, num_tokens, top_k, num_experts, 1)
    capacity = 3 * num_tokens * top_k // 2
    with poisoned_memory():
        plans = team.plans(ids, capacity)
    sent = [sort_by_expert(each, num_experts)[1] for each in ids]
    for p, (plan, each) in enumerate(zip(plans, ids, strict=True)):
        arrived, dropped, over = plan.totals.tolist()
        assert arrived == int(plan.m_splits.sum()) <= capacity
        assert arrived == sum(int(other.kept.view(2, -1)[p].sum()) for other in plans)
        assert dropped == each.numel() - int(plan.kept.sum())
        assert over == int(sent[p].sum()) - int(plan.kept.sum())
        assert int((plan.rows != -1).sum()) == int(plan.kept.sum())
    # Each row of each member has one copy, and rows are in the order of experts.
    rows = torch.cat([plan.rows.flatten() for plan in plans])
    rows = torch.where(rows < -1, -2 - rows, rows)
    experts = torch.cat([each.flatten() for each in ids])
    kept = rows >= 0
    order = rows[kept].argsort()
    assert rows[kept].unique().numel() == int(kept.sum())
    assert (experts[kept][order].diff() >= 0).all()


def test_a_pull_is_summed_beside_what_is_computed_meanwhile() -> None:
    team = Team(1, 4)
    copies = team.maps(random_ids(1, 512, 2, 4, 0), 1024)[0]
    peers = WithSums(team.peers[0])
    rows = torch.randn(1024, 256, device="cuda")
    expected = unpermute(rows, addresses(copies))

    def run() -> tuple[Tensor, Tensor]:
        sums = rows.new_empty(512, 256)
        pull = peers.reserve_pull(copies, rows)
        pull.rows.copy_(rows)
        peers.start_pull(pull, pull.rows, None, sums, None)
        other = rows @ rows.T
        peers.finish_pull(pull)
        return sums + 0.0, other

    for _ in range(3):
        sums, other = run()
        torch.testing.assert_close(sums, expected, rtol=1e-6, atol=1e-6)
    graph, (sums, captured) = capture(run)
    for _ in range(20):
        graph.replay()
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(captured, other)
    peers.check()


def test_another_capacity_is_an_error_and_nothing_is_sent() -> None:
    team = Team(2, 4)
    ids = random_ids(2, 8, 2, 4, 0)
    for p, capacity in enumerate((64, 32)):
        peers, placement = team.peers[p], team.placements[p]
        memory = peers._reserve(4, 64, 64)
        shape = [4, 2, placement.ep_position, capacity]
        peer_exchange.send_counts(ids[p], *peers._members(memory), *shape)
    members = team.peers[0]._members(team.peers[0]._reserve(4, 64, 64))
    shift, kept, m_splits, totals = peer_exchange.plan(*members, 4, 2, 0, 64, 16)
    assert (shift >= 64).all()
    assert torch.equal(kept, sort_by_expert(ids[0], 4)[1]), "no copy is blamed on a full buffer"
    assert not m_splits.any()
    assert totals.tolist() == [0, 16 - int(kept.sum()), 0]
    with pytest.raises(PeerLostError, match="rank 1 keeps another number of rows"):
        team.peers[0].check()


def test_torch_knows_the_operations() -> None:
    team = Team(1, 4)
    ids = random_ids(1, 8, 2, 4, 0)
    maps = team.maps(ids, 16)
    peers = team.peers[0]
    members = peers._members(peers._reserve(4, 16, 64))
    x = torch.randn(8, 16, device="cuda")
    checks, ops = ("test_schema", "test_faketensor"), torch.ops.megacore
    pushed = x, None, maps[0].rows, *members, 0, 2, 16
    torch.library.opcheck(ops._peer_start_push.default, pushed, test_utils=checks)
    pulled = x.new_empty(16, 16), None, maps[0].num_arrived, *members, 1, True
    torch.library.opcheck(ops._peer_start_pull.default, pulled, test_utils=checks)


@pytest.mark.real_gpu
def test_tensors_on_the_cpu_are_refused() -> None:
    addresses = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        peer_exchange.plan(addresses, addresses, 0, 4, 4, 4, 1.0, 4, 1, 0, 4, 8)
