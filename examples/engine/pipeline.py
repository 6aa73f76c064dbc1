"""A plain module in a proved pipeline schedule, with the engine alone.

torchrun --nproc-per-node 4 examples/engine/pipeline.py                  # zb_v: two stages per rank
torchrun --nproc-per-node 4 examples/engine/pipeline.py --schedule 1f1b  # one stage per rank

The losses are those of the whole model on one process: python examples/engine/pipeline.py
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.parallel import ProcessGroups, Topology
from megacore.pipeline import ActivationSpec, PipelineExecutor, build_schedule, receives_for

NUM_BLOCKS, WIDTH, MICROBATCH_SIZE, NUM_MICROBATCHES = 8, 16, 4, 8


def make_stage(stage: int, num_stages: int) -> nn.Sequential:
    """Make the blocks of a stage; they have the same weights in every layout."""
    per_stage = NUM_BLOCKS // num_stages
    blocks = nn.Sequential()
    for block in range(stage * per_stage, (stage + 1) * per_stage):
        torch.manual_seed(block)
        blocks.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return blocks


def sample(number: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a microbatch, each (microbatch size, width)."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(MICROBATCH_SIZE, WIDTH, generator=generator)
    return inputs, inputs.roll(1, dims=1)


def main() -> None:
    """Train for some steps and print the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", default="zb_v", help="a name from megacore.pipeline")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        world_size = dist.get_world_size()
        groups = ProcessGroups.create(Topology(world_size=world_size, pp=world_size))
    else:
        groups = ProcessGroups.single()
    rank, num_ranks = groups.pp.position, groups.pp.size

    # The schedule is a value: which rank runs which pass of which microbatch. It is proved free of
    # deadlock when the rank's program, with its messages, is made.
    schedule = build_schedule(args.schedule, num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)
    if rank == 0:
        timeline = schedule.simulate()
        print(f"{schedule!r}: bubble {timeline.bubble_fraction:.1%} of the time", flush=True)
    activation = ActivationSpec(
        shape=(MICROBATCH_SIZE, WIDTH), dtype=torch.float32, device=torch.device("cpu")
    )
    program = schedule.program(rank, receives=receives_for(groups.pp, activation))
    stages = [make_stage(stage, schedule.num_stages) for stage in program.stages]
    executor = PipelineExecutor(
        program, stages, group=groups.pp, activation=activation, schedule=schedule
    )
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.5)

    last = schedule.num_stages - 1
    last_stage = stages[program.stages.index(last)] if last in program.stages else None

    def forward_step(
        stage: nn.Module, hidden: Tensor | None, microbatch: int, *, step: int
    ) -> Tensor:
        inputs, targets = sample(step * NUM_MICROBATCHES + microbatch)
        output: Tensor = stage(inputs if hidden is None else hidden)
        if stage is not last_stage:
            return output
        return nn.functional.mse_loss(output, targets) / NUM_MICROBATCHES

    for step in range(args.steps):
        optimizer.zero_grad()
        losses = executor.run(partial(forward_step, step=step))
        optimizer.step()
        if losses:
            print(f"step {step} loss {float(torch.stack(losses).sum()):.6f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
