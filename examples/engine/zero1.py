"""ZeRO-1 in a training loop of your own, with the engine alone.

torchrun --nproc-per-node 4 examples/engine/zero1.py    # or any number of ranks, or plain python

Gradients live in contiguous buffers and are reduced bucket by bucket during the backward pass; each
rank updates its shard of the float32 weights and moments. The losses do not depend on the number of
ranks.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.buffers import BufferOptions, make_buffers
from megacore.optim import DistributedOptimizer, OptimizerOptions, RateOptions, learning_rate
from megacore.parallel import ParamInfo, ProcessGroups, Topology

WIDTH, GLOBAL_BATCH = 64, 16


def sample(number: int) -> Tensor:
    """Return one input, (width,)."""
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


def main() -> None:
    """Train for some steps and print losses, gradient norms and the bytes of a rank's state."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        groups = ProcessGroups.create(Topology(world_size=dist.get_world_size()))
    else:
        groups = ProcessGroups.single()

    torch.manual_seed(0)  # all ranks start with the same weights
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    params = [
        (
            ParamInfo(name=name, full_shape=tuple(p.shape), tp_dim=None, weight_decay=p.dim() > 1),
            p,
        )
        for name, p in model.named_parameters()
    ]
    buffers = make_buffers(params, groups=groups, options=BufferOptions(bucket_numel=8192))
    optimizer = DistributedOptimizer(
        buffers,
        groups=groups,
        options=OptimizerOptions(clip_grad=1.0, overlap="all"),
        modules=[model],
    )
    if groups.rank == 0:
        print(optimizer, flush=True)

    rate = RateOptions(lr=3e-3, warmup=2)
    per_rank = GLOBAL_BATCH // groups.dp.size
    for step in range(args.steps):
        first = step * GLOBAL_BATCH + groups.dp.position * per_rank
        x = torch.stack([sample(first + number) for number in range(per_rank)])
        optimizer.zero_grads()
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        optimizer.before_backward(is_last=True)  # this backward completes the gradients
        loss.backward()
        result = optimizer.step(
            lr=learning_rate(step, options=rate, total=args.steps),
            extra=loss.detach().reshape(1),  # summed over ranks in the all-reduce of the norm
        )
        if groups.rank == 0:
            mean = float(result.extra[0]) / groups.dp.size
            print(f"step {step} loss {mean:.6f} gradient norm {result.grad_norm:.4f}", flush=True)
    optimizer.finish_param_gather()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
