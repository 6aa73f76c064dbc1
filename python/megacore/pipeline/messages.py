"""The messages of one step between the ranks of a pipeline.

Sends and receives only start transfers. Each message is kept alive until it is known to have been
received. The action that reads a received message waits for it. Ranks of one host exchange CPU
tensors through a mailbox in shared memory, all others through the backend of their group.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megacore import host_values
from megacore._core import Action, ActionKind, Program
from megacore.parallel.async_collectives import is_capturing
from megacore.parallel.collectives import Message, irecv, isend
from megacore.parallel.host.mailbox import Channel, Mailbox
from megacore.parallel.process_groups import Group
from megacore.pipeline.activation import ActivationSpec, StageActivations

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 8


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Process groups and specifications of the messages of a pipeline.

    Attributes:
        group: The pipeline's ranks; their messages, without ``channels``.
        channels: Groups of two for the messages of each sender and receiver, by their positions.
        activations: Output specification of each stage.
        mailbox: Shared memory for all messages; ``None``: the groups' backend sends them.
        debug: Send a header before each message, and check it on receipt.

    Raises:
        ValueError: If a header cannot describe the messages.
    """

    group: Group
    channels: Mapping[tuple[int, int], Group] | None = None
    activations: StageActivations
    mailbox: Mailbox | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if a header cannot describe the messages, in debug mode."""
        for spec in self.activations.specs if self.debug else ():
            if len(spec.shape) > _MAX_DIMS or spec.dtype not in _DTYPES:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
                raise ValueError(
                    f"stages exchange {list(spec.shape)} {spec.dtype}, but checked messages have "
                    f"up to {_MAX_DIMS} dimensions and one of the dtypes {names}; leave "
                    "check_messages out"
                )

    def channel(self, *, sender: int, receiver: int) -> tuple[Group, int]:
        """Return the group in which one rank sends to another, and the other end's position."""
        if self.channels is None:
            return self.group, receiver if sender == self.group.position else sender
        pair = self.channels[sender, receiver]
        return pair, 1 - pair.position

    def start_step(self) -> Messages:
        """Return the sends and receives of one step."""
        return BackendMessages(self) if self.mailbox is None else MailboxMessages(self)


@dataclass(kw_only=True)
class Incoming:
    """Receive in flight.

    Attributes:
        action: The receive.
        peer: Position of the sender.
    """

    action: Action
    peer: int


class Messages(Protocol):
    """Sends and receives of one rank in one step."""

    def send(self, action: Action, peer: int, message: Tensor) -> None:
        """Start sending the message of an action."""

    def receive(self, action: Action, peer: int, acknowledged: int) -> Incoming:
        """Start receiving the message of an action.

        Args:
            action: The receive.
            peer: Position of the sender.
            acknowledged: Sends to the peer that the message's arrival proves received.
        """

    def wait(self, incoming: Incoming) -> Tensor:
        """Wait for a message."""

    def finish_all(self) -> None:
        """Wait until the backend needs no message of this rank any more."""


class MailboxMessages:
    """Messages through shared memory."""

    def __init__(self, transport: Transport) -> None:
        assert transport.mailbox is not None
        self._mailbox = transport.mailbox
        self._transport = transport

    def send(self, action: Action, peer: int, message: Tensor) -> None:
        """See `Messages`."""
        forward = action.kind == ActionKind.SEND_FORWARD
        receiver = action.stage + (1 if forward else -1)
        self._transport.activations.of_message(receiver, forward=forward).require(
            message, "the message"
        )
        with _about_peer(self._transport, action, peer):
            self._mailbox.send((receiver, forward), message)

    def receive(self, action: Action, peer: int, acknowledged: int) -> Incoming:  # noqa: ARG002
        """See `Messages`."""
        return Incoming(action=action, peer=peer)

    def wait(self, incoming: Incoming) -> Tensor:
        """See `Messages`."""
        forward = incoming.action.kind == ActionKind.RECV_FORWARD
        with _about_peer(self._transport, incoming.action, incoming.peer):
            return self._mailbox.receive((incoming.action.stage, forward))

    def finish_all(self) -> None:
        """See `Messages`."""
        self._mailbox.flush()


@dataclass(kw_only=True)
class _Transfer(Incoming):
    """Receive in flight through a backend.

    Attributes:
        acknowledged: Sends to the peer that the message's arrival proves received.
        tensor: Receive buffer.
        work: The transfer; in debug mode first that of the header.
        header: The header in flight, in debug mode.
    """

    acknowledged: int
    tensor: Tensor
    work: Message
    header: Tensor | None


class BackendMessages:
    """Messages through the backend of the groups."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._position = transport.group.position
        self._waiting: dict[int, deque[tuple[list[Message], list[Tensor]]]] = defaultdict(deque)
        self._num_done: dict[int, int] = defaultdict(int)
        # In debug mode: messages whose header was not looked at yet, and how many were.
        self._unseen: dict[int, deque[_Transfer]] = defaultdict(deque)
        self._num_seen: dict[int, int] = defaultdict(int)

    def send(self, action: Action, peer: int, message: Tensor) -> None:
        """Start sending the message of an action."""
        transport = self._transport
        forward = action.kind == ActionKind.SEND_FORWARD
        receiver = action.stage + (1 if forward else -1)
        spec = transport.activations.of_message(receiver, forward=forward)
        spec.require(message, "the message")
        group, position = transport.channel(sender=self._position, receiver=peer)
        tensors = [message]
        if transport.debug:
            number = self._num_done[peer] + len(self._waiting[peer])
            words = _header(receiver, action.microbatch, forward, number, spec)
            tensors = [torch.tensor(words).to(spec.device), message]
        tags = _tags(receiver, forward=forward, debug=transport.debug)[-len(tensors) :]
        works = [
            isend(tensor, group, to_position=position, tag=tag)
            for tensor, tag in zip(tensors, tags, strict=True)
        ]
        waiting = self._waiting[peer]
        waiting.append((works, tensors))
        while waiting and not is_capturing() and all(w.is_completed() for w in waiting[0][0]):
            self._finish(peer, self._num_done[peer] + 1)

    def receive(self, action: Action, peer: int, acknowledged: int) -> Incoming:
        """Start receiving the message of an action."""
        transport = self._transport
        forward = action.kind == ActionKind.RECV_FORWARD
        spec = transport.activations.of_message(action.stage, forward=forward)
        tensor, header = spec.empty(), None
        group, position = transport.channel(sender=peer, receiver=self._position)
        tags = _tags(action.stage, forward=forward, debug=transport.debug)
        if transport.debug:
            # The message itself is received once its header is known to be right: a message of
            # another size would end the process.
            header = torch.empty(5 + _MAX_DIMS, dtype=torch.int64, device=spec.device)
        work = irecv(
            tensor if header is None else header,
            group,
            from_position=position,
            tag=tags[-1] if header is None else tags[0],
        )
        incoming = _Transfer(
            action=action,
            peer=peer,
            acknowledged=acknowledged,
            tensor=tensor,
            work=work,
            header=header,
        )
        if header is not None:
            self._unseen[peer].append(incoming)
        return incoming

    def wait(self, incoming: Incoming) -> Tensor:
        """Wait for a message, and release sent messages that its arrival acknowledges."""
        assert isinstance(incoming, _Transfer)
        with _about_peer(self._transport, incoming.action, incoming.peer):
            while incoming.header is not None:
                self._see_next(incoming.peer)
            incoming.work.wait()
        self._finish(incoming.peer, incoming.acknowledged)
        return incoming.tensor

    def finish_all(self) -> None:
        """Wait until all sends are done."""
        for peer, messages in self._waiting.items():
            self._finish(peer, self._num_done[peer] + len(messages))

    def _finish(self, peer: int, count: int) -> None:
        """Wait for the first ``count`` messages of this step to a peer and let them go."""
        while self._num_done[peer] < count:
            works, _ = self._waiting[peer].popleft()
            for work in works:
                work.wait()
            self._num_done[peer] += 1

    def _see_next(self, peer: int) -> None:
        """Check the header of the next message from a peer, and start to receive the message."""
        incoming = self._unseen[peer].popleft()
        forward = incoming.action.kind == ActionKind.RECV_FORWARD
        stage, microbatch = incoming.action.stage, incoming.action.microbatch
        spec = self._transport.activations.of_message(stage, forward=forward)
        expected = _header(stage, microbatch, forward, self._num_seen[peer], spec)
        incoming.work.wait()
        assert incoming.header is not None
        sent = host_values.read(incoming.header, "header of a message", assumed=lambda: expected)
        if sent != expected:
            raise RuntimeError(
                f"pipeline rank {self._position} expected {_describe(expected)}, but pipeline rank "
                f"{peer} sent {_describe(sent)}; the two ranks run programs that do not belong "
                "together"
            )
        self._num_seen[peer] += 1
        group, position = self._transport.channel(sender=peer, receiver=self._position)
        tag = _tags(stage, forward=forward, debug=True)[-1]
        incoming.work = irecv(incoming.tensor, group, from_position=position, tag=tag)
        incoming.header = None


@contextmanager
def _about_peer(transport: Transport, action: Action, peer: int) -> Iterator[None]:
    """Add a note with the peer to errors."""
    try:
        yield
    except Exception as error:
        rank = transport.group.ranks[peer]
        receives = action.kind in (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD)
        what = "waiting for" if receives else "in"
        direction = "from" if receives else "to"
        error.add_note(f"while {what} {action} {direction} pipeline rank {peer} (rank {rank})")
        raise


def open_mailbox(program: Program, group: Group, activations: StageActivations) -> Mailbox | None:
    """Create shared memory for the messages of a program. Collective over a pipeline's ranks.

    Returns:
        The mailbox; ``None``, on all ranks, if they do not share memory.
    """
    if activations.device.type != "cpu" or group.host is None:
        return None
    counts = Counter(
        (action.stage + (1 if action.kind == ActionKind.SEND_FORWARD else -1), action.kind, peer)
        for action, peer in zip(program.actions, program.peers, strict=True)
        if action.kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
    )
    channels: dict[Hashable, Channel] = {}
    for (receiver, kind, peer), count in counts.items():
        forward = kind == ActionKind.SEND_FORWARD
        spec = activations.of_message(receiver, forward=forward)
        channels[receiver, forward] = Channel(
            receiver=peer, shape=spec.shape, dtype=spec.dtype, depth=min(count, 2 * group.size)
        )
    return Mailbox.open(channels, group)


def connect(transport: Transport, peers: set[int]) -> None:
    """Exchange a word with each peer in both directions. Collective over all ranks of a pipeline.

    NCCL, and gloo if told to, connect two ranks at their first message, and both of them block
    until they are connected: even where a program only starts a transfer. Here all ranks do so in
    one order, so that the messages of a step find every channel open.

    Args:
        transport: The groups.
        peers: Positions that this rank exchanges messages with.
    """
    mine = transport.group.position
    for low, high in sorted((min(mine, peer), max(mine, peer)) for peer in peers):
        for sender, receiver in ((low, high), (high, low)):
            try:
                _exchange_word(transport, sender, receiver)
            except Exception as error:
                peer = sender + receiver - mine
                rank = transport.group.ranks[peer]
                error.add_note(f"while opening the channel to pipeline rank {peer} (rank {rank})")
                raise


def _exchange_word(transport: Transport, sender: int, receiver: int) -> None:
    group, position = transport.channel(sender=sender, receiver=receiver)
    word = torch.zeros(1, device=transport.activations.device)
    if sender == transport.group.position:
        isend(word, group, to_position=position, tag=0).wait()
    else:
        irecv(word, group, from_position=position, tag=0).wait()


def _tags(receiver: int, *, forward: bool, debug: bool) -> tuple[int, ...]:
    """Each stage's inputs and output gradients have a tag of their own.

    In debug mode all headers have one tag and all messages another: then they come in the order in
    which they were sent, right or wrong.
    """
    return (0, 1) if debug else (2 * receiver + (0 if forward else 1),)


def _header(
    stage: int, microbatch: int, forward: bool, number: int, spec: ActivationSpec
) -> list[int]:
    shape = [*spec.shape, *[-1] * (_MAX_DIMS - len(spec.shape))]
    dtype = _DTYPES.index(spec.dtype)
    return [number, stage, microbatch, int(forward), dtype, *shape]


def _describe(header: list[int]) -> str:
    number, stage, microbatch, forward, dtype, *shape = header
    action = Action(
        stage, ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD, microbatch
    )
    what = f"input of stage {stage}" if forward else f"gradient of the output of stage {stage}"
    sizes = [size for size in shape if size >= 0]
    return f"message {number}, {action} ({what}, microbatch {microbatch}, {sizes} {_DTYPES[dtype]})"
