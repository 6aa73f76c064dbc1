"""Runs one pipeline rank's program on real tensors.

The executor knows no schedule. It walks a ``Program`` through the native ``StateMachine`` and has
one small handler per kind of action (``execution.py``). Sends and receives only start transfers; a
compute action waits for the message it reads, and a send is waited for only when a later message
has proved it received, or at the end. So nothing blocks that the proof of the program has not
covered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import nn

from megacore._core import ActionKind, Program
from megacore.parallel.interleave import InterleavedPair
from megacore.parallel.process_groups import Group
from megacore.pipeline.activation import (
    ActivationSpec,
    StageActivations,
    receives_for,
    uses_nccl,
)
from megacore.pipeline.agreement import require_same_schedule
from megacore.pipeline.clock import PhaseClock
from megacore.pipeline.execution import (
    BeforeBackward,
    ForwardStep,
    PreparedProgram,
    ProgramRun,
    StepLosses,
)
from megacore.pipeline.messages import Transport, connect, open_mailbox
from megacore.pipeline.recorder import ActionRecorder
from megacore.pipeline.schedule import Schedule

__all__ = [
    "ActivationSpec",
    "BeforeBackward",
    "ForwardStep",
    "PipelineExecutor",
    "StepLosses",
    "forward_backward",
]


class PipelineExecutor:
    """Executor of a program, step after step.

    Args:
        program: This rank's program.
        chunks: Model chunks of the rank, in the order of ``program.stages``; ``None`` if every
            ``run`` is passed its chunks: the executor then keeps no model alive.
        group: The pipeline's ranks; positions in it are the program's ranks.
        activation: Specification of the messages between stages; if stages differ, one entry per
            sending stage, for each stage but the last one.
        recorder: Records the start and end of every compute action and of every message wait.
        channels: Groups of two for the messages of each sender and receiver, by their positions in
            ``group`` (``ProcessGroups.create(pp_channels=True)``). NCCL needs them for a program
            with receives ahead. By default ``group`` for all.
        check_messages: Send a header before every message, and raise an error for an unexpected
            message.
            Costs a small message each, and transfers no longer overlap with compute.
        overlap_pairs: Interleave forwards and backwards that the schedule pairs
            (``Program.overlaps``): while one waits for an expert dispatch, the other computes.
        schedule: The schedule of the program. If passed on all ranks, it is compared between ranks
            before the channels are opened, by one small all-gather.
        clock: Measures waits for messages as phase ``pipeline_wait``.

    Raises:
        ValueError: If program, chunks and groups are inconsistent.
        ConfigError: On all ranks, if their schedules differ.

    Sync:
        Connects the channels: construction is collective over the pipeline's ranks, and several
        executors must be constructed in the same order on all ranks.
    """

    def __init__(
        self,
        program: Program,
        chunks: Sequence[nn.Module] | None,
        *,
        group: Group,
        activation: ActivationSpec | Mapping[int, ActivationSpec],
        recorder: ActionRecorder | None = None,
        channels: Mapping[tuple[int, int], Group] | None = None,
        check_messages: bool = False,
        overlap_pairs: bool = False,
        schedule: Schedule | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        if (program.rank, program.num_ranks) != (group.position, group.size):
            raise ValueError(
                f"the program is that of rank {program.rank} of {program.num_ranks}, but this is "
                f"position {group.position} of {group.size} in group {group.name}"
            )
        self._chunks = None if chunks is None else _by_stage(program, chunks)
        activations = StageActivations(
            activation, num_stages=program.num_stages, num_chains=program.num_chains
        )
        if not program.is_in_order and channels is None and uses_nccl(group, activations.device):
            raise ValueError(
                "NCCL runs all messages of a group in one queue, which can deadlock with "
                "receives posted ahead; use schedule.program(rank, receives='in_order'), or give "
                "each sender and receiver a group of their own (channels)"
            )
        _require_channels(program, group, channels)
        self._prepared = PreparedProgram(program)
        self._recorder = recorder
        self._clock = clock
        self._turns = InterleavedPair() if overlap_pairs else None
        if schedule is not None:
            require_same_schedule(schedule, group, device=activations.device)
        self._transport = Transport(
            group=group,
            channels=channels,
            activations=activations,
            mailbox=None if check_messages else open_mailbox(program, group, activations),
            debug=check_messages,
        )
        if self._transport.mailbox is None:
            connect(self._transport, {peer for peer in program.peers if peer >= 0})

    @cached_property
    def _forward_only(self) -> PreparedProgram:
        program = self._prepared.program
        return (
            self._prepared if program.is_forward_only else PreparedProgram(program.forward_only())
        )

    def run(
        self,
        forward_step: ForwardStep,
        *,
        forward_only: bool = False,
        before_backward: BeforeBackward | None = None,
        recorder: ActionRecorder | None = None,
        chunks: Sequence[nn.Module] | None = None,
    ) -> StepLosses:
        """Run one step over all microbatches.

        Gradients are accumulated into the parameters' ``grad`` in the order in which the schedule
        runs the backward passes.

        Args:
            forward_step: Called as ``forward_step(chunk, hidden, microbatch)`` for every forward.
                ``hidden`` is the previous stage's output, or None on the first stage. Returns the
                output, or on the last stage the scalar float32 loss of the microbatch, scaled as it
                should go into the backward pass, or ``(loss, number of tokens)``.
            forward_only: Run the forward passes only, without autograd.
            before_backward: Called as ``before_backward(stage, microbatch)`` before every action
                that adds to the gradients of parameters: a whole backward pass, or a W, and before
                an I whose W may begin in it.
            recorder: For this step, in place of the executor's own.
            chunks: Likewise the model chunks.

        Returns:
            On a rank with a last stage, its losses in microbatch order, detached, on their device,
            and in ``num_tokens`` the sum of the numbers of tokens; else an empty list.

        Raises:
            ValueError: If an output has another shape, dtype or device than announced, the program
                has no backward passes and ``forward_only`` is false, or there are no chunks.

        Errors of ``forward_step`` and of the backend are raised as they are, with a note that names
        the action. Messages of the step may still be under way then, and on gloo their channels
        break: go on with new process groups only, or let the run end.

        Sync:
            Waits for messages on gloo; on NCCL only the stream waits.
        """
        prepared = self._forward_only if forward_only else self._prepared
        if prepared.program.is_forward_only and not forward_only:
            raise ValueError(
                "the program has no backward passes; pass forward_only=True, or give the executor "
                "the program of a training schedule"
            )
        by_stage = self._chunks if chunks is None else _by_stage(prepared.program, chunks)
        if by_stage is None:
            raise ValueError("the executor was made without model chunks; give them to run")
        return ProgramRun(
            prepared,
            by_stage,
            forward_step,
            transport=self._transport,
            recorder=self._recorder if recorder is None else recorder,
            before_backward=before_backward,
            turns=self._turns,
            clock=self._clock,
        ).run()


def _require_channels(
    program: Program, group: Group, channels: Mapping[tuple[int, int], Group] | None
) -> None:
    """Raise `ValueError` unless each message of a program has a group of its two ranks."""
    if channels is None:
        return
    receives = (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD)
    for action, peer in zip(program.actions, program.peers, strict=True):
        if peer < 0:
            continue
        pair = (peer, program.rank) if action.kind in receives else (program.rank, peer)
        found = channels.get(pair)
        if found is None or set(found.ranks) != {group.ranks[position] for position in pair}:
            raise ValueError(
                f"channels must have a group of ranks {group.ranks[pair[0]]} and "
                f"{group.ranks[pair[1]]} for the messages from position {pair[0]} to {pair[1]}, "
                f"got {None if found is None else found.ranks}"
            )


def _by_stage(program: Program, chunks: Sequence[nn.Module]) -> dict[int, nn.Module]:
    given: object = chunks
    if isinstance(given, nn.Module) and not isinstance(given, nn.ModuleList):
        raise TypeError(
            f"chunks must be a sequence of modules, one per stage, got a {type(given).__name__}; "
            "give [module]"
        )
    if len(chunks) != len(program.stages):
        raise ValueError(
            f"the program of rank {program.rank} runs the {len(program.stages)} stages "
            f"{program.stages}, but {len(chunks)} model chunks were given; give one per stage"
        )
    return dict(zip(program.stages, chunks, strict=True))


def forward_backward(
    chunks: Sequence[nn.Module],
    schedule: Schedule,
    forward_step: ForwardStep,
    *,
    group: Group,
    activation: ActivationSpec | Mapping[int, ActivationSpec],
    forward_only: bool = False,
    recorder: ActionRecorder | None = None,
) -> StepLosses:
    """Run one step of a schedule; see ``PipelineExecutor`` and its ``run``.

    Keep a ``PipelineExecutor`` for more than one step: this makes a new one each time. It does not
    compare the schedules of the ranks.
    """
    executor = PipelineExecutor(
        schedule.program(group.position, receives=receives_for(group, activation)),
        chunks,
        group=group,
        activation=activation,
        recorder=recorder,
    )
    return executor.run(forward_step, forward_only=forward_only)
