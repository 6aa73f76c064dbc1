"""Attention of two cp ranks against one process, for all exchanges."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megacore.ops.split_backward import backward_input
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.batch import Documents
from megacore.parallel.process_groups import Group
from megacore.parallel.row_exchange import all_to_all_async
from megacore.parallel.sequence import context_positions
from megatrain.models.attention import ring
from megatrain.models.attention.blockwise import ScoreRule
from megatrain.models.attention.context_parallel import Masks, causal_attention
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


def exchanges_of_sinks(_rank: int) -> tuple[int, int]:
    """Exchanges of both parts of a split backward pass: of activations, and of the sinks."""
    group = ProcessGroups.create(Topology(world_size=WORLD, cp=WORLD)).cp
    x = torch.randn(4, 1, 2, 6, requires_grad=True)
    sinks = torch.nn.Parameter(torch.randn(2))
    options: dict[str, Any] = {"grouped": True, "masks": Masks(), "rule": ScoreRule()}

    def loss() -> Tensor:
        return causal_attention(
            x, x * 2, x * 3, group=group, sinks=sinks, comm="ring", **options
        ).sum()

    expected = torch.autograd.grad(loss(), [x, sinks])
    output = get_gradient_edge(loss())
    with mock.patch.object(ring, "all_to_all_async", wraps=all_to_all_async) as exchange:
        grad, weights = backward_input(output, None, x)
        of_activations = exchange.call_count
        weights.run()
    torch.testing.assert_close((grad, sinks.grad), expected, rtol=0, atol=0)
    return of_activations, exchange.call_count - of_activations


@pytest.mark.dist
def test_the_gradient_of_sinks_alone_needs_no_exchange() -> None:
    for of_activations, of_sinks in run_ranks(WORLD, exchanges_of_sinks):
        assert of_activations > 0
        assert of_sinks == 0


@pytest.mark.dist
def test_two_ranks_compute_the_attention_of_one_process() -> None:
    run_ranks(WORLD, on_rank)
