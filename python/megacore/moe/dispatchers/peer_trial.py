"""Trial of peer memory: one push and one pull of a pattern over the real group."""

from __future__ import annotations

import torch
from torch import Tensor

from megacore import host_values
from megacore.errors import PeerLostError
from megacore.moe.dispatchers.base import ExpertPlacement
from megacore.moe.dispatchers.peer_memory import CopyMap, Peers
from megacore.parallel.collectives import all_gather
from megacore.parallel.process_groups import Group

# Each row is several loads of a warp.
_WIDTH = 256


def exchange_fault(peers: Peers, device: torch.device) -> str:
    """Exchange a pattern with all members; return what is wrong on any of them, or ``""``.

    Each member sends one row to each, gets it back doubled, and checks both ways. Collective.

    Sync:
        Waits for the device and for all members.
    """
    try:
        problem = _problem(peers, device)
    except (PeerLostError, RuntimeError) as error:
        problem = str(error).splitlines()[0]
    return agreed_fault(problem, "a fault of an exchange of rows", peers.group, device)


def agreed_fault(problem: str, elsewhere: str, group: Group, device: torch.device) -> str:
    """Return the problem of the first rank that has one, with its number, or ``""``. Collective.

    Args:
        problem: That of this rank; empty without one.
        elsewhere: Description of a problem of another rank.
        group: The ranks.
        device: Device for the exchange.
    """
    has_problem = int(bool(problem))
    mine = torch.tensor([has_problem], dtype=torch.int64, device=device)
    gathered = mine.new_empty(group.size)
    all_gather(gathered, mine, group)
    found = host_values.read(
        gathered, "reachable memory of peers", assumed=lambda: [has_problem] * group.size
    )
    bad = [rank for rank, is_bad in zip(group.ranks, found, strict=True) if is_bad]
    return f"{problem or elsewhere} on rank {bad[0]}" if bad else ""


def _problem(peers: Peers, device: torch.device) -> str:
    group, size = peers.group, peers.group.size
    placement = ExpertPlacement(
        group=group,
        members=tuple((position,) for position in range(size)),
        ep_position=group.position,
        num_experts=size,
    )
    sent, numbers = _pattern(group.position, size, device)
    ids = torch.arange(size, device=device)[:, None]
    plan = peers.plan_copies(ids, placement, size)
    copies = CopyMap(rows=plan.rows, num_choices=1, capacity=size, num_arrived=plan.totals[0])
    ticket = peers.start_push(sent, numbers, copies)
    rows, row_numbers = torch.full_like(sent, torch.nan), torch.full_like(numbers[:, 0], torch.nan)
    peers.finish_push(ticket, rows, row_numbers, copies)
    pull = peers.reserve_pull(copies, sent)
    back, numbers_back = torch.full_like(sent, torch.nan), torch.full_like(numbers, torch.nan)
    peers.start_pull(pull, 2 * rows, row_numbers, back, numbers_back)
    peers.finish_pull(pull)
    peers.check()
    everyone = [_pattern(position, size, device) for position in range(size)]
    expected = torch.stack([each[group.position] for each, _ in everyone])
    expected_numbers = torch.cat([each[group.position] for _, each in everyone])
    for what, pairs in (
        ("pushed", ((rows, expected), (row_numbers, expected_numbers))),
        ("pulled", ((back, 2 * sent), (numbers_back, numbers))),
    ):
        equal = torch.stack([(one == other).all() for one, other in pairs]).all()
        if not host_values.read(equal, "reachable memory of peers"):
            return f"wrong rows {what}"
    return ""


def _pattern(position: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows from one member to each, ``(G, H)`` float32, and a number for each."""
    first = torch.arange(position * size, (position + 1) * size, device=device)[:, None]
    columns = torch.arange(_WIDTH, device=device)
    return (first * _WIDTH + columns).float(), first.float() + 0.5
