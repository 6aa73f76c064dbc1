"""Router losses and biases are those of one process in every layout."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from megacore.moe.balance import RouterGroups
from megacore.moe.options import RouterOptions
from megacore.moe.router import TokenNames, TopKRouter, update_expert_biases
from megacore.parallel import Group, ProcessGroups, Topology
from megacore.parallel.collectives import all_reduce_
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

HIDDEN, EXPERTS, LENGTH, SAMPLES = 12, 6, 8, 4
Kind = Literal["sequence", "batch"]


def make_router(kind: Kind, groups: RouterGroups) -> TopKRouter:
    config = RouterOptions(
        num_experts=EXPERTS,
        top_k=2,
        aux_loss_coef=0.5,
        aux_loss_type=kind,
        z_loss_coef=0.1,
        jitter=0.1,
        bias_rate=0.25,
    )
    weight = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1))
    return TopKRouter(config, nn.Parameter(weight), groups=groups, seed=3, layer=1)


def train(
    kind: Kind,
    groups: RouterGroups,
    *,
    positions: Tensor,
    samples: Tensor,
    microbatch_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient, mean losses and bias after this rank's share of a step."""
    hidden = torch.randn(LENGTH, SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(2))
    router = make_router(kind, groups)
    losses = []
    cuts = samples.split(microbatch_size)
    for cut in cuts:
        routed = router(
            hidden[positions][:, cut],
            names=TokenNames(step=7, sample_ids_B=cut, positions_S=positions),
            loss_factor=1 / len(cuts),
        )
        # The training loss of a rank is a mean over its tokens; split sequences add up over tp.
        own = routed.probs.square().mean() / groups.sequence_parallel.size
        (own / len(cuts)).backward()
        assert routed.aux_loss is not None
        assert routed.z_loss is not None
        losses.append(torch.stack([routed.aux_loss, routed.z_loss]))
    update_expert_biases([router])
    assert router.weight.grad is not None
    assert router.expert_bias is not None
    return router.weight.grad, torch.stack(losses).mean(0), router.expert_bias, router.weight


def on_rank(
    rank: int, sizes: dict[str, int], sequence_parallel: bool, kind: Kind, microbatch_size: int
) -> Any:
    del rank
    topology = Topology(world_size=4, **sizes)
    groups = ProcessGroups.create(topology)
    tp = groups.tp if sequence_parallel else Group.solo()
    router_groups = RouterGroups(sequence_parallel=tp, cp=groups.cp, dp_cp=groups.dp_cp)
    positions = torch.arange(LENGTH).chunk(groups.cp.size)[groups.cp.position]
    positions = positions.chunk(tp.size)[tp.position]
    samples = torch.arange(SAMPLES).chunk(groups.dp.size)[groups.dp.position]
    grad, losses, bias, _ = train(
        kind,
        router_groups,
        positions=positions,
        samples=samples,
        microbatch_size=microbatch_size,
    )
    # As the gradient buffers do: a sum over a split sequence, a mean over dp and cp.
    all_reduce_(grad, tp)
    all_reduce_(grad, groups.dp_cp)
    all_reduce_(losses, groups.world)
    return grad / groups.dp_cp.size, losses / 4, bias


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel", "microbatch_size"),
    [
        ({"tp": 2, "cp": 2}, True, 2),
        ({"tp": 2}, False, 1),
        ({"cp": 2}, False, 2),
        ({}, False, 1),
        ({"tp": 4}, True, 4),
    ],
)
def test_sequence_losses_and_biases_are_those_of_one_process(
    sizes: dict[str, int], sequence_parallel: bool, microbatch_size: int
) -> None:
    grad, losses, bias, _ = train(
        "sequence",
        RouterGroups(),
        positions=torch.arange(LENGTH),
        samples=torch.arange(SAMPLES),
        microbatch_size=SAMPLES,
    )
    results = run_ranks(4, on_rank, sizes, sequence_parallel, "sequence", microbatch_size)
    for their_grad, their_losses, their_bias in results:
        torch.testing.assert_close(their_grad, grad, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(their_losses, losses, rtol=1e-5, atol=1e-7)
        assert torch.equal(their_bias, bias)


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel", "microbatch_size"),
    [({"tp": 2}, True, 1), ({"cp": 2}, False, 1), ({}, False, 1)],
)
def test_batch_losses_agree_where_the_number_of_microbatches_does(
    sizes: dict[str, int], sequence_parallel: bool, microbatch_size: int
) -> None:
    results = run_ranks(4, on_rank, sizes, sequence_parallel, "batch", microbatch_size)
    dp = 4 // max(sizes.get("tp", 1), sizes.get("cp", 1))
    # The microbatch of one process holds the samples that the dp ranks work on at a time.
    order = torch.arange(SAMPLES).view(dp, -1).t().flatten()
    grad, losses, bias, _ = train(
        "batch",
        RouterGroups(),
        positions=torch.arange(LENGTH),
        samples=order,
        microbatch_size=dp * microbatch_size,
    )
    for their_grad, their_losses, their_bias in results:
        torch.testing.assert_close(their_grad, grad, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(their_losses, losses, rtol=1e-5, atol=1e-7)
        assert torch.equal(their_bias, bias)
