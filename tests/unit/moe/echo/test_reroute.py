"""Rerouting by index: exact numbers, even spread, gradients through the same map."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megacore.moe import OffloadPlan, plan_offload, reroute_tokens
from megacore.moe.echo.reroute import SourceRow, num_places_of, reroute, reroute_ids_reference


def random_choices(seed: int, ranks: int, num_experts: int, top_k: int) -> list[Tensor]:
    """Skewed choices of each rank, with some copies dropped."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.rand(num_experts, generator=generator).pow(4)
    found = []
    for _ in range(ranks):
        num_tokens = int(torch.randint(0, 40, (), generator=generator))
        scores = torch.rand(num_tokens, num_experts, generator=generator) * 0.3 + popularity
        ids = scores.topk(top_k, dim=-1).indices
        found.append(ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.1, -1))
    return found


def counts_of(choices: list[Tensor], num_experts: int) -> np.ndarray:
    return np.stack([np.bincount(c[c >= 0].numpy(), minlength=num_experts) for c in choices])


def row_of(
    plan: OffloadPlan, rank: int, total: np.ndarray, first: np.ndarray | None = None
) -> SourceRow:
    return SourceRow(
        total=torch.tensor(total),
        first=torch.tensor(np.zeros_like(total) if first is None else first),
        slot_expert=torch.tensor(plan.slot_expert),
        tokens=torch.tensor(plan.rerouted[rank]),
    )


def places_of(ids: Tensor, row: SourceRow) -> Tensor:
    return reroute(ids, torch.ones(ids.shape), row)[0]


def place_counts(plan: OffloadPlan, counts: np.ndarray, rank: int) -> np.ndarray:
    """How many copies of a source rank each place must get, entry by entry."""
    local = plan.num_experts // plan.num_ranks
    expected = np.zeros((plan.num_ranks, local + plan.num_spare_slots), np.int64)
    for expert in range(plan.num_experts):
        expected[expert // local, expert % local] = counts[rank, expert]
    for destination in range(plan.num_ranks):
        for slot in range(plan.num_spare_slots):
            expert, moved = (
                plan.slot_expert[destination, slot],
                plan.rerouted[rank, destination, slot],
            )
            if expert >= 0:
                expected[destination, local + slot] = moved
                expected[expert // local, expert % local] -= moved
    return expected.reshape(-1)


@given(
    seed=st.integers(0, 10_000),
    ranks=st.sampled_from([1, 2, 4]),
    slots=st.integers(0, 3),
    top_k=st.integers(1, 3),
    planner=st.sampled_from(["balanced", "echo"]),
)
@settings(max_examples=60, deadline=None)
def test_every_place_gets_exactly_what_the_plan_says(
    seed: int, ranks: int, slots: int, top_k: int, planner: str
) -> None:
    num_experts = 8
    choices = random_choices(seed, ranks, num_experts, top_k)
    counts = counts_of(choices, num_experts)
    plan = plan_offload(counts, num_spare_slots=slots, planner=planner, tolerance=0.0)
    local, places = num_experts // ranks, num_experts // ranks + slots
    for rank, ids in enumerate(choices):
        row = row_of(plan, rank, counts[rank])
        found = places_of(ids, row)
        assert torch.equal(found, reroute_ids_reference(ids, *vars(row).values()))
        assert torch.equal(found < 0, ids < 0)
        got = np.bincount(found[found >= 0].numpy(), minlength=num_places_of(plan))
        np.testing.assert_array_equal(got, place_counts(plan, counts, rank))
        for place, expert in zip(found.flatten().tolist(), ids.flatten().tolist(), strict=True):
            if place >= 0:
                at, group = divmod(place, places)
                held = at * local + group if group < local else plan.slot_expert[at, group - local]
                assert held == expert, "a copy must meet the expert it was routed to"


def test_members_that_make_up_a_source_rank_share_its_row() -> None:
    ids = torch.zeros(10, 1, dtype=torch.int64)
    plan = plan_offload([[10, 0, 0], [0, 0, 0], [0, 0, 0]], num_spare_slots=1, tolerance=0.0)
    total = np.array([10, 0, 0])
    whole = places_of(ids, row_of(plan, 0, total))
    first = places_of(ids[:3], row_of(plan, 0, total))
    rest = places_of(ids[3:], row_of(plan, 0, total, np.array([3, 0, 0])))
    assert torch.equal(torch.cat([first, rest]), whole)


def dense_case() -> tuple[Tensor, Tensor, OffloadPlan]:
    (ids,) = random_choices(3, 1, 8, 2)
    chosen = torch.zeros(ids.shape[0], 9, dtype=torch.bool)
    chosen = chosen.scatter(1, torch.where(ids < 0, 8, ids), True)[:, :8]
    counts = np.stack([chosen.sum(0).numpy(), np.zeros(8, np.int64)])
    plan = plan_offload(counts, num_spare_slots=2, tolerance=0.0)
    assert plan.num_clones > 0
    probs = torch.rand(ids.shape[0], 8, generator=torch.Generator().manual_seed(1)).double()
    return chosen, probs, plan


def test_a_dense_map_moves_weights_and_brings_gradients_back() -> None:
    chosen, probs, plan = dense_case()
    probs.requires_grad_()
    moved_map, moved = reroute_tokens(chosen, probs, plan, 0)
    assert moved_map.shape == (chosen.shape[0], num_places_of(plan))
    assert torch.equal(moved_map.sum(1), chosen.sum(1))
    assert (moved[~moved_map] == 0).all()
    torch.testing.assert_close(moved.sum(1), (probs * chosen).sum(1))
    # The map is linear, and the gradient is its transpose: <f(p), g> = <p, f'(g)>.
    direction = torch.randn(moved.shape, generator=torch.Generator().manual_seed(2)).double()
    (grad,) = torch.autograd.grad(moved, probs, direction)
    assert (moved * direction).sum().item() == pytest.approx((probs * grad).sum().item(), rel=1e-12)
    assert (grad[~chosen] == 0).all()
    assert torch.autograd.gradcheck(lambda p: reroute_tokens(chosen, p, plan, 0)[1], probs)


def test_thousands_of_routings_go_where_the_oracle_says() -> None:
    """The literal rule, one copy after the other, against the native loop."""
    random = np.random.default_rng(5)
    for seed in range(3000):
        ranks, slots = int(random.integers(1, 5)), int(random.integers(0, 4))
        num_experts, local = ranks * 2, 2
        (ids, *_) = random_choices(seed, 1, num_experts, int(random.integers(1, 3)))
        total = counts_of([ids], num_experts)[0] + random.integers(0, 4, num_experts)
        first = random.integers(0, total - counts_of([ids], num_experts)[0] + 1)
        slot_expert = random.integers(-1, num_experts, (ranks, slots))
        left, tokens = total.copy(), np.zeros_like(slot_expert)
        for at in np.ndindex(slot_expert.shape):
            if slot_expert[at] >= 0:
                tokens[at] = random.integers(0, left[slot_expert[at]] + 1)
                left[slot_expert[at]] -= tokens[at]
        row = SourceRow(
            total=torch.tensor(total),
            first=torch.tensor(first),
            slot_expert=torch.tensor(slot_expert),
            tokens=torch.tensor(tokens),
        )
        seen, expected = first.copy(), []
        for expert in ids.flatten().tolist():
            if expert < 0:
                expected.append(-1)
                continue
            i, m = int(seen[expert]), int(total[expert])
            seen[expert] += 1
            place = expert // local * (local + slots) + expert % local
            for rank, slot in np.ndindex(slot_expert.shape):
                n = int(tokens[rank, slot]) if slot_expert[rank, slot] == expert else 0
                if m > 0 and (i + 1) * n // m > i * n // m:
                    place = rank * (local + slots) + local + slot
                    break
                i, m = i - (i * n // m if m > 0 else 0), m - n
            expected.append(place)
        assert places_of(ids, row).flatten().tolist() == expected, seed


def test_the_operation_passes_torchs_own_checks() -> None:
    ids = torch.tensor([[0, 1], [0, -1], [0, 1]])
    row = SourceRow(
        total=torch.tensor([3, 2]),
        first=torch.tensor([0, 0]),
        slot_expert=torch.tensor([[-1], [0]]),
        tokens=torch.tensor([[0], [2]]),
    )
    probs = torch.rand(3, 2, requires_grad=True)
    torch.library.opcheck(torch.ops.megacore.reroute, (ids, *vars(row).values()))
    _, weights = reroute(ids, probs, row)
    direction = torch.arange(6.0).view(3, 2)
    (grad,) = torch.autograd.grad(weights, probs, direction)
    assert torch.equal(grad, direction.masked_fill(ids < 0, 0.0))
    assert weights[1, 1] == 0


def test_ids_keep_their_weights() -> None:
    ids = torch.tensor([[0, 1], [0, 2], [0, 3]])
    probs = torch.rand(3, 2)
    plan = plan_offload([[3, 1, 1, 1], [0, 0, 0, 0]], num_spare_slots=1, tolerance=0.0)
    places, same = reroute_tokens(ids, probs, plan, 0)
    assert torch.equal(same, probs)
    assert places.shape == ids.shape


def test_what_does_not_fit_the_plan_is_refused() -> None:
    plan = plan_offload([[4, 0], [0, 0]], num_spare_slots=1, tolerance=0.0)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(
        ValueError, match="moves 2 copies of this source rank for expert 0, which has 1"
    ):
        reroute_tokens(ids, torch.ones(1, 1), plan, 0)
    with pytest.raises(ValueError, match="ep_rank is 2; the plan has the ranks 0 to 1"):
        reroute_tokens(ids, torch.ones(1, 1), plan, 2)
    with pytest.raises(ValueError, match=r"\(1, 1\) and probs \(1, 2\)"):
        reroute_tokens(ids, torch.ones(1, 2), plan, 0)
    with pytest.raises(ValueError, match="3 columns, but the plan is for 2 experts"):
        reroute_tokens(torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3), plan, 0)
    row = row_of(plan, 0, np.array([4, 0]))
    with pytest.raises(ValueError, match="more copies than the 4"):
        places_of(torch.zeros(5, 1, dtype=torch.int64), row)
    with pytest.raises(ValueError, match="for expert 7; there are 2"):
        places_of(torch.full((1, 1), 7), row)
