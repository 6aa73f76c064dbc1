"""Attention of two cp ranks against one process, for all exchanges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.models.attention_parts import ScoreRule
from megacore.models.context_parallel import Masks, causal_attention
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.batch import Documents
from megacore.parallel.process_groups import Group
from megacore.parallel.sequence import context_positions
from tests.support.distributed import run_ranks

SEQUENCE, WORLD = 24, 2
DOCUMENTS = Documents.of([[0, 5, 6, 17], [0, 12]], SEQUENCE)
CASES: dict[str, dict[str, Any]] = {
    "plain": {"rule": ScoreRule()},
    "window": {"rule": ScoreRule(window=4)},
    "soft cap": {"rule": ScoreRule(softcap=1.5)},
    "documents": {"rule": ScoreRule(), "documents": DOCUMENTS},
    "documents, window": {"rule": ScoreRule(window=4), "documents": DOCUMENTS},
}


def results(group: Group, own: Tensor, case: dict[str, Any], **options: Any) -> list[Tensor]:
    """Attention of a rank's tokens, then the gradients of q, k, v and the sinks."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [random(SEQUENCE, 2, heads, 6)[own].requires_grad_() for heads in (4, 2, 2)]
    sinks, grad = random(4).requires_grad_(), random(SEQUENCE, 2, 4, 6)[own]
    options |= {"group": group, "grouped": True, "masks": Masks(), "sinks": sinks}
    mixed = causal_attention(*inputs, **options, **case)
    return [mixed.detach(), *torch.autograd.grad(mixed, [*inputs, sinks], grad)]


def on_rank(rank: int) -> None:
    group = ProcessGroups.create(Topology(world_size=WORLD, cp=WORLD)).cp
    own = context_positions(SEQUENCE, cp_size=WORLD, position=rank)
    for name, case in CASES.items():
        whole = results(Group.solo(), torch.arange(SEQUENCE), case)
        for comm in ("allgather", "a2a", "ring"):
            *found, sinks = results(group, own, case, comm=comm)
            torch.distributed.all_reduce(sinks)
            torch.testing.assert_close(
                [*found, sinks],
                [*(x[own] for x in whole[:-1]), whole[-1]],
                rtol=1e-9,
                atol=1e-12,
                msg=lambda text, case=f"{name}, {comm}": f"{case}: {text}",
            )
    q, k, v = (torch.zeros(2, 1, heads, 4) for heads in (3, 3, 3))
    with pytest.raises(ValueError, match="heads must be a multiple of the 2 members"):
        causal_attention(
            q, k, v, group=group, grouped=False, masks=Masks(), rule=ScoreRule(), comm="a2a"
        )


@pytest.mark.dist
def test_two_ranks_compute_the_attention_of_one_process() -> None:
    run_ranks(WORLD, on_rank)
