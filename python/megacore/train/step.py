"""One optimizer step and one validation pass, in any layout.

``TrainStep`` joins the three independent machines of a step: the pipeline executor (which runs
forward and backward passes), the gradient buffers (which reduce them) and the optimizer. It knows
no schedule and no layout; those are in the program, the groups and the buffers it is given.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megacore.models.gpt import GPTChunk
from megacore.optim import DistributedOptimizer, StepResult
from megacore.parallel.batch import Microbatch
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.process_groups import ProcessGroups
from megacore.pipeline import ActionKind, ActionRecorder, PipelineExecutor, Program, Schedule
from megacore.pipeline.execution import StageOutput, StepLosses
from megacore.pipeline.executor import ActivationSpec
from megacore.train.experts import ExpertMetrics, ExpertWatch
from megacore.train.graphs import MicrobatchOf, StepGraphs
from megacore.train.predictions import PredictionWatch

# (step, microbatch of this data-parallel rank) -> tokens, on the device of the model.
BatchSource = Callable[[int, int], Microbatch]


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one step reports; equal on every rank except the time.

    Attributes:
        loss: Mean loss over the global batch, nats per token.
        grad_norm: Norm of the averaged gradient before clipping.
        skipped: Whether a non-finite gradient made every rank skip the update.
        step_time_s: Wall time of the step on this rank, seconds.
        experts: What became of tokens in MoE layers; ``None`` for a model without.
        mtp_losses: Mean loss of each depth of multi-token prediction, nats per predicted token.
    """

    loss: float
    grad_norm: float
    skipped: bool
    step_time_s: float
    experts: ExpertMetrics | None = None
    mtp_losses: tuple[float, ...] = ()


class TrainStep:
    """Runs training steps and validations of one rank.

    Args:
        chunks: Model chunks of this pipeline rank, in stage order.
        optimizer: The optimizer over all parameters of ``chunks``.
        groups: Process groups of this rank.
        schedule: The schedule of one training step, compared between the ranks of the pipeline.
        program: This rank's actions of it; validation runs its forward passes.
        activation: Shape, dtype and device of what stages send on, by the stage that sends.
        num_microbatches: Microbatches per data-parallel rank and step.
        experts: Watches the MoE layers of ``chunks``.
        predictions: Adds up the losses of multi-token prediction.
        debug_messages: Check every message between stages; see ``PipelineExecutor``.
        overlap_pairs: Run pairs of the schedule in turns; see ``PipelineExecutor``.
        per_token: The loss is the mean over all tokens of the global batch, instead of the mean
            over microbatches of their means.
        graphs: CUDA graphs of the passes, or of parts of them.
    """

    def __init__(
        self,
        chunks: Sequence[GPTChunk],
        optimizer: DistributedOptimizer,
        groups: ProcessGroups,
        *,
        schedule: Schedule,
        program: Program,
        activation: Mapping[int, ActivationSpec],
        num_microbatches: int,
        experts: ExpertWatch,
        predictions: PredictionWatch,
        debug_messages: bool = False,
        overlap_pairs: bool = False,
        per_token: bool = False,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._groups = groups
        self._device = self._chunks[0].cos.device
        self._num_microbatches = num_microbatches
        self._experts = experts
        self._predictions = predictions
        self._per_token = per_token
        self._graphs = graphs
        self._last_backwards = {
            action.stage: action.microbatch
            for action in program.actions
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        }
        self._stages = dict(zip(self._chunks, program.stages, strict=True))
        self._recomputed = {
            (action.stage, action.microbatch)
            for action in program.actions
            if action.kind == ActionKind.RECOMPUTE
        }
        self._reported_missing: tuple[str, ...] = ()
        self._executor = PipelineExecutor(
            program,
            self._chunks,
            group=groups.pp,
            activation=activation,
            channels=groups.pp_channels,
            debug=debug_messages,
            overlap_pairs=overlap_pairs,
            schedule=schedule,
        )

    def train(
        self, step: int, batches: BatchSource, *, lr: float, recorder: ActionRecorder | None = None
    ) -> StepMetrics:
        """Run one step: forward, backward, gradient reduction, update.

        Args:
            step: Number of the step, from 0.
            batches: Where microbatches come from.
            lr: Learning rate of this step.
            recorder: Gets the start and end of every pipeline action when given.

        Returns:
            The metrics of the step.

        Raises:
            PeerLostError: If another rank went away.
            MegacoreError: If tokens found no room in a static buffer and that is an error.

        Sync:
            Waits for the device: the metrics are numbers.
        """
        start = time.perf_counter()

        def microbatch_of(number: int) -> Microbatch:
            return batches(step, number)

        graphs = self._graphs
        if graphs is not None:
            graphs.start_step(step, microbatch_of, self._train_passes, self._vetoed_update)
        self._experts.start_step()
        while True:
            self._predictions.start_step()
            if graphs is None or recorder is not None:
                sums = self._train_passes(microbatch_of, recorder=recorder)
            else:
                sums = graphs.train_passes(microbatch_of, self._train_passes, lr=lr)
            is_updated = graphs is not None and graphs.includes_update and recorder is None
            if not self._experts.must_rerun(f"step {step + 1:,}"):
                break
            if recorder is not None:
                recorder.clear()
            if graphs is not None:
                graphs.start_step(step, microbatch_of, self._train_passes, self._vetoed_update)
        self._warn_of_missing_grads()
        result = StepResult(sums) if is_updated else self._update(sums, lr)
        num_further = self._predictions.extra().numel()
        of_further, of_experts = result.extra[2:].tensor_split([num_further])
        return StepMetrics(
            loss=_mean(result.extra[:2]),
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            step_time_s=time.perf_counter() - start,
            experts=self._experts.finish_step(of_experts, skipped=result.skipped),
            mtp_losses=self._predictions.losses(of_further),
        )

    @torch.no_grad()
    def evaluate(self, batches: BatchSource, *, num_steps: int) -> float:
        """Mean loss over ``num_steps`` global batches, without dropout. Equal on every rank."""
        self._optimizer.finish_param_gather()
        for chunk in self._chunks:
            chunk.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for step in range(num_steps):

            def microbatch_of(number: int) -> Microbatch:
                return batches(step, number)  # noqa: B023

            self._experts.start_step()
            while True:
                if self._graphs is None:
                    own = self._validation_passes(microbatch_of)
                else:
                    own = self._graphs.validation_passes(microbatch_of, self._validation_passes)
                if not self._experts.must_rerun(f"validation batch {step + 1:,}"):
                    break
            sums += own
        for chunk in self._chunks:
            chunk.train()
        all_reduce_(sums, self._groups.world)
        return _mean(sums)

    def _train_passes(
        self, microbatch_of: MicrobatchOf, *, recorder: ActionRecorder | None = None
    ) -> Tensor:
        """All forward and backward passes of a step; what `_loss_sums` returns."""
        scale = self._optimizer.loss_scale_on_device()
        self._optimizer.zero_grads()
        losses = self._executor.run(
            self._forward_step(microbatch_of, loss_scale=scale),
            before_backward=self._before_backward,
            recorder=recorder,
        )
        return self._loss_sums(losses, loss_scale=scale)

    def _update(self, sums: Tensor, lr: float | Tensor, veto: Tensor | None = None) -> StepResult:
        """The optimizer's step; the losses of the passes and what else was counted ride along."""
        extra = torch.cat((sums, self._predictions.extra(), self._experts.extra()))
        num_tokens = sums[1] if self._per_token else None
        return self._optimizer.step(lr=lr, extra=extra, num_tokens=num_tokens, veto=veto)

    def _vetoed_update(self, sums: Tensor, lr: Tensor, veto: Tensor) -> Tensor:
        """The same in a graph, where nobody can look whether the passes have to be run again."""
        return self._update(sums, lr, veto + self._experts.num_to_rerun()).numbers

    def _validation_passes(self, microbatch_of: MicrobatchOf) -> Tensor:
        losses = self._executor.run(self._forward_step(microbatch_of), forward_only=True)
        return self._loss_sums(losses)

    def _before_backward(self, stage: int, microbatch: int) -> None:
        # Gradients are final with the last action of the stage that adds to them.
        is_last = self._last_backwards[stage] == microbatch
        self._optimizer.before_backward(is_last=is_last)

    def _warn_of_missing_grads(self) -> None:
        missing = tuple(self._optimizer.missing_grads())
        if missing and missing != self._reported_missing:
            self._reported_missing = missing
            names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            warnings.warn(
                f"no gradient for {names} in this step (counted as zero); a parameter that the "
                "loss does not depend on keeps its bucket from being reduced early",
                stacklevel=2,
            )

    def _forward_step(
        self, microbatch_of: MicrobatchOf, *, loss_scale: Tensor | float = 1.0
    ) -> Callable[[nn.Module, Tensor | None, int], StageOutput]:
        cache: dict[int, Microbatch] = {}

        def forward_step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> StageOutput:
            if microbatch not in cache:
                batch = microbatch_of(microbatch)
                # A scalar output is the mean loss of the tokens that count. It goes into the step's
                # loss as it is: the loss is the mean over microbatches; or as a sum over tokens.
                if self._per_token:
                    factor = _num_tokens(chunk, batch) * loss_scale
                    samples = self._sample_factors(batch) * loss_scale
                    batch = replace(batch, loss_factor=factor, sample_factors=samples)
                else:
                    batch = replace(batch, loss_factor=loss_scale / self._num_microbatches)
                if self._graphs is not None:
                    batch = self._graphs.prepared(batch, microbatch)
                cache[microbatch] = batch
            batch = cache[microbatch]
            assert isinstance(chunk, GPTChunk)
            keep = (self._stages[chunk], microbatch) not in self._recomputed
            output: Tensor = chunk(hidden, batch, keep_activations=keep)
            if output.dim() > 0:
                return output
            if self._per_token:
                return output * batch.loss_factor, _num_tokens(chunk, batch)
            return output / self._num_microbatches * loss_scale

        return forward_step

    def _sample_factors(self, batch: Microbatch) -> Tensor:
        """Factors for losses in the middle: a sample counts as often as its tokens do.

        A microbatch's own number of tokens would not do: which samples it joins, and which part of
        a sample a cp rank has, are matters of the layout.
        """
        assert batch.labels is not None
        num_tokens_B = (batch.labels >= 0).sum(1)
        return num_tokens_B.float() * (batch.shape[0] / self._groups.cp.size)

    def _loss_sums(self, losses: StepLosses, *, loss_scale: Tensor | float = 1.0) -> Tensor:
        """``(sum of losses, number of steps or tokens)``, of one rank per data-parallel replica.

        With two copies of the model each last stage has a part of the step's microbatches.
        """
        if not losses or self._groups.tp.position != 0:
            return torch.zeros(2, dtype=torch.float64, device=self._device)
        total = torch.stack([loss / loss_scale for loss in losses]).double().sum()
        part = torch.full_like(total, len(losses) / self._num_microbatches)
        count = part if losses.num_tokens is None else losses.num_tokens
        return torch.stack([total, count.double()])


def _num_tokens(chunk: nn.Module, batch: Microbatch) -> Tensor:
    """How many tokens of this rank's share of a microbatch count in the loss."""
    assert isinstance(chunk, GPTChunk)
    assert batch.labels is not None
    return (chunk.region.share(batch.labels) >= 0).sum()


def _mean(sums: Tensor) -> float:
    total, count = sums.tolist()
    return float(total / count)
