"""Construction of one rank's training components from a resolved configuration.

Every decision that ranks must agree on (layout, schedule, buffer plan, data order) is a pure
function of the configuration, so agreement needs no communication.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megacore.calls.ring import CallRing
from megacore.errors import DataError
from megacore.optim import (
    DistributedOptimizer,
    FrozenParams,
    ParamPiece,
    WeightAverage,
)
from megacore.optim.param_group import group_of
from megacore.parallel import ProcessGroups
from megacore.parallel.batch import Microbatch
from megacore.parallel.param_info import ParamInfo
from megacore.pipeline import (
    ActionRecorder,
    Schedule,
)
from megacore.pipeline.clock import PhaseClock
from megacore.qualification import KernelChoice
from megatrain.checkpoint.base_weights import BaseWeights
from megatrain.checkpoint.chunks import MAIN_PARAM
from megatrain.config import ResolvedConfig
from megatrain.config.lora import is_adapter
from megatrain.data import Samples, TrainingData, microbatch
from megatrain.data.loading import load_run_data
from megatrain.data.prefetch import Prefetch
from megatrain.data.sample import OneEpoch
from megatrain.models.build import build_chunks, group_loss_of
from megatrain.models.gpt import GPTChunk
from megatrain.models.stage import Stage
from megatrain.plan.layout import (
    train_schedule,
)
from megatrain.plan.routing import recorded_settings
from megatrain.routing_trace import RoutingTape
from megatrain.train.diagnosis import NonFiniteSearch
from megatrain.train.graphs import StepGraphs
from megatrain.train.kernels import choose_run_kernels
from megatrain.train.memory import memory_bytes
from megatrain.train.step import BatchSource, EagerStep, Evaluation, StepMetrics, TrainStep
from megatrain.train.trainer_parts import (
    attach_tape,
    count_params,
    make_groups,
    make_run_buffers,
    make_step,
    optimizer_options,
)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Training components of one rank.

    Attributes:
        config: Resolved configuration.
        groups: Process groups of this rank.
        data: Datasets and tokenizer.
        schedule: The pipeline schedule of a training step, all ranks.
        chunks: Model chunks of this rank.
        optimizer: Optimizer over the parameters of ``chunks``.
        eager: Passes and update of a step without graphs.
        frozen: Parameters that are not trained.
        average: Moving average of the weights; ``None`` without one.
        graphs: CUDA graphs of training steps; ``None`` without graphs.
        device: Device of the model.
        kernels: Choice between our kernels and torch's operations.
        routing: Recorder and replay of routing decisions, both optional.
        num_params: Parameters of the whole model, without the padding of the vocabulary.
        calls: Recorder of the collectives and messages of this rank.
        first_bytes: Memory of this process on its device before it built anything.
        base: Weights that the adapters are trained on; ``None`` without adapters, or before the
            weights are loaded.
    """

    config: ResolvedConfig
    groups: ProcessGroups
    data: TrainingData
    schedule: Schedule
    chunks: list[Stage]
    optimizer: DistributedOptimizer
    step: TrainStep
    eager: EagerStep
    frozen: FrozenParams
    average: WeightAverage | None
    graphs: StepGraphs | None
    device: torch.device
    kernels: KernelChoice
    routing: RoutingTape
    num_params: int
    calls: CallRing | None = None
    first_bytes: float = 0.0
    base: BaseWeights | None = None
    # By sample offset; a run uses one offset.
    prefetched: dict[int, Prefetch] = field(default_factory=dict, repr=False)

    def train_step(
        self,
        step: int,
        *,
        sample_offset: int = 0,
        token_offset: int = 0,
        recorder: ActionRecorder | None = None,
        search: NonFiniteSearch | None = None,
    ) -> StepMetrics:
        """Run optimizer step number ``step`` (from 0) on the samples selected by `microbatch`.

        See :meth:`TrainStep.train` and, for the offsets, `OptimizerConfig.rate_of_run`.
        """
        lr = self.learning_rate(step, sample_offset=sample_offset, token_offset=token_offset)
        self.routing.start_step(step)
        if sample_offset not in self.prefetched:
            self.prefetched[sample_offset] = Prefetch(
                self._host_batches(self.data.train, sample_offset),
                num_microbatches=self.eager.num_microbatches,
                end=self.config.train.steps,
            )
        batches = self._on_device(self.prefetched[sample_offset])
        metrics = self.step.train(step, batches, lr=lr, recorder=recorder, search=search)
        self.routing.finish_step(step)
        return metrics

    def pieces(self) -> list[ParamPiece]:
        """List all checkpointed state of this rank, as views to save from or load into.

        With adapters, the weights of their base are left out; see `weights`.
        """
        averages = [] if self.average is None else self.average.pieces()
        trained = [*self.optimizer.pieces(), *averages]
        if self.config.lora.is_on:
            of_base = self.config.lora.param_groups()
            # Adapters that a group freezes are not in the base.
            fixed = [
                piece
                for piece in self.frozen.pieces()
                if not group_of(piece.info.name, of_base).frozen
            ]
            buffers = (chunk.trained_buffer_infos() for chunk in self.chunks)
            return [*trained, *fixed, *_buffer_pieces(buffers)]
        buffers = (chunk.buffer_infos() for chunk in self.chunks)
        return [*trained, *self.frozen.pieces(), *_buffer_pieces(buffers)]

    def weights(self) -> list[ParamPiece]:
        """List the weights of the model on this rank without adapters, as views to load into."""
        buffers = _buffer_pieces(chunk.buffer_infos() for chunk in self.chunks)
        pieces = [*self.optimizer.pieces(), *self.frozen.pieces(), *buffers]
        return [without_state(piece) for piece in pieces if not is_adapter(piece.info.name)]

    def learning_rate(self, step: int, *, sample_offset: int = 0, token_offset: int = 0) -> float:
        """Compute the learning rate of step ``step``; see `OptimizerConfig.rate_of_run`."""
        rate = self.config.optimizer.rate_of_run(
            steps=self.config.train.steps,
            global_batch_size=self.config.train.global_batch_size,
            seq_length=self.config.model.seq_length,
            sample_offset=sample_offset,
            token_offset=token_offset,
        )
        return rate.at(step)

    def evaluate(
        self, *, whole: bool = False, on_batch: Callable[[str], None] | None = None
    ) -> dict[str, Evaluation]:
        """Compute the mean loss of each validation set over ``train.eval_steps`` fixed batches.

        With ``whole``, every sample of a set counts once; use ``train.loss_normalization`` "token".
        ``on_batch`` is called with the name of the set after each global batch.
        """
        if not self.data.validation:
            raise DataError("there is no validation data; set train.eval_interval = 0")
        batch, counts = self.config.train.global_batch_size, self.validation_samples(whole=whole)
        return {
            name: self.step.evaluate(
                self._batches(OneEpoch(samples) if whole else samples),
                num_steps=-(-counts[name] // batch),
                on_batch=None if on_batch is None else functools.partial(on_batch, name),
            )
            for name, samples in self.data.validation.items()
        }

    def validation_samples(self, *, whole: bool = False) -> dict[str, int]:
        """Return the samples that :meth:`evaluate` reads, by validation set."""
        train = self.config.train
        return {
            name: OneEpoch(samples).num_samples
            if whole
            else train.eval_steps * train.global_batch_size
            for name, samples in self.data.validation.items()
        }

    def mean_validation_loss(self, found: Mapping[str, Evaluation]) -> float:
        """Average the losses of the validation sets with labels by their weights; NaN without."""
        weights = self.data.validation_weights
        losses = {name: each.loss for name, each in found.items() if each.num_labels > 0}
        total = sum(weights[name] for name in losses)
        if total == 0.0:
            return math.nan
        return sum(weights[name] * loss for name, loss in losses.items()) / total

    def layout_text(self) -> str:
        """Format the layout, e.g. ``"tp 2 x pp 2, 4 processes on cpu"``."""
        topology = self.groups.topology
        axes = {"tp": topology.tp, "cp": topology.cp, "pp": topology.pp, "dp": topology.dp}
        product = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
        if self.config.moe.num_experts > 0:
            axes = {"etp": topology.etp, "ep": topology.ep, "edp": topology.expert_dp}
            experts = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
            product += f", experts {experts}" if experts else ""
        count = topology.world_size
        where = f"{count} {'process' if count == 1 else 'processes'} on {self.device.type}"
        return f"{product}, {where}" if product else where

    def model_text(self) -> str:
        """Format a summary of the model."""
        model = self.config.model
        if model.factory is not None:
            return (
                f"{model.factory}, {model.num_layers} layers, hidden {model.hidden_size}, "
                f"sequence {model.seq_length}, {self.config.train.dtype}"
            )
        return (
            f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads, "
            f"sequence {model.seq_length}, {self.config.train.dtype}"
        )

    def data_text(self) -> str:
        """Format a summary of the data."""
        return f"{', '.join(self.data.sources)}, {self.data.tokenizer.name} tokens"

    def schedule_text(self) -> str:
        """Format a summary of the schedule."""
        pipeline = self.config.pipeline
        chunks = f", {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
        if pipeline.copies > 1:
            chunks = f", {pipeline.copies} copies of the model"
        number, size = self.schedule.num_microbatches, self.config.train.microbatch_size
        return (
            f"{self.schedule.name}{chunks}, {number} microbatch{'' if number == 1 else 'es'} of "
            f"{size} sequence{'' if size == 1 else 's'} per step"
        )

    def _batches(self, dataset: Samples, sample_offset: int = 0) -> BatchSource:
        return self._on_device(self._host_batches(dataset, sample_offset))

    def _on_device(self, source: BatchSource) -> BatchSource:
        return lambda step, number: source(step, number).to(self.device)

    def _host_batches(self, dataset: Samples, sample_offset: int = 0) -> BatchSource:
        train, dp = self.config.train, self.groups.dp
        with_tokens = self._reads_tokens

        def batches(step: int, number: int) -> Microbatch:
            batch = microbatch(
                dataset,
                step=step,
                microbatch=number,
                dp_position=dp.position,
                dp_size=dp.size,
                microbatch_size=train.microbatch_size,
                global_batch_size=train.global_batch_size,
                sample_offset=sample_offset,
                document_mask=self.config.data.document_mask,
                with_tokens=with_tokens,
            )
            return batch.pinned() if self.device.type == "cuda" else batch

        return batches

    @property
    def _reads_tokens(self) -> bool:
        """Return whether this rank needs tokens or labels; inner dense layers do not."""
        if any(
            not isinstance(chunk, GPTChunk) or chunk.embedding or chunk.head or chunk.predictions
            for chunk in self.chunks
        ):
            return True
        counts_by_token = self.eager.per_token and self.config.moe.num_experts > 0
        routes_padding = self.config.data.packing == "best_fit" and self.config.moe.num_experts > 0
        reads_documents = self.config.data.document_mask or routes_padding
        return counts_by_token or reads_documents or self.graphs is not None


def without_state(piece: ParamPiece) -> ParamPiece:
    """Return a piece with its values alone."""
    return replace(piece, tensors={MAIN_PARAM: piece.tensors[MAIN_PARAM]})


def _buffer_pieces(infos: Iterable[list[tuple[ParamInfo, Tensor]]]) -> list[ParamPiece]:
    return [
        ParamPiece(info=info, start=0, end=value.numel(), tensors={MAIN_PARAM: value})
        for of_chunk in infos
        for info, value in of_chunk
    ]


def build_trainer(
    config: ResolvedConfig,
    *,
    world_size: int,
    device: torch.device,
    calls: CallRing | None = None,
    data: TrainingData | None = None,
    clock: PhaseClock | None = None,
    groups: ProcessGroups | None = None,
    initialize: bool = True,
) -> Trainer:
    """Build all components of this rank; collective.

    Args:
        config: Resolved configuration.
        world_size: Number of ranks. Above 1, ``torch.distributed`` must be initialized.
        device: Device of this rank.
        calls: Records the collectives and messages of this rank.
        data: Data in place of that of the configuration.
        clock: Measures the phases of steps. Default: a new one.
        groups: Process groups of this rank, from :func:`make_groups`. Default: new ones.
        initialize: Draw random weights; else they are left as they are, to be filled.

    Raises:
        ConfigError: If the layout is invalid for the model or the number of ranks.
        DataError: If the data is missing or too small.
    """
    first_bytes = memory_bytes(device)[0]
    groups = make_groups(config, world_size, calls=calls) if groups is None else groups
    kernels = choose_run_kernels(config, device=device, world=groups.world)
    data = load_run_data(config) if data is None else data
    chunks = build_chunks(config, groups, device=device, initialize=initialize)
    num_params = count_params(config, chunks, groups)
    buffers, frozen = make_run_buffers(config, groups, chunks)
    # The loss of groups is the mean over all of them, as if these were the tokens.
    of_groups = group_loss_of(config) is not None
    mean_over = config.train.loss_normalization or data.default_normalization
    per_token = of_groups or mean_over == "token"
    tokens_per_sample = 1 if of_groups else config.model.seq_length
    num_summed = config.train.global_batch_size * tokens_per_sample if per_token else 1
    clock = PhaseClock(device) if clock is None else clock
    optimizer = DistributedOptimizer(
        buffers,
        groups=groups,
        options=optimizer_options(config.optimizer, num_summed),
        modules=chunks,
        param_groups=config.param_groups(),
        frozen=frozen,
        clock=clock,
    )
    average = None
    if config.optimizer.ema_decay > 0:
        average = WeightAverage(optimizer.pieces(), decay=config.optimizer.ema_decay)
    schedule = train_schedule(config, world_size)
    eager, graphs = make_step(
        config,
        schedule,
        groups,
        chunks,
        optimizer,
        average,
        per_token=per_token,
        clock=clock,
        device=device,
    )
    return Trainer(
        config=config,
        groups=groups,
        data=data,
        schedule=schedule,
        chunks=chunks,
        optimizer=optimizer,
        step=TrainStep(eager, runner=graphs),
        eager=eager,
        frozen=frozen,
        average=average,
        graphs=graphs,
        device=device,
        kernels=kernels,
        routing=attach_tape(config.debug, recorded_settings(config), chunks, rank=groups.rank),
        num_params=num_params,
        calls=calls,
        first_bytes=first_bytes,
    )
