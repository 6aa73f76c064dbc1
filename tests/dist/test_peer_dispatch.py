"""Rows written into memory of peers: the bits of the all-to-all, whatever the routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacore.moe.dispatchers import (
    AllToAllDispatcher,
    Capacity,
    ExpertPlacement,
    HostPeers,
    PeerDispatcher,
    StaticBudget,
    static_receive_rows,
)
from megacore.parallel import ProcessGroups, Topology
from tests.dist.test_dispatchers import (
    CASES,
    LAYOUTS,
    forward_backward,
    make_choice,
    tokens_of,
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
    for field in ("tokens_per_expert", "arriving", "num_dropped", "num_over_budget"):
        if not torch.equal(getattr(a["plan"], field), getattr(b["plan"], field)):
            different.append(field)
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
