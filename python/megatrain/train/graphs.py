"""CUDA graphs in training: capture, conditions for recapture, replay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.graphs import (
    CaptureError,
    CaptureSignature,
    EmulatedBackend,
    FormError,
    FullIterationGraph,
    GraphBackend,
    PartialGraphs,
    ReplayError,
    TransformerEngineBackend,
    buffers_kept,
    graph_backend,
)
from megacore.ops.counter_random import StepKeys
from megacore.ops.gemm_cuda import grouped_obstacle
from megacore.ops.gemm_torch import has_grouped_mm_on
from megacore.ops.kernel_choice import is_left
from megacore.optim import StepResult
from megacore.parallel.batch import Microbatch
from megacore.parallel.collectives import all_gather_objects
from megacore.pipeline import ActionRecorder, Program
from megacore.pipeline.executor import ActivationSpec
from megatrain.config import ResolvedConfig
from megatrain.config.graph_rules import graph_problems, graph_scopes
from megatrain.models.captured import captured_parts, random_uses, transformer_layers
from megatrain.models.gpt import GPTChunk
from megatrain.plan.graph_memory import (
    DeviceMemory,
    GraphBytes,
    measured_bytes,
    measured_text,
    predict_graphs,
)
from megatrain.train.step import EagerStep


class StepGraphs:
    """``StepRunner`` that captures an eager step after warmup steps and replays it.

    Each step is first compared with the captured step. Partial graphs are installed in the layers,
    so the eager passes replay them.

    Args:
        config: A resolved configuration with ``graphs.mode`` not ``"off"``.
        eager: Passes and update to capture.
        program: This rank's actions of one step.
        hidden: Specification of layer inputs and outputs.

    Attributes:
        keys: Keys of a step's random numbers on the device.
        notes: Messages for the user; :meth:`take_notes` returns and clears them.
        predicted: Predicted memory of the last capture.
        measured: Measured memory of the last capture; objects and pool are known on a GPU only.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        eager: EagerStep,
        *,
        program: Program,
        hidden: ActivationSpec,
    ) -> None:
        self._config = config
        self._settings = config.graphs
        self._eager = eager
        self._chunks = [chunk for chunk in eager.chunks if isinstance(chunk, GPTChunk)]
        self._optimizer = eager.optimizer
        self._groups = eager.groups
        self._program = program
        self._hidden = hidden
        self._device = torch.device(hidden.device)
        _check_experts(config, self._device)
        self._digest = _digest(config)
        self._num_steps = 0
        self._gave_up = self._gave_up_validation = False
        self._captured: CaptureSignature | None = None
        self._partial: PartialGraphs | None = None
        self._full: dict[str, FullIterationGraph] = {}
        self._before = DeviceMemory()
        self._validation_budgets: tuple[float, ...] = ()
        self._grad_states: Any = None
        self._is_updated = False
        self.keys = StepKeys(random_uses(self._chunks), device=self._device)
        self.notes: list[str] = []
        self.predicted: GraphBytes | None = None
        self.measured: GraphBytes | None = None

    def leave_out_experts(self) -> tuple[str, ...]:
        """Capture less if the products of captured experts are left to torch, with the host.

        Call it when the choice of kernels is final; else the first capture does.

        Returns:
            A note if so.
        """
        reason = _experts_obstacle(self._config, self._device)
        if reason is None or self._gave_up:
            return ()
        asked = self._settings
        reduced = _without_experts(self._config)
        if reduced is None:
            self._gave_up, left = True, "the run goes on without graphs"
        else:
            self._config, self._settings = reduced, reduced.graphs
            left = f"graphs capture {', '.join(graph_scopes(reduced))}"
        return (f'graphs.mode = "{asked.mode}" cannot capture the experts: {reason}; {left}',)

    @property
    def partial(self) -> PartialGraphs | None:
        """Graphs of layer scopes; ``None`` before their capture."""
        return self._partial

    # ---- training --------------------------------------------------------------------------------

    def start(self, step: int, batches: Sequence[Microbatch]) -> None:
        """Set the step's random keys; capture after warmup or on a change. Collective.

        Args:
            step: Number of the step.
            batches: Microbatches of the step.

        Raises:
            CaptureError: If the capture fails, unless ``on_failure`` is ``"eager"``.
            ReplayError: If the step differs from the capture and ``on_failure`` is ``"error"``.
        """
        self.keys.set_step(step)
        self._num_steps += 1
        if self._gave_up or self._num_steps <= self._settings.warmup_steps:
            return
        signature = self._signature(batches[0])
        if self._captured is not None:
            difference = signature.difference(self._captured)
            if not difference:
                return
            if self._settings.on_failure == "error" and not self._is_own_change(signature):
                raise ReplayError(
                    f"step {step + 1:,} differs from the step that was captured: {difference}; "
                    'set graphs.on_failure = "recapture" to capture again'
                )
            self.notes.append(f"captured again at step {step + 1:,}: {difference}")
            self.reset()
        self._capture(signature, batches)

    @property
    def includes_update(self) -> bool:
        """True if the full-step graph includes the optimizer step."""
        return "training" in self._full and self._settings.mode == "full_step"

    def passes(
        self, batches: Sequence[Microbatch], *, lr: float, recorder: ActionRecorder | None = None
    ) -> Tensor:
        """Replay the captured step, with the update if :attr:`includes_update`.

        Runs the eager passes before the capture, with partial graphs, and with a recorder, because
        a graph cannot record actions.
        """
        graph = self._full.get("training") if recorder is None else None
        self._is_updated = graph is not None and self.includes_update
        if graph is None:
            return self._eager.passes(self._prepared(batches), recorder=recorder)
        (numbers,) = graph(self._inputs(batches, lr=lr, veto=0.0))
        self._optimizer.note_replay(self._grad_states, updated=self._is_updated)
        assert numbers is not None
        return numbers

    def update(self, sums: Tensor, *, lr: float) -> StepResult:
        """Run the optimizer step, unless the replayed graph included it."""
        return StepResult(sums) if self._is_updated else self._eager.update(sums, lr=lr)

    def validate(self, batches: Sequence[Microbatch]) -> Tensor:
        """Replay a validation; captured at the first validation after the training capture."""
        if "training" not in self._full or self._gave_up_validation:
            return self._eager.validate(self._prepared(batches))
        inputs = _inputs_of(batches)
        budgets = self._budgets()
        if "validation" in self._full and self._validation_budgets != budgets:
            self._full.pop("validation").reset()
        if "validation" not in self._full:

            def capture() -> None:
                self._full["validation"] = FullIterationGraph(
                    "the validation",
                    lambda static: [self._eager.validate(self._static(static))],
                    inputs,
                    backend=self._backend(),
                )

            if failure := self._attempt(capture):
                self._full.pop("validation", None)
                self._gave_up_validation = True
                self.notes.append(f"validations go on without graphs: {failure}")
                return self._eager.validate(self._prepared(batches))
            self._validation_budgets = budgets
            self.notes.append(self._measured_text(self._before))
        (sums,) = self._full["validation"](inputs)
        assert sums is not None
        return sums

    def take_notes(self) -> list[str]:
        """Return and clear the messages since the last call."""
        notes, self.notes = self.notes, []
        return notes

    def reset(self) -> None:
        """Discard all graphs; the next step captures again."""
        for chunk in self._chunks:
            for layer in transformer_layers(chunk):
                layer.captured = None
        if self._partial is not None:
            self._partial.reset()
        for graph in self._full.values():
            graph.reset()
        self._full.clear()
        self._optimizer.gathers_at_once = True
        self._captured = self._partial = self._grad_states = None

    # ---- capture ---------------------------------------------------------------------------------

    def _capture(self, signature: CaptureSignature, batches: Sequence[Microbatch]) -> None:
        self.notes += self.leave_out_experts()
        if self._gave_up:
            return
        # A step that fails the prediction also fails the capture, with a better error message.
        with suppress(RuntimeError):
            self.predicted = predict_graphs(self._config, self._program)
            self.notes.append(f"capturing {self.predicted.text()}")
        # A captured region cannot wait for transfers that were started outside the capture.
        self._optimizer.finish_param_gather()
        before = self._before = DeviceMemory.now()

        def capture() -> None:
            if self._settings.is_partial:
                self._capture_parts(batches[0])
            else:
                self._capture_step(batches)

        failure = self._attempt(capture)
        if failure is None:
            self._captured = signature
            self.notes.append(self._measured_text(before))
            return
        self.reset()
        self._gave_up = True
        self.notes.append(f"training goes on without graphs: {failure}")

    def _attempt(self, capture: Callable[[], None]) -> CaptureError | None:
        """Capture on all ranks; on failure of any rank, raise or return it by ``on_failure``."""
        failure: CaptureError | None = None
        try:
            with buffers_kept(self._chunks):
                capture()
        except CaptureError as error:
            failure = error
        except FormError as error:
            failure = CaptureError(str(error), is_abrupt=True)
        if failure is not None and self._leaves_others_waiting(failure):
            self.reset()
            raise CaptureError(
                f"{failure}; other ranks wait for what it would have computed, so the run ends"
            ) from failure
        told = all_gather_objects("" if failure is None else str(failure), self._groups.world)
        failing = [rank for rank, text in enumerate(told) if text]
        if not failing:
            return None
        # No exchange is in flight on any rank, so slots taken by the aborted capture can be freed.
        for chunk in self._chunks:
            if chunk.moe_peers is not None:
                chunk.moe_peers.forget_exchanges()
        if failure is None:
            text = f"another rank could not capture: rank {failing[0]}: {told[failing[0]]}"
            failure = CaptureError(text)
        if self._settings.on_failure != "eager":
            self.reset()
            raise failure
        return failure

    def _leaves_others_waiting(self, failure: CaptureError) -> bool:
        """True if other ranks wait for messages of this rank and cannot reach the agreement."""
        topology = self._groups.topology
        if self._settings.is_full:
            return failure.is_abrupt and topology.world_size > 1
        return failure.is_abrupt and max(topology.tp, topology.cp, topology.ep, topology.etp) > 1

    def _capture_step(self, batches: Sequence[Microbatch]) -> None:
        eager, optimizer = self._eager, self._optimizer

        def function(static: Sequence[Tensor]) -> list[Tensor]:
            with optimizer.captured():
                sums = eager.passes(self._static(static))
                optimizer.reduce_grads()
                if self._settings.mode != "full_step":
                    return [sums]
                lr, veto = static[-2:]
                # A graph cannot rerun the passes: a step to rerun must leave all state unchanged.
                veto = veto + eager.experts.num_to_rerun()
                return [eager.update(sums, lr=lr, veto=veto).numbers]

        # A gather started inside the graph could not be awaited outside of it.
        optimizer.gathers_at_once = False
        # lr 0 and veto 1: warmup and capture must not change weights if a backend executes them.
        inputs = self._inputs(batches, lr=0.0, veto=1.0)
        self._full["training"] = FullIterationGraph(
            "the training step", function, inputs, backend=self._backend()
        )
        self._grad_states = optimizer.grad_states()

    def _prepared(self, batches: Sequence[Microbatch]) -> list[Microbatch]:
        """Attach the random keys, and for partial graphs the numbers, to microbatches."""
        return [
            replace(batch, number=number if self._partial is not None else None, keys=self.keys)
            for number, batch in enumerate(batches)
        ]

    def _static(self, static: Sequence[Tensor]) -> list[Microbatch]:
        """Build microbatches from the static inputs of a graph."""
        num = self._eager.num_microbatches
        size = 4 if self._config.data.packing == "best_fit" else 3  # with lengths
        batched = [static[size * n : size * (n + 1)] for n in range(num)]
        return self._prepared(
            [
                # The step is unused: its effect is in the keys.
                Microbatch(
                    tokens=tokens,
                    labels=labels,
                    sample_ids=sample_ids,
                    step=-1,
                    lengths=lengths[0] if lengths else None,
                )
                for tokens, labels, sample_ids, *lengths in batched
            ]
        )

    def _inputs(self, batches: Sequence[Microbatch], *, lr: float, veto: float) -> list[Tensor]:
        """Collect the inputs of a captured training step: microbatches, and update scalars."""
        inputs = _inputs_of(batches)
        if self._settings.mode == "full_step":
            double = torch.float64
            inputs += [torch.full((), n, dtype=double, device=self._device) for n in (lr, veto)]
        return inputs

    def _capture_parts(self, batch: Microbatch) -> None:
        if self._eager.rounded is not None:
            self._eager.rounded.refresh()  # a replay of a part must not round again
        parts = [
            captured_parts(
                chunk,
                graph_scopes(self._config),
                seq_length=batch.shape[1],
                keys=self.keys,
                recomputed=self._config.train.recomputed,
            )
            for chunk in self._chunks
        ]
        if not any(parts):
            return
        factor = torch.ones((), device=self._device)
        sample_batch = replace(batch, keys=self.keys, loss_factor=factor)
        if self._eager.per_token:
            factors = torch.ones(batch.shape[0], device=self._device)
            sample_batch = replace(sample_batch, sample_factors=factors)
        length, _, width = self._hidden.shape
        length = length * batch.shape[1] // self._config.model.seq_length
        x = torch.zeros(
            (length, batch.shape[0], width),
            dtype=self._hidden.dtype,
            device=self._device,
            requires_grad=True,
        )
        self._partial = PartialGraphs(
            parts,
            [[part.sample(x, sample_batch) for part in chunk] for chunk in parts],
            program=self._program,
            backend=self._backend(),
        )
        for chunk, own in enumerate(parts):
            for number, part in enumerate(own):
                part.calls = self._partial.calls_of(chunk, number)
                part.layer.captured = part

    def _backend(self) -> GraphBackend:
        name = self._settings.backend
        if name == "emulated":
            return EmulatedBackend()
        if name == TransformerEngineBackend.name:
            return TransformerEngineBackend()
        return graph_backend(None if name == "auto" else name, device=self._device)

    def _signature(self, batch: Microbatch) -> CaptureSignature:
        topology = self._groups.topology
        return CaptureSignature(
            facts={
                "microbatches": self._eager.num_microbatches,
                "order of passes": " ".join(map(str, self._program.actions)),
                "batch shape": batch.shape,
                "layer inputs": (self._hidden.shape, self._hidden.dtype, str(self._device)),
                "groups": {a: getattr(topology, a) for a in ("tp", "cp", "ep", "etp", "pp", "dp")},
                "configuration": self._digest,
                "rows of static buffers": self._budgets(),
            }
        )

    def _budgets(self) -> tuple[float, ...]:
        return tuple(chunk.moe_budget.factor for chunk in self._chunks)

    def _is_own_change(self, signature: CaptureSignature) -> bool:
        """True if only the budgets differ, as over_budget = "rerun" causes."""
        assert self._captured is not None
        name = "rows of static buffers"
        same = {**signature.facts, name: self._captured.facts[name]}
        return same == dict(self._captured.facts)

    def _measured_text(self, before: DeviceMemory) -> str:
        """Format the measured memory of the capture next to the prediction."""
        if self._partial is not None:
            count, sizes = self._partial.num_graphs, [self._partial.static_bytes()]
        else:
            count, sizes = len(self._full), [g.static_bytes() for g in self._full.values()]
        self.measured = measured_bytes(count, sizes, before)
        has_device = self._device.type == "cuda"
        return measured_text(self.measured, self.predicted, has_device=has_device)


def _inputs_of(batches: Sequence[Microbatch]) -> list[Tensor]:
    """Flatten the microbatches of a step to a list of tensors."""
    inputs: list[Tensor] = []
    for batch in batches:
        if batch.labels is None:
            raise ValueError("a captured step computes losses, but its batch has no labels")
        inputs += [batch.tokens, batch.labels, batch.sample_ids]
        inputs += [] if batch.lengths is None else [batch.lengths]
    return inputs


def _check_experts(config: ResolvedConfig, device: torch.device) -> None:
    """Check that captured experts have a grouped kernel, or had one before it was replaced.

    Raises:
        ConfigError: If not, with the reason.
    """
    reason = _experts_obstacle(config, device)
    if reason is not None and not is_left("grouped_product", "cuda"):
        raise ConfigError(
            f'graphs.mode = "{config.graphs.mode}" captures the experts, which needs the grouped '
            f"kernel: {reason}; or leave moe out of graphs.scopes"
        )


def _experts_obstacle(config: ResolvedConfig, device: torch.device) -> str | None:
    """Return why captured experts would wait for the host, which reads row counts, or ``None``."""
    moe = config.moe
    if device.type != "cuda" or moe.num_experts == 0:
        return None
    if not config.graphs.is_full and "moe" not in graph_scopes(config):
        return None
    width = moe.ffn_hidden_size // config.parallel.etp
    sizes = moe.num_experts // config.parallel.ep, config.model.hidden_size, width
    reason = grouped_obstacle(device, *sizes)
    dtype = getattr(torch, config.train.dtype)
    # Products of clones have no other kernel that reads the counts on the device.
    if reason is None or (not config.has_clones and has_grouped_mm_on(device, dtype, *sizes)):
        return None
    return reason


def _without_experts(config: ResolvedConfig) -> ResolvedConfig | None:
    """Return the configuration with captures of layers up to their experts, if that is legal."""
    graphs = config.graphs
    kept: list[str] = [name for name in graphs.scopes if name != "moe"]
    preprocess = [] if config.has_clones else ["moe_preprocess"]
    choices: list[list[str]] = [[*kept, "moe_router", *preprocess], *([kept] if kept else [])]
    for scopes in [[]] if graphs.is_full else choices:  # by default, what has no host sync
        changes = {"mode": "partial", "scopes": scopes}
        reduced = config.model_copy(update={"graphs": graphs.model_copy(update=changes)})
        if not any(graph_problems(reduced, str)):
            return reduced
    return None


def _digest(config: ResolvedConfig) -> str:
    """Hash the settings that affect the computation to sixteen hexadecimal digits."""
    included = {"model", "parallel", "pipeline", "moe", "train", "optimizer", "debug"}
    values = config.model_dump(include=included)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
