"""One optimizer step and one validation pass, in any layout.

``TrainStep.train`` is one complete step. It combines the pipeline executor (forward and backward
passes), the gradient buffers (reduction) and the optimizer. It is independent of schedule and
layout, which are encoded in the program, the groups and the buffers. Passes and update are run by a
``StepRunner``: ``EagerStep`` here, or ``StepGraphs``, which wraps it.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megacore import host_values
from megacore.optim import DistributedOptimizer, RoundedWeights, StepResult, WeightAverage
from megacore.parallel.batch import Microbatch
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.process_groups import ProcessGroups
from megacore.pipeline import ActionKind, ActionRecorder, PipelineExecutor, Program
from megacore.pipeline.clock import PhaseClock
from megacore.pipeline.execution import StageOutput, StepLosses
from megatrain.models.group_loss import num_groups
from megatrain.models.stage import Stage
from megatrain.train.diagnosis import NonFiniteSearch
from megatrain.train.meters import (
    ExpertLoadMeter,
    ExpertMetrics,
    GroupLossMeter,
    MTPLossMeter,
)

# (step, microbatch of this data-parallel rank) -> tokens, on the device of the model.
BatchSource = Callable[[int, int], Microbatch]
# Sums of a step: losses, their weight, and labels that count.
_NUM_SUMS = 3
# By rank, before a step: busy seconds of the last step, three of memory, squares of weights.
NUM_REPORTS = 5


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Results of one step; equal on every rank except the times.

    Attributes:
        loss: Mean loss over the global batch, nats per token; NaN if no label counts.
        num_labels: Labels of the global batch that count; groups, with a loss of groups.
        grad_norm: Norm of the averaged gradient before clipping.
        skipped: Whether no rank changed anything: a gradient was not finite, or the update was
            vetoed, for example because of a loss spike, or no label counts.
        num_skipped: Steps skipped so far because of a non-finite gradient.
        step_time_s: Wall time of the step on this rank, seconds.
        num_zeros_in_grad: Zeros in the gradient of the whole model; ``None`` if not counted.
        experts: Loads, drops and losses of MoE layers; ``None`` for a dense model.
        groups: Means of the metrics of a loss of groups.
        mtp_losses: Mean loss of each depth of multi-token prediction, nats per predicted token; NaN
            for a depth that predicted none.
        votes: Sum over all ranks of the votes for this step.
        reports: Numbers that the ranks reported before this step: (world size, NUM_REPORTS).
        phases: Seconds of this rank by phase: ``data``, ``passes`` (of which ``pipeline_wait``),
            ``grad_reduce``, ``optimizer``, ``param_gather``.
    """

    loss: float
    num_labels: int
    grad_norm: float
    skipped: bool
    num_skipped: int
    step_time_s: float
    num_zeros_in_grad: int | None = None
    experts: ExpertMetrics | None = None
    groups: Mapping[str, float] = field(default_factory=dict)
    mtp_losses: tuple[float, ...] = ()
    votes: tuple[float, ...] = ()
    reports: npt.NDArray[np.float64]
    phases: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result on a validation set.

    Attributes:
        loss: Mean loss, nats per token; NaN if no label counts.
        num_labels: Labels that count; groups, with a loss of groups.
        groups: Means of the metrics of a loss of groups.
    """

    loss: float
    num_labels: int
    groups: Mapping[str, float] = field(default_factory=dict)


class StepRunner(Protocol):
    """Interface that runs the passes and the update of a step, eagerly or as graphs."""

    def start(self, step: int, batches: Sequence[Microbatch]) -> None:
        """Prepare for the passes of a step. Collective."""

    def passes(
        self, batches: Sequence[Microbatch], *, lr: float, recorder: ActionRecorder | None = None
    ) -> Tensor:
        """Run all forward and backward passes; ``optimizer.overlap`` reduces buckets meanwhile.

        Returns:
            Sums for :meth:`update`.
        """

    def update(self, sums: Tensor, *, lr: float) -> StepResult:
        """Reduce the rest of the gradients, clip, update the parameters and gather them.

        With ``optimizer.overlap`` the gather goes on in the next forward passes.
        """

    def validate(self, batches: Sequence[Microbatch]) -> Tensor:
        """Run all forward passes and return ``(sum of losses, their weight, number of labels)``."""


class TrainStep:
    """Training steps and validations of one rank.

    Args:
        eager: Passes and update of this rank.
        runner: Replacement runner for passes and update, such as ``StepGraphs``; default ``eager``.
    """

    def __init__(self, eager: EagerStep, *, runner: StepRunner | None = None) -> None:
        self._eager = eager
        self._runner: StepRunner = eager if runner is None else runner
        self._reported_missing: tuple[str, ...] = ()

    def train(
        self,
        step: int,
        source: BatchSource,
        *,
        lr: float,
        recorder: ActionRecorder | None = None,
        search: NonFiniteSearch | None = None,
    ) -> StepMetrics:
        """Run one step: forward, backward, gradient reduction, update.

        Args:
            step: Number of the step, from 0.
            source: Source of microbatches.
            lr: Learning rate of this step.
            recorder: Records the start and end of every pipeline action; ``None`` to disable.
            search: Searches for non-finite values in eager passes; ``None`` to disable.

        Returns:
            The metrics of the step.

        Raises:
            PeerLostError: If another rank was lost.
            MegacoreError: If a static buffer overflows and ``moe.over_budget`` is ``"error"``.

        Sync:
            Waits for the device to read the metrics.
        """
        start = time.perf_counter()
        eager, runner, clock = self._eager, self._runner, self._eager.clock
        clock.clear()
        with clock.phase("data", on_host=True):
            batches = eager.fetch(source, step)
        with nullcontext() if search is None else search.watch():
            for _ in eager.experts.attempts(f"step {step + 1:,}"):
                runner.start(step, batches)
                eager.reset_counts()
                if recorder is not None:
                    recorder.clear()
                with clock.phase("passes"):
                    sums = runner.passes(batches, lr=lr, recorder=recorder)
        self._warn_of_missing_grads()
        result = runner.update(sums, lr=lr)
        eager.expire_rounded()  # also if a graph has updated the weights
        losses, votes, reports, mtp, groups, zeros, experts = eager.split_extra(result.extra)
        expert_metrics = eager.experts.metrics(experts)
        if not result.skipped:
            eager.experts.update_router_biases()
        return StepMetrics(
            loss=_mean(losses),
            num_labels=round(losses[2].item()),
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            num_skipped=result.num_skipped,
            step_time_s=time.perf_counter() - start,
            num_zeros_in_grad=round(zeros.item()) if zeros.numel() else None,
            experts=expert_metrics,
            groups=eager.group_metrics.means(groups),
            mtp_losses=eager.predictions.losses(mtp),
            votes=tuple(votes.tolist()),
            reports=reports.view(-1, NUM_REPORTS).numpy(),
            phases=clock.take(),
        )

    @torch.no_grad()
    def evaluate(
        self,
        source: BatchSource,
        *,
        num_steps: int,
        on_batch: Callable[[], None] | None = None,
    ) -> Evaluation:
        """Compute the mean loss over ``num_steps`` global batches without dropout, on all ranks.

        ``on_batch`` is called on each rank after its part of a batch.
        """
        eager = self._eager
        eager.optimizer.finish_param_gather()
        for chunk in eager.chunks:
            chunk.eval()
        num_metrics = eager.group_metrics.extra().numel()
        sums = torch.zeros(_NUM_SUMS + num_metrics, dtype=torch.float64, device=eager.device)
        for step in range(num_steps):
            batches = eager.fetch(source, step)
            for _ in eager.experts.attempts(f"validation batch {step + 1:,}"):
                eager.reset_counts()
                own = self._runner.validate(batches)
            sums += torch.cat((own, eager.group_metrics.extra()))
            if on_batch is not None:
                on_batch()
        for chunk in eager.chunks:
            chunk.train()
        all_reduce_(sums, eager.groups.world)
        zeros = [0.0] * sums.numel()
        sums = host_values.to_host(sums, "sums of a validation", assumed=lambda: zeros)
        return Evaluation(
            loss=_mean(sums[:_NUM_SUMS]),
            num_labels=round(sums[2].item()),
            groups=eager.group_metrics.means(sums[_NUM_SUMS:]),
        )

    def _warn_of_missing_grads(self) -> None:
        missing = tuple(self._eager.optimizer.missing_grads())
        if missing and missing != self._reported_missing:
            self._reported_missing = missing
            names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            warnings.warn(
                f"no gradient for {names} in this step (counted as zero); with optimizer.overlap, "
                "a parameter that the loss does not depend on keeps its bucket from being reduced "
                "early",
                stacklevel=2,
            )


class EagerStep:
    """Eager passes and update of one rank.

    Args:
        chunks: Model chunks of this pipeline rank, in stage order.
        optimizer: The optimizer over all parameters of ``chunks``.
        groups: Process groups of this rank.
        executor: Runs ``program`` on ``chunks``.
        program: This rank's actions of a training step; validation runs its forward passes.
        num_microbatches: Microbatches per data-parallel rank and step.
        experts: Counters of the MoE layers of ``chunks``.
        predictions: Sums of the multi-token prediction losses.
        group_metrics: Sums of the metrics of a loss of groups.
        group_size: Answers of a group of such a loss; 0 for a loss of tokens.
        per_token: Average the loss over all tokens of the global batch, instead of over the means
            of microbatches.
        clock: Measures the phases of steps; that of the executor and the optimizer.
        num_votes: Number of votes, see :meth:`vote`.
        limits_loss: Skip the update of a step whose loss is above :meth:`limit_loss`.
        counts_zeros: Count the zeros in the gradient of each step.
        average: Moving average of the weights, updated after them.
        rounded: Weights in 8 bits, which expire before each step and validation, and after updates.
    """

    def __init__(
        self,
        chunks: Sequence[Stage],
        optimizer: DistributedOptimizer,
        groups: ProcessGroups,
        executor: PipelineExecutor,
        *,
        program: Program,
        num_microbatches: int,
        experts: ExpertLoadMeter,
        predictions: MTPLossMeter,
        group_metrics: GroupLossMeter,
        group_size: int = 0,
        clock: PhaseClock,
        per_token: bool = False,
        num_votes: int = 0,
        limits_loss: bool = False,
        counts_zeros: bool = False,
        average: WeightAverage | None = None,
        rounded: RoundedWeights | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.groups = groups
        self.experts = experts
        self.predictions = predictions
        self.group_metrics = group_metrics
        self._group_size = group_size
        self.clock = clock
        self.num_microbatches = num_microbatches
        self.device = self.chunks[0].device
        self._executor = executor
        self.per_token = per_token
        # On the device at fixed addresses, because graphs read them.
        self._votes_sent = (0.0,) * num_votes
        self._votes = torch.zeros(num_votes, dtype=torch.float64, device=self.device)
        size = groups.topology.world_size * NUM_REPORTS
        self._reports = torch.zeros(size, dtype=torch.float64, device=self.device)
        own = self._reports.view(-1, NUM_REPORTS)[groups.rank]
        self._own_report, self._own_squares = own[:-1], own[-1]
        on_gpu = self.device.type == "cuda"
        self._report = torch.zeros(NUM_REPORTS - 1, dtype=torch.float64, pin_memory=on_gpu)
        self._report_values = self._report.numpy()
        self._loss_limit = self._votes.new_full((), math.inf) if limits_loss else None
        self._counts_zeros = counts_zeros
        self._average = average
        self.rounded = rounded
        self._constants: dict[float, Tensor] = {}
        self._last_backwards = {
            action.stage: action.microbatch
            for action in program.actions
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        }
        self._stages = dict(zip(self.chunks, program.stages, strict=True))
        self._recomputed = {
            (action.stage, action.microbatch)
            for action in program.actions
            if action.kind == ActionKind.RECOMPUTE
        }

    def vote(self, votes: Sequence[float]) -> None:
        """Set the numbers of this rank that the next step sums over all ranks.

        Sync:
            None: changed numbers are filled in on the device.
        """
        for index, (vote, before) in enumerate(zip(votes, self._votes_sent, strict=True)):
            if vote != before:
                self._votes[index].fill_(vote)
        self._votes_sent = tuple(votes)

    def report(self, numbers: Sequence[float], square_sum: Tensor | None = None) -> None:
        """Set the numbers of this rank that the next step shows to all ranks.

        Args:
            numbers: All but the last of ``NUM_REPORTS`` numbers.
            square_sum: The last one, on the device; ``None`` to keep the former one.

        Sync:
            None: the last step has been waited for, so the former numbers are copied.
        """
        self._report_values[:] = numbers
        self._own_report.copy_(self._report, non_blocking=True)
        if square_sum is not None:
            self._own_squares.copy_(square_sum)

    def limit_loss(self, limit: float) -> None:
        """Set the largest loss that the next step may have, if this step has such a limit."""
        if self._loss_limit is not None:
            self._loss_limit.fill_(limit)

    def fetch(self, source: BatchSource, step: int) -> list[Microbatch]:
        """Fetch all microbatches of a step, in order."""
        return [source(step, number) for number in range(self.num_microbatches)]

    def reset_counts(self) -> None:
        """Zero the expert counters and the sums of multi-token prediction losses."""
        self.experts.reset_counts()
        self.predictions.reset()
        self.group_metrics.reset()

    def expire_rounded(self) -> None:
        """Let weights in 8 bits be rounded again before their next use."""
        if self.rounded is not None:
            self.rounded.expire()

    def start(self, step: int, batches: Sequence[Microbatch]) -> None:
        """Do nothing: eager passes need no preparation."""

    def passes(
        self,
        batches: Sequence[Microbatch],
        *,
        lr: float = 0.0,
        recorder: ActionRecorder | None = None,
    ) -> Tensor:
        """Zero the gradients and run all forward and backward passes; see ``StepRunner``."""
        del lr  # of graphs that include the update
        scale = self.optimizer.loss_scale_on_device()
        self.optimizer.zero_grads()
        self.expire_rounded()
        losses = self._executor.run(
            self._make_forward_step(batches, loss_scale=scale),
            before_backward=self._before_backward,
            recorder=recorder,
        )
        return self._loss_sums(losses, loss_scale=scale)

    def update(self, sums: Tensor, *, lr: float | Tensor, veto: Tensor | None = None) -> StepResult:
        """Run the optimizer step; its norm reduction also sums the losses and expert counters.

        Args:
            sums: From :meth:`passes`.
            lr: Learning rate.
            veto: Device scalar; non-zero to leave all state unchanged.
        """
        votes = self._votes, self._reports
        zeros = (self.optimizer.count_zero_grads(),) if self._counts_zeros else ()
        of_losses = self.predictions.extra(), self.group_metrics.extra()
        extra = torch.cat((sums, *votes, *of_losses, *zeros, self.experts.extra()))
        num_tokens = sums[1] if self.per_token else None
        result = self.optimizer.step(
            lr=lr,
            extra=extra,
            num_tokens=num_tokens,
            veto=veto,
            mean_limit=self._loss_limit,
            count_at=2,
        )
        if self._average is not None:
            with self.clock.phase("optimizer"):
                self._average.update(result)
        return result

    def split_extra(self, extra: Tensor) -> list[Tensor]:
        """Split ``StepResult.extra`` in the order of :meth:`update`."""
        num_mtp = self.predictions.extra().numel()
        sizes = [_NUM_SUMS, self._votes.numel(), self._reports.numel(), num_mtp]
        sizes.append(self.group_metrics.extra().numel())
        sizes.append(int(self._counts_zeros))
        return list(torch.split(extra, [*sizes, extra.numel() - sum(sizes)]))

    def validate(self, batches: Sequence[Microbatch]) -> Tensor:
        """Run all forward passes; see ``StepRunner``."""
        self.expire_rounded()
        losses = self._executor.run(self._make_forward_step(batches), forward_only=True)
        return self._loss_sums(losses)

    def _before_backward(self, stage: int, microbatch: int) -> None:
        # The last backward action of a stage completes its gradients.
        is_last = self._last_backwards[stage] == microbatch
        self.optimizer.before_backward(is_last=is_last)

    def _make_forward_step(
        self, batches: Sequence[Microbatch], *, loss_scale: Tensor | float = 1.0
    ) -> Callable[[nn.Module, Tensor | None, int], StageOutput]:
        weighted = [self._weighted(batch, loss_scale) for batch in batches]

        def forward_step(chunk: nn.Module, hidden: Tensor | None, number: int) -> StageOutput:
            assert isinstance(chunk, Stage)
            batch = weighted[number]
            keep = (self._stages[chunk], number) not in self._recomputed
            output: Tensor = chunk(hidden, batch, keep_activations=keep)
            if output.dim() > 0:
                return output
            # Scale the mean loss of the labels that count to its share of the step's loss.
            return output * batch.loss_factor, self._num_units(batch)

        return forward_step

    def _weighted(self, batch: Microbatch, loss_scale: Tensor | float) -> Microbatch:
        """Attach loss factors to a microbatch: per token, or an equal share of the mean."""
        if self.per_token:
            if batch.labels is None:
                return batch  # of a stage that neither computes losses nor routes tokens
            return replace(
                batch,
                loss_factor=self._num_units(batch) * loss_scale,
                label_factor=loss_scale,
                sample_factors=self._sample_factors(batch) * loss_scale,
            )
        factor = loss_scale / self.num_microbatches
        # Captured code reads the factor from a tensor, which must outlive the capture.
        if batch.keys is not None and not isinstance(factor, Tensor):
            if factor not in self._constants:
                self._constants[factor] = torch.full((), factor, device=self.device)
            factor = self._constants[factor]
        cp_size = self.groups.cp.size
        if batch.labels is None or cp_size == 1:
            return replace(batch, loss_factor=factor)
        # The mean over the labels of the microbatch, of which this cp rank has some or none. Sums
        # over cp ranks are averaged like those over data-parallel ranks.
        label_factor = factor * cp_size / (batch.labels >= 0).sum().clamp(min=1)
        return replace(
            batch,
            loss_factor=self._num_labels(batch) * label_factor,
            label_factor=label_factor,
            sample_factors=factor,
        )

    def _num_units(self, batch: Microbatch) -> Tensor:
        """Count what this cp rank adds to the step's loss: its labels, or its share of groups."""
        if self._group_size == 0:
            return self._num_labels(batch)
        # All cp ranks compute the loss of every group.
        share = sum(num_groups(batch, self._group_size)) / self.groups.cp.size
        return torch.full((), share, dtype=torch.float64, device=self.device)

    def _num_labels(self, batch: Microbatch) -> Tensor:
        """Count the labels of this cp rank's share of a microbatch that count."""
        assert batch.labels is not None
        return (self.chunks[0].region.share(batch.labels) >= 0).sum()

    def _sample_factors(self, batch: Microbatch) -> Tensor:
        """Compute the factors of auxiliary losses: a sample is weighted by its unmasked tokens.

        The number of tokens of a microbatch cannot be used, because the samples in a microbatch and
        a cp rank's part of a sample depend on the layout.
        """
        assert batch.labels is not None
        num_tokens_B = (batch.labels >= 0).sum(1)
        if self._group_size > 0:
            counts = num_groups(batch, self._group_size)
            num_tokens_B = torch.tensor(counts, device=num_tokens_B.device)
        return num_tokens_B.float() * (batch.shape[0] / self.groups.cp.size)

    def _loss_sums(self, losses: StepLosses, *, loss_scale: Tensor | float = 1.0) -> Tensor:
        """Compute ``(sum of losses, their weight, labels)``, on one tp rank of the last stage.

        The weight is the number of labels with a mean per token, else that of steps.

        With two copies of the model, each last stage computes some of the step's microbatches.
        """
        if not losses or self.groups.tp.position != 0:
            return torch.zeros(_NUM_SUMS, dtype=torch.float64, device=self.device)
        assert losses.num_tokens is not None
        total = torch.stack([loss / loss_scale for loss in losses]).double().sum()
        num_labels = losses.num_tokens.double()
        part = torch.full_like(total, len(losses) / self.num_microbatches)
        return torch.stack([total, num_labels if self.per_token else part, num_labels])


def _mean(sums: Tensor) -> float:
    """Return the mean loss; NaN without labels."""
    total, weight, num_labels = sums.tolist()
    return float(total / weight) if num_labels > 0 else math.nan
