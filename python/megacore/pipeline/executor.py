"""Runs one pipeline rank's program on real tensors.

The executor knows no schedule. It walks a ``Program`` through the native ``StateMachine`` and has
one small handler per kind of action. Sends and receives only start transfers; a compute action
waits for the message it reads, and a send is waited for only when a later message has proved it
received, or at the end. So nothing blocks that the proof of the program has not covered.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import Work

from megacore._core import Action, ActionKind, Program, StateMachine
from megacore.parallel.collectives import irecv, isend
from megacore.parallel.process_groups import Group
from megacore.pipeline.activation import ActivationSpec, receives_for, uses_nccl
from megacore.pipeline.recorder import ActionRecorder
from megacore.pipeline.schedule import Schedule

__all__ = [
    "ActivationSpec",
    "BeforeBackward",
    "ForwardStep",
    "PipelineExecutor",
    "forward_backward",
]

# (model chunk, input or None on the first stage, microbatch) -> activation, or scalar loss on the
# last stage.
ForwardStep = Callable[[nn.Module, Tensor | None, int], Tensor]
# (stage, microbatch), called before the action that adds to the gradients of parameters.
BeforeBackward = Callable[[int, int], None]

_KIND_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.SEND_FORWARD: "send the output",
    ActionKind.RECV_FORWARD: "receive the input",
    ActionKind.SEND_BACKWARD: "send the gradient of the input",
    ActionKind.RECV_BACKWARD: "receive the gradient of the output",
}


class PipelineExecutor:
    """Runs a program, step after step.

    Args:
        program: This rank's program.
        chunks: Its model chunks, in chunk order.
        group: The pipeline's ranks; positions in it are the program's ranks.
        activation: What stages send to each other.
        recorder: Gets the start and end of every compute action and of every wait for a message.

    Raises:
        ValueError: If program, chunks and group do not belong together, or the program holds a kind
            of action that cannot be run.
    """

    def __init__(
        self,
        program: Program,
        chunks: Sequence[nn.Module],
        *,
        group: Group,
        activation: ActivationSpec,
        recorder: ActionRecorder | None = None,
    ) -> None:
        if (program.rank, program.num_ranks) != (group.position, group.size):
            raise ValueError(
                f"the program is that of rank {program.rank} of {program.num_ranks}, but this is "
                f"position {group.position} of {group.size} in group {group.name}"
            )
        if len(chunks) != len(program.stages):
            raise ValueError(
                f"the program of rank {program.rank} runs the {len(program.stages)} stages "
                f"{program.stages}, but {len(chunks)} model chunks were given; give one per stage"
            )
        if program.num_chains > 1:
            raise ValueError(
                f"the program runs {program.num_chains} chains of stages; the executor runs one"
            )
        unknown = [action for action in program.actions if action.kind not in _KIND_WORDS]
        if unknown:
            raise ValueError(
                f"the program splits backward passes ({unknown[0]}); "
                "the executor runs whole ones (B) only"
            )
        if not program.is_in_order and uses_nccl(group, activation):
            raise ValueError(
                "NCCL runs all messages of two ranks in one queue, which can deadlock with "
                "receives posted ahead; use schedule.program(rank, receives='in_order')"
            )
        self._track = _Track(program)
        self._forward_track = self._track
        if not program.is_forward_only:
            self._forward_track = _Track(program.forward_only())
        self._chunks = dict(zip(program.stages, chunks, strict=True))
        self._group = group
        self._activation = activation
        self._recorder = recorder

    def run(
        self,
        forward_step: ForwardStep,
        *,
        forward_only: bool = False,
        before_backward: BeforeBackward | None = None,
    ) -> list[Tensor]:
        """Run one step over all microbatches.

        Gradients are accumulated into the parameters' ``grad`` in the order in which the schedule
        runs the backward passes.

        Args:
            forward_step: Called as ``forward_step(chunk, hidden, microbatch)`` for every forward.
                ``hidden`` is the previous stage's output, or None on the first stage. Returns the
                output, or on the last stage the scalar float32 loss of the microbatch, scaled as it
                should go into the backward pass.
            forward_only: Run the forward passes only, without autograd.
            before_backward: Called as ``before_backward(stage, microbatch)`` before every backward
                pass.

        Returns:
            On the rank of the last stage, the losses in microbatch order, detached, on their
            device; else an empty list.

        Raises:
            ValueError: If an output has another shape, dtype or device than announced, or the
                program has no backward passes and ``forward_only`` is false.

        Errors of ``forward_step`` and of the backend are raised as they are, with a note that names
        the action. After an error the executor can be used again once the ranks agree to.

        Sync:
            Waits for messages on gloo; on NCCL only the stream waits.
        """
        track = self._forward_track if forward_only else self._track
        if track.program.is_forward_only and not forward_only:
            raise ValueError(
                "the program has no backward passes; pass forward_only=True, or give the executor "
                "the program of a training schedule"
            )
        step = _Step(
            track,
            self._chunks,
            forward_step,
            group=self._group,
            activation=self._activation,
            recorder=self._recorder,
            before_backward=before_backward,
        )
        return step.run()


def forward_backward(
    chunks: Sequence[nn.Module],
    schedule: Schedule,
    forward_step: ForwardStep,
    *,
    group: Group,
    activation: ActivationSpec,
    forward_only: bool = False,
    recorder: ActionRecorder | None = None,
) -> list[Tensor]:
    """Run one step of a schedule; see ``PipelineExecutor`` and its ``run``.

    Keep a ``PipelineExecutor`` for more than one step: this makes a new one each time.
    """
    executor = PipelineExecutor(
        schedule.program(group.position, receives=receives_for(group, activation)),
        chunks,
        group=group,
        activation=activation,
        recorder=recorder,
    )
    return executor.run(forward_step, forward_only=forward_only)


class _Track:
    """A program with the facts about each of its positions, and the machine that walks it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.machine = StateMachine(program)
        self.peers = program.peers
        self.acknowledged = program.acknowledged


@dataclass(frozen=True, kw_only=True)
class _Receive:
    """A receive under way."""

    action: Action
    work: Work
    tensor: Tensor
    peer: int
    acknowledged: int  # sends to the peer that its arrival proves received


class _SentMessages:
    """Messages under way to other ranks, each kept alive until it is known to be received."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[tuple[Work, Tensor]]] = defaultdict(deque)
        self._num_done: dict[int, int] = defaultdict(int)

    def add(self, peer: int, work: Work, tensor: Tensor) -> None:
        self._waiting[peer].append((work, tensor))

    def finish(self, peer: int, count: int) -> None:
        """Wait for the first ``count`` messages of this step to a peer and let them go."""
        while self._num_done[peer] < count:
            work, _ = self._waiting[peer].popleft()
            work.wait()
            self._num_done[peer] += 1

    def finish_all(self) -> None:
        for peer, messages in self._waiting.items():
            self.finish(peer, self._num_done[peer] + len(messages))


class _Step:
    """One walk through a program: the tensors under way, and a handler per kind of action."""

    def __init__(
        self,
        track: _Track,
        chunks: dict[int, nn.Module],
        forward_step: ForwardStep,
        *,
        group: Group,
        activation: ActivationSpec,
        recorder: ActionRecorder | None,
        before_backward: BeforeBackward | None,
    ) -> None:
        self._track = track
        self._chunks = chunks
        self._forward_step = forward_step
        self._group = group
        self._activation = activation
        self._recorder = recorder
        self._before_backward = before_backward
        self._last_stage = track.program.num_stages - 1
        self._trains = not track.program.is_forward_only
        # By stage and microbatch.
        self._inputs: dict[tuple[int, int], Tensor | _Receive] = {}
        self._output_grads: dict[tuple[int, int], Tensor | _Receive] = {}
        self._saved: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._outgoing: dict[tuple[ActionKind, int, int], Tensor] = {}
        self._losses: dict[int, Tensor] = {}
        self._sent = _SentMessages()

    def run(self) -> list[Tensor]:
        handlers: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.SEND_FORWARD: self._send,
            ActionKind.SEND_BACKWARD: self._send,
            ActionKind.RECV_FORWARD: self._receive,
            ActionKind.RECV_BACKWARD: self._receive,
        }
        machine = self._track.machine
        machine.reset()
        while (action := machine.next()) is not None:
            machine.start(action)
            try:
                handlers[action.kind](action)
            except Exception as error:
                error.add_note(self._describe(action))
                raise
            machine.complete(action)
        self._sent.finish_all()
        self._require_nothing_left()
        return [loss for _, loss in sorted(self._losses.items())]

    def _forward(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        hidden = self._take(self._inputs, key) if action.stage > 0 else None
        if hidden is not None and self._trains:
            hidden.requires_grad_()
        with self._recorded(action), torch.set_grad_enabled(self._trains):
            output = self._forward_step(self._chunks[action.stage], hidden, action.microbatch)
        if self._trains:
            self._saved[key] = (hidden, output)
        if action.stage == self._last_stage:
            _require_loss(output)
            self._losses[action.microbatch] = output.detach()
            return
        self._activation.require(output, "the output")
        message = output.detach().contiguous()
        self._hand_over(ActionKind.SEND_FORWARD, action, message)

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        hidden, output = self._saved.pop(key)
        is_last = action.stage == self._last_stage
        output_grad = None if is_last else self._take(self._output_grads, key)
        if self._before_backward is not None:
            self._before_backward(action.stage, action.microbatch)
        with self._recorded(action):
            # A stage without trainable parameters and without an input has nothing to do.
            if output.requires_grad:
                torch.autograd.backward(output, output_grad)
        if hidden is None:
            return
        # A chunk that ignores its input leaves no gradient.
        input_grad = hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)
        self._hand_over(ActionKind.SEND_BACKWARD, action, input_grad.contiguous())

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
        self._activation.require(message, "the message")
        receiver = action.stage + (1 if action.kind == ActionKind.SEND_FORWARD else -1)
        peer = self._track.peers[self._track.machine.position]
        tag = _tag(receiver, forward=action.kind == ActionKind.SEND_FORWARD)
        work = isend(message, self._group, to_position=peer, tag=tag)
        self._sent.add(peer, work, message)

    def _receive(self, action: Action) -> None:
        position = self._track.machine.position
        peer = self._track.peers[position]
        forward = action.kind == ActionKind.RECV_FORWARD
        tensor = self._activation.empty()
        tag = _tag(action.stage, forward=forward)
        received = self._inputs if forward else self._output_grads
        received[action.stage, action.microbatch] = _Receive(
            action=action,
            work=irecv(tensor, self._group, from_position=peer, tag=tag),
            tensor=tensor,
            peer=peer,
            acknowledged=self._track.acknowledged[position],
        )

    def _take(
        self, received: dict[tuple[int, int], Tensor | _Receive], key: tuple[int, int]
    ) -> Tensor:
        """Return a message, waiting for it if it comes from another rank."""
        message = received.pop(key)
        if isinstance(message, Tensor):
            return message
        with self._recorded(message.action):
            try:
                message.work.wait()
            except Exception as error:
                error.add_note(
                    f"while waiting for {message.action} from pipeline rank {message.peer} "
                    f"(rank {self._group.ranks[message.peer]})"
                )
                raise
        self._sent.finish(message.peer, message.acknowledged)
        return message.tensor

    def _recorded(self, action: Action) -> AbstractContextManager[None]:
        return self._recorder.record(action) if self._recorder is not None else nullcontext()

    def _describe(self, action: Action) -> str:
        program = self._track.program
        return (
            f"in pipeline action {action} ({_KIND_WORDS[action.kind]}, stage {action.stage}, "
            f"microbatch {action.microbatch}) on pipeline rank {program.rank}, "
            f"step {self._track.machine.position} of {len(program)}"
        )

    def _require_nothing_left(self) -> None:
        for name in ("_inputs", "_output_grads", "_saved", "_outgoing"):
            if getattr(self, name):
                raise RuntimeError(f"megacore bug: {name} holds {list(getattr(self, name))}")


def _tag(receiver: int, *, forward: bool) -> int:
    """Each stage's inputs and output gradients have a tag of their own."""
    return 2 * receiver + (0 if forward else 1)


def _require_loss(output: Tensor) -> None:
    if output.numel() != 1 or not output.is_floating_point():
        raise ValueError(
            f"the last stage returned {list(output.shape)} {output.dtype}; there, forward_step "
            "must return the scalar loss of the microbatch"
        )
