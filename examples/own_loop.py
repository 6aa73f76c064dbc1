"""A training loop of your own: stages in a pipeline, sharded AdamW, checkpoints for any layout.

torchrun --nproc-per-node 2 examples/own_loop.py              # a pipeline of two ranks
torchrun --nproc-per-node 4 examples/own_loop.py              # two such pipelines
python examples/own_loop.py --steps 40                        # goes on alone

Losses do not depend on the layout. docs/buffers.md explains the parts.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.buffers import make_buffers
from megacore.optim import DistributedOptimizer, OptimizerOptions
from megacore.parallel import ParamInfo, ProcessGroups, Topology
from megacore.pipeline import ActivationSpec, PipelineExecutor, build_schedule, receives_for
from megatrain.checkpoint import TrainState, load_checkpoint, save_checkpoint

NUM_BLOCKS, WIDTH = 4, 16
GLOBAL_MICROBATCHES, MICROBATCH_SIZE = 8, 4  # microbatches of one step over all pipelines


class Stage(nn.Module):
    """Consecutive blocks of the model, under names that are the same in every layout."""

    def __init__(self, blocks: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict()
        for block in blocks:
            torch.manual_seed(block)  # data-parallel ranks begin with equal weights
            self.blocks[str(block)] = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states behind the last block; shape (microbatch size, width)."""
        for block in self.blocks.values():
            hidden = hidden + torch.tanh(block(hidden))
        return hidden


def sample(index: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a microbatch; each (microbatch size, width)."""
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(MICROBATCH_SIZE, WIDTH, generator=generator)
    return inputs, inputs.roll(1, dims=1)


class Loop:
    """One rank's parts, and a step over them."""

    def __init__(self, groups: ProcessGroups) -> None:
        topology = groups.topology
        self.groups = groups
        self.num_microbatches = GLOBAL_MICROBATCHES // topology.dp
        per_stage = NUM_BLOCKS // topology.pp
        stage = groups.pp.position
        self.chunk = Stage(range(stage * per_stage, (stage + 1) * per_stage))
        self.is_last = stage == topology.pp - 1
        params = [
            (
                ParamInfo(
                    name=name,
                    full_shape=tuple(param.shape),
                    tp_dim=None,
                    weight_decay=param.dim() > 1,
                ),
                param,
            )
            for name, param in self.chunk.named_parameters()
        ]
        options = OptimizerOptions(overlap="all")
        buffers = make_buffers(params, groups=groups)
        self.optimizer = DistributedOptimizer(
            buffers, groups=groups, options=options, modules=[self.chunk]
        )
        schedule = build_schedule(
            "1f1b", num_ranks=topology.pp, num_microbatches=self.num_microbatches
        )
        activation = ActivationSpec(
            shape=(MICROBATCH_SIZE, WIDTH), dtype=torch.float32, device=torch.device("cpu")
        )
        receives = receives_for(groups.pp, activation)
        self.executor = PipelineExecutor(
            schedule.program(groups.pp.position, receives=receives),
            [self.chunk],
            group=groups.pp,
            activation=activation,
            schedule=schedule,  # compared between the ranks, once
        )

    def step(self, step: int, *, lr: float) -> float:
        """Train on the microbatches of one step; returns the mean loss of all of them."""
        first = step * GLOBAL_MICROBATCHES + self.groups.dp.position * self.num_microbatches

        def forward_step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> Tensor:
            inputs, targets = sample(first + microbatch)
            output: Tensor = chunk(inputs if hidden is None else hidden)
            if not self.is_last:
                return output
            return nn.functional.mse_loss(output, targets) / self.num_microbatches

        def before_backward(_stage: int, microbatch: int) -> None:
            self.optimizer.before_backward(is_last=microbatch == self.num_microbatches - 1)

        self.optimizer.zero_grads()
        losses = self.executor.run(forward_step, before_backward=before_backward)
        loss = torch.stack(losses).sum() if losses else torch.zeros(())
        # Summed over the world in the one all-reduce of the step; only last stages have a loss.
        result = self.optimizer.step(lr=lr, extra=loss.reshape(1))
        return float(result.extra[0]) / self.groups.topology.dp

    def save(self, folder: Path, *, step: int) -> None:
        """Write a checkpoint. Collective."""
        self.optimizer.finish_param_gather()
        state = TrainState(
            step=step, samples=step * GLOBAL_MICROBATCHES, optimizer=self.optimizer.scalars()
        )
        save_checkpoint(folder, self.optimizer.pieces(), state=state, config={}, groups=self.groups)

    def load(self, folder: Path) -> int:
        """Take over the newest checkpoint, of any layout; returns its step. Collective."""
        state = load_checkpoint(folder, self.optimizer.pieces(), groups=self.groups)
        self.optimizer.load_scalars(state.optimizer)
        self.optimizer.finish_load(self.optimizer.step_count)
        return state.step


def main() -> None:
    """Train, from the newest checkpoint if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pp", type=int, default=2, help="ranks of a pipeline under torchrun: 1, 2 or 4"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dir", type=Path, default=Path("runs/own_loop"))
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        groups = ProcessGroups.create(Topology(world_size=dist.get_world_size(), pp=args.pp))
    else:
        groups = ProcessGroups.single()
    loop = Loop(groups)
    first = loop.load(args.dir) if (args.dir / "latest").exists() else 0
    for step in range(first, args.steps):
        loss = loop.step(step, lr=0.01)
        if groups.rank == 0:
            print(f"step {step} loss {loss:.6f}", flush=True)
    if first < args.steps:
        loop.save(args.dir, step=args.steps)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
