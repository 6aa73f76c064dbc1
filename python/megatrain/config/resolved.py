"""Sections whose derived settings have values; made by `megatrain.config.resolve`."""

from __future__ import annotations

from typing import Literal

from megacore.optim.options import OptimizerOptions
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.config.debug import DebugConfig
from megatrain.config.model import ModelConfig
from megatrain.config.moe import MoEConfig
from megatrain.config.optimizer import OptimizerConfig
from megatrain.config.parallel import ParallelConfig
from megatrain.config.pipeline import PipelineConfig, ScheduleName
from megatrain.config.run import RunConfig
from megatrain.config.sections import Config
from megatrain.config.train import TrainSectionConfig


class ResolvedModelConfig(ModelConfig):
    """``[model]`` with all sizes; ``head_dim`` of latent attention is that of queries and keys."""

    head_dim: int
    num_kv_heads: int
    ffn_hidden_size: int
    vocab_size: int


class ResolvedMoEConfig(MoEConfig):
    """``[moe]`` with the width of the experts."""

    ffn_hidden_size: int


class ResolvedParallelConfig(ParallelConfig):
    """``[parallel]`` with the tensor parallel size of the experts."""

    etp: int


class ResolvedPipelineConfig(PipelineConfig):
    """``[pipeline]`` with the schedule, the number of chunks per rank and the overlap of messages.

    Without a name, the schedule is that of ``schedule_file``.
    """

    schedule: ScheduleName | None
    num_chunks: int


class ResolvedTrainConfig(TrainSectionConfig):
    """``[train]`` with the number format of weights and activations."""

    dtype: Literal["float32", "bfloat16", "float16"]


class ResolvedOptimizerConfig(OptimizerConfig):
    """``[optimizer]`` with the lowest learning rate, and the communication that overlaps."""

    min_lr: float
    overlap: Literal["none", "grads", "params", "all"]

    def options(self) -> OptimizerOptions:
        """Return the options of the optimizer."""
        return OptimizerOptions(
            rule=self.rule(),
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
            overlap=self.overlap,
            loss_scale=self.loss_scale,
            loss_scale_interval=self.loss_scale_interval,
        )


class ResolvedCheckpointConfig(CheckpointConfig):
    """``[checkpoint]`` with its folder."""

    dir: str


class ResolvedRunConfig(RunConfig):
    """``[run]`` with its number of processes and the communication library."""

    nproc: int
    backend: Literal["gloo", "nccl"]


class ResolvedDebugConfig(DebugConfig):
    """``[debug]`` with the traced step."""

    trace_step: int


class ResolvedConfig(Config):
    """A configuration whose rules hold for a number of processes, with all derived settings."""

    model: ResolvedModelConfig
    moe: ResolvedMoEConfig
    parallel: ResolvedParallelConfig
    pipeline: ResolvedPipelineConfig
    train: ResolvedTrainConfig
    optimizer: ResolvedOptimizerConfig
    checkpoint: ResolvedCheckpointConfig
    run: ResolvedRunConfig
    debug: ResolvedDebugConfig

    def holders(self, world_size: int) -> tuple[int, int]:
        """Return how many ranks hold the same dense parameters, and the same experts."""
        parallel, copies = self.parallel, self.pipeline.copies
        experts = world_size // (parallel.etp * parallel.ep * parallel.pp)
        return self.dp(world_size) * parallel.cp * copies, experts * copies


def derived_keys() -> frozenset[str]:
    """Return the settings, as ``"parallel.etp"``, that `resolve` fills if they are not set.

    Example:
        >>> from megatrain.config.resolved import derived_keys
        >>> derived_keys() & {"pipeline.num_chunks", "pipeline.layout"}
        frozenset({'pipeline.num_chunks'})
    """
    return frozenset(
        f"{name}.{key}"
        for name, section in ResolvedConfig.inner_sections().items()
        for key, info in section.by_key().items()
        if info.is_required()
    )
