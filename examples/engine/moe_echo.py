"""A mixture-of-experts layer whose hot experts are cloned (ECHO), with the engine alone.

torchrun --nproc-per-node 4 examples/engine/moe_echo.py                  # 2 spare slots per rank
torchrun --nproc-per-node 4 examples/engine/moe_echo.py --slots 0        # without clones

All tokens like the experts of rank 0. With clones the work is spread over the ranks, and the losses
stay the same.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.buffers import make_buffers
from megacore.moe import (
    EchoOptions,
    ExpertPlacement,
    GroupedExperts,
    MoELayer,
    RouterGroups,
    RouterOptions,
    TopKRouter,
)
from megacore.moe.dispatchers import StaticBudget, make_dispatcher
from megacore.moe.echo.layer import Echo
from megacore.moe.echo.slots import SlotBuffers
from megacore.ops.echo_counts import EchoCounts
from megacore.optim import DistributedOptimizer, OptimizerOptions
from megacore.parallel import ParamInfo, ProcessGroups, Topology

NUM_EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 8, 2, 32, 64, 256


def make_layer(
    groups: ProcessGroups, num_spare_slots: int
) -> tuple[MoELayer, list[tuple[ParamInfo, nn.Parameter]]]:
    """Make the layer and the descriptions of its parameters."""
    generator = torch.Generator().manual_seed(0)
    placement = ExpertPlacement.of(groups, NUM_EXPERTS)
    params: list[tuple[ParamInfo, nn.Parameter]] = []

    def param(name: str, *shape: int, expert: bool = False) -> nn.Parameter:
        whole = torch.randn(shape, generator=generator) * HIDDEN**-0.5
        local = whole.chunk(groups.ep.size)[groups.ep.position].clone() if expert else whole
        ep_dim = 0 if expert else None
        info = ParamInfo(name=name, full_shape=shape, tp_dim=None, ep_dim=ep_dim, expert=expert)
        params.append((info, nn.Parameter(local)))
        return params[-1][1]

    router = TopKRouter(
        RouterOptions(num_experts=NUM_EXPERTS, top_k=TOP_K),
        param("router", NUM_EXPERTS, HIDDEN),
        groups=RouterGroups(dp_cp=groups.dp_cp, holders=groups.holders),
    )
    with torch.no_grad():
        router.weight[: NUM_EXPERTS // 4] += 0.5  # the hot experts
    experts = GroupedExperts(
        param("fc1", NUM_EXPERTS, 2, WIDTH, HIDDEN, expert=True),
        param("fc2", NUM_EXPERTS, HIDDEN, WIDTH, expert=True),
        activation="swiglu",
    )
    echo = None
    if num_spare_slots > 0 and groups.ep.size > 1:
        options = EchoOptions(num_spare_slots=num_spare_slots)
        slots = SlotBuffers(num_spare_slots)  # shared by all layers of a model
        echo = Echo(placement, options, ep=groups.ep, slots=slots, tries_memory=True)
        placement = echo.places
    dispatcher = make_dispatcher("alltoall", placement, budget=StaticBudget(2.0), peers=None)
    return MoELayer(router=router, dispatcher=dispatcher, experts=experts, echo=echo), params


def main() -> None:
    """Train the layer for some steps; print losses and the load of the busiest rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=2, help="spare slots for clones on each rank")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        size = dist.get_world_size()
        groups = ProcessGroups.create(Topology(world_size=size, ep=size))
    else:
        groups = ProcessGroups.single()
    layer, params = make_layer(groups, args.slots)
    buffers = make_buffers(params, groups=groups)
    optimizer = DistributedOptimizer(buffers, groups=groups, options=OptimizerOptions())
    for step in range(args.steps):
        numbers = torch.Generator().manual_seed(step)
        x_all: Tensor = torch.randn(4 * TOKENS, 1, HIDDEN, generator=numbers) + 0.5
        x_SBH = x_all.chunk(groups.dp.size)[groups.dp.position]
        layer.reset_counts()
        optimizer.zero_grads()
        loss = (layer(x_SBH) - x_SBH.flip(2)).square().mean()
        optimizer.before_backward(is_last=True)
        loss.backward()
        result = optimizer.step(lr=1e-2, extra=loss.detach().reshape(1))
        if groups.rank == 0:
            counts = EchoCounts.of_list(layer.echo.sums.tolist()) if layer.echo else None
            load = (
                f"max load over mean {counts.imbalance_before:.2f} -> {counts.imbalance_after:.2f}"
                if counts
                else "no clones"
            )
            print(f"step {step} loss {float(result.extra[0]) / groups.dp.size:.6f} {load}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
