"""One execution of a program: the tensors in flight, and a handler per kind of action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore._core import Action, ActionKind, Program, StateMachine
from megacore.ops.split_backward import DeferredWeightGrads, backward_input, whole_backward
from megacore.parallel.interleave import InterleavedPair, idle_work
from megacore.pipeline.clock import PhaseClock, in_phase, named_range
from megacore.pipeline.messages import Incoming, Transport
from megacore.pipeline.recorder import ActionRecorder

# Result of a stage: its output; on the last stage a scalar loss, or (loss, number of tokens).
StageOutput: TypeAlias = Tensor | tuple[Tensor, Tensor | int]
# (model chunk, input or None on the first stage, microbatch) -> result of the stage.
ForwardStep: TypeAlias = Callable[[nn.Module, Tensor | None, int], StageOutput]
# (stage, microbatch), called before each action that adds to the gradients of parameters: also
# before an I during which weight gradients may run early, and again before its W.
BeforeBackward: TypeAlias = Callable[[int, int], None]

KIND_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward, gradient of the input",
    ActionKind.BACKWARD_WEIGHT: "backward, gradients of the weights",
    ActionKind.SEND_FORWARD: "send the output",
    ActionKind.RECV_FORWARD: "receive the input",
    ActionKind.SEND_BACKWARD: "send the gradient of the input",
    ActionKind.RECV_BACKWARD: "receive the gradient of the output",
    ActionKind.RECOMPUTE: "make activations again",
}

_NOTHING = nullcontext()
_COMPUTE_KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)


class StepLosses(list[Tensor]):
    """The losses of one step on a rank that has a last stage, in the order of the microbatches.

    Attributes:
        num_tokens: Sum of the numbers of tokens returned with the losses, a scalar on their
            device; ``None`` if none were returned.
    """

    num_tokens: Tensor | None = None


class PreparedProgram:
    """A program with the facts about each of its positions, and the machine that walks it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.machine = StateMachine(program)
        self.peers = program.peers
        self.acknowledged = program.acknowledged
        self.stages_per_chain = program.num_stages // program.num_chains

    @cached_property
    def pairs(self) -> dict[int, tuple[Action, Action]]:
        """The pairs of actions that run in turns, by the position of the first."""
        overlaps = self.program.overlaps
        actions = self.program.actions if overlaps else []
        return {position: (actions[position], actions[position + 1]) for position in overlaps}

    @cached_property
    def with_weights(self) -> frozenset[tuple[int, int]]:
        """Stage and microbatch of each I that its own W follows."""
        return _with_weights(self.program)

    def is_first(self, stage: int) -> bool:
        """Check if a stage is the first of its chain, without input from another stage."""
        return stage % self.stages_per_chain == 0

    def is_last(self, stage: int) -> bool:
        """Check if a stage is the last of its chain, which computes the loss."""
        return (stage + 1) % self.stages_per_chain == 0


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """Saved state for the backward pass of a stage and microbatch, besides the autograd graph.

    The output itself is not saved, so its memory is freed after the send.
    """

    hidden: Tensor | None
    output: GradientEdge | None  # None: nothing in the stage needs a gradient


class ProgramRun:
    """One run of a program on the chunks of a rank."""

    def __init__(
        self,
        prepared: PreparedProgram,
        chunks: Mapping[int, nn.Module],
        forward_step: ForwardStep,
        *,
        transport: Transport,
        recorder: ActionRecorder | None,
        before_backward: BeforeBackward | None,
        turns: InterleavedPair | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        self._prepared = prepared
        self._clock = clock
        self._turns = turns
        self._chunks = chunks
        self._forward_step = forward_step
        self._activations = transport.activations
        self._recorder = recorder
        self._before_backward = before_backward
        self._trains = not prepared.program.is_forward_only
        self._messages = transport.start_step()
        # By stage and microbatch.
        self._inputs: dict[tuple[int, int], Tensor | Incoming] = {}
        self._output_grads: dict[tuple[int, int], Tensor | Incoming] = {}
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._deferred: dict[tuple[int, int], DeferredWeightGrads] = {}
        self._outgoing: dict[tuple[ActionKind, int, int], Tensor] = {}
        self._losses: dict[int, Tensor] = {}
        self._num_tokens: Tensor | None = None

    def run(self) -> StepLosses:
        """Walk from the first action to the last."""
        handlers: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward_input,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
            ActionKind.SEND_FORWARD: self._send,
            ActionKind.SEND_BACKWARD: self._send,
            ActionKind.RECV_FORWARD: self._receive,
            ActionKind.RECV_BACKWARD: self._receive,
            # The stage recomputes layer by layer in its backward pass, so that the activations of
            # only one layer exist at a time. The forward pass sets it up.
            ActionKind.RECOMPUTE: lambda _: None,
        }
        machine = self._prepared.machine
        machine.reset()
        while (action := machine.next()) is not None:
            if self._turns is not None and machine.position in self._prepared.pairs:
                self._run_pair(self._turns, handlers)
                continue
            machine.start(action)
            self._handle(handlers, action)
            machine.complete(action)
        with in_phase(self._clock, "pipeline_wait"):
            self._messages.finish_all()
        self._require_nothing_left()
        losses = StepLosses(loss for _, loss in sorted(self._losses.items()))
        losses.num_tokens = self._num_tokens
        return losses

    def _run_pair(
        self, turns: InterleavedPair, handlers: Mapping[ActionKind, Callable[[Action], None]]
    ) -> None:
        """Run a forward and the backward behind it in turns."""
        machine = self._prepared.machine
        actions = self._prepared.pairs[machine.position]
        machine.start(actions[0])
        turns.run(*(partial(self._handle, handlers, action) for action in actions))
        machine.complete(actions[0])
        machine.start(actions[1])
        machine.complete(actions[1])

    def _handle(
        self, handlers: Mapping[ActionKind, Callable[[Action], None]], action: Action
    ) -> None:
        # Turns are given by the thread that has them: backward passes must not use another one.
        one_thread = self._turns is not None
        threads = torch.autograd.set_multithreading_enabled(False) if one_thread else _NOTHING
        try:
            with threads:
                handlers[action.kind](action)
        except Exception as error:
            error.add_note(self._describe(action))
            raise

    def _forward(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        hidden = None if self._prepared.is_first(action.stage) else self._take(self._inputs, key)
        if hidden is not None and self._trains:
            hidden.requires_grad_()
        with self._recorded(action), torch.set_grad_enabled(self._trains):
            result = self._forward_step(self._chunks[action.stage], hidden, action.microbatch)
        is_last = self._prepared.is_last(action.stage)
        output = self._take_loss(result, action.microbatch) if is_last else _require_tensor(result)
        if self._trains:
            if is_last and not output.requires_grad:
                _require_no_gradient(hidden, self._chunks[action.stage])
            edge = get_gradient_edge(output) if output.requires_grad else None
            self._saved[key] = _Saved(hidden=hidden, output=edge)
        if not is_last:
            self._activations.of_output(action.stage).require(output, "the output")
            message = output.detach()
            # Without a backward pass, a module may write its next output over this one before it
            # has been sent or read: a captured one does.
            message = (
                message.contiguous()
                if self._trains
                else message.clone(memory_format=torch.contiguous_format)
            )
            self._hand_over(ActionKind.SEND_FORWARD, action, message)

    def _backward(self, action: Action) -> None:
        saved, output_grad = self._take_backward(action)
        self._announce(action)
        with self._recorded(action):
            # A stage without trainable parameters and without an input has nothing to do.
            if saved.output is not None:
                whole_backward(saved.output, output_grad)
        if saved.hidden is not None:
            self._hand_over_grad(action, saved.hidden, saved.hidden.grad)
            saved.hidden.grad = None

    def _backward_input(self, action: Action) -> None:
        saved, output_grad = self._take_backward(action)
        key = (action.stage, action.microbatch)
        early = self._turns is not None and key in self._prepared.with_weights
        if early:
            self._announce(action)
        grad = None
        with self._recorded(action):
            if saved.output is not None:
                grad, deferred = backward_input(
                    saved.output, output_grad, saved.hidden, early=idle_work if early else None
                )
                self._deferred[action.stage, action.microbatch] = deferred
        if saved.hidden is not None:
            self._hand_over_grad(action, saved.hidden, grad)

    def _backward_weight(self, action: Action) -> None:
        deferred = self._deferred.pop((action.stage, action.microbatch), None)
        self._announce(action)
        with self._recorded(action):
            if deferred is not None:
                deferred.run()

    def _take_backward(self, action: Action) -> tuple[_Saved, Tensor | None]:
        key = (action.stage, action.microbatch)
        is_last = self._prepared.is_last(action.stage)
        return self._saved.pop(key), None if is_last else self._take(self._output_grads, key)

    def _announce(self, action: Action) -> None:
        if self._before_backward is not None:
            self._before_backward(action.stage, action.microbatch)

    def _take_loss(self, result: StageOutput, microbatch: int) -> Tensor:
        loss, num_tokens = result if isinstance(result, tuple) else (result, None)
        _require_loss(loss)
        self._losses[microbatch] = loss.detach()
        if num_tokens is not None:
            count = token_count(num_tokens, device=loss.device)
            self._num_tokens = count if self._num_tokens is None else self._num_tokens + count
        return loss

    def _hand_over_grad(self, action: Action, hidden: Tensor, grad: Tensor | None) -> None:
        # A chunk that ignores its input leaves no gradient.
        message = torch.zeros_like(hidden) if grad is None else grad
        self._hand_over(ActionKind.SEND_BACKWARD, action, message.contiguous())

    def _hand_over(self, send_kind: ActionKind, action: Action, message: Tensor) -> None:
        """Give a message to the neighbouring stage here, or keep it for the send that follows."""
        forward = send_kind == ActionKind.SEND_FORWARD
        neighbour = action.stage + (1 if forward else -1)
        if neighbour in self._chunks:
            received = self._inputs if forward else self._output_grads
            received[neighbour, action.microbatch] = message
        else:
            self._outgoing[send_kind, action.stage, action.microbatch] = message

    def _send(self, action: Action) -> None:
        message = self._outgoing.pop((action.kind, action.stage, action.microbatch))
        self._messages.send(action, self._prepared.peers[self._prepared.machine.position], message)

    def _receive(self, action: Action) -> None:
        position = self._prepared.machine.position
        received = self._inputs if action.kind == ActionKind.RECV_FORWARD else self._output_grads
        received[action.stage, action.microbatch] = self._messages.receive(
            action, self._prepared.peers[position], self._prepared.acknowledged[position]
        )

    def _take(
        self, received: dict[tuple[int, int], Tensor | Incoming], key: tuple[int, int]
    ) -> Tensor:
        """Return a message, waiting for it if it comes from another rank."""
        message = received.pop(key)
        if isinstance(message, Tensor):
            return message
        with in_phase(self._clock, "pipeline_wait"), self._recorded(message.action):
            return self._messages.wait(message)

    def _recorded(self, action: Action) -> AbstractContextManager[object]:
        if self._recorder is None and not _profiler_enabled():
            return _NOTHING
        return self._observed(action)

    @contextmanager
    def _observed(self, action: Action) -> Iterator[None]:
        recorder = self._recorder
        with (
            named_range(f"pipeline {action}"),
            _NOTHING if recorder is None else recorder.record(action),
        ):
            yield

    def _describe(self, action: Action) -> str:
        program = self._prepared.program
        return (
            f"in pipeline action {action} ({KIND_WORDS[action.kind]}, stage {action.stage}, "
            f"microbatch {action.microbatch}) on pipeline rank {program.rank}, "
            f"step {self._prepared.machine.position} of {len(program)}"
        )

    def _require_nothing_left(self) -> None:
        for name in ("_inputs", "_output_grads", "_saved", "_deferred", "_outgoing"):
            if getattr(self, name):
                raise RuntimeError(f"megacore bug: {name} holds {list(getattr(self, name))}")


def _with_weights(program: Program) -> frozenset[tuple[int, int]]:
    """Stage and microbatch of each I that its own W follows, with only messages in between."""
    halves = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    computes = [action for action in program.actions if action.kind in _COMPUTE_KINDS]
    return frozenset(
        (first.stage, first.microbatch)
        for first, second in pairwise(computes)
        if (first.kind, second.kind) == halves
        and (first.stage, first.microbatch) == (second.stage, second.microbatch)
    )


def _require_tensor(result: StageOutput) -> Tensor:
    if not isinstance(result, Tensor):
        raise ValueError(
            f"a stage that is not the last one returned a {type(result).__name__}; there, "
            "forward_step must return the output as one tensor"
        )
    return result


def token_count(num_tokens: Tensor | float | None, *, device: torch.device) -> Tensor:
    """A number of tokens in a dtype that sums over microbatches fit into, 0-d."""
    count = None if num_tokens is None else torch.as_tensor(num_tokens, device=device).detach()
    if count is None or count.numel() != 1:
        shown = "None" if count is None else f"a tensor of shape {list(count.shape)}"
        raise ValueError(
            "the number of tokens of a microbatch must be a number, or a tensor with one entry"
            f", got {shown}"
        )
    count = count.reshape(())
    return count.to(torch.float64 if count.is_floating_point() else torch.int64)


def _require_no_gradient(hidden: Tensor | None, chunk: nn.Module) -> None:
    """Check a last stage whose loss needs no gradient: there must be nothing to train before it."""
    if hidden is not None or any(param.requires_grad for param in chunk.parameters()):
        raise ValueError(
            "the loss of the last stage has no gradient, so nothing would be trained; return it "
            "attached to its graph (no .detach(), no .item()), and do not train inside "
            "torch.inference_mode()"
        )


def _require_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        shown = f"{list(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(
            f"the last stage returned {shown}; there, forward_step must return the scalar loss of "
            "the microbatch, or (loss, number of tokens)"
        )
