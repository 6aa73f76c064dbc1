"""Messages from one member of a group to another through shared memory of their host.

A channel leads from one member to another. Its messages have one shape and dtype and are received
in the order in which they were sent. The sender copies a message into one of the channel's slots in
its own memory, and the receiver copies it out: no sockets, and no thread besides the two. The
copies are not operations of torch: a transfer is not part of the computation that a graph captures,
and when a kept message is sent depends on the other rank.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore._core import HostWindow
from megacore.calls.records import DONE, ENQUEUED, STARTED
from megacore.calls.ring import Call, GroupCalls
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.host.shared_memory import meminfo
from megacore.parallel.process_groups import Group

_ALIGNMENT = 64
_RETRY_S = 0.002  # between looks for a free slot while this member waits for a message


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Messages from one member of a group to another.

    Attributes:
        receiver: Position of the receiver.
        shape: Shape of every message.
        dtype: Dtype of every message.
        depth: Number of slots: messages that the sender can be ahead of the receiver before it
            keeps further ones itself.
    """

    receiver: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    depth: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, a multiple of the alignment."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT


@dataclass(kw_only=True)
class _Line:
    """One channel as its sender or receiver sees it: its slots and the number of messages."""

    peer: int
    channel: Channel
    address: int
    first_part: int
    calls: GroupCalls | None = None
    count: int = 0

    def begin(self, kind: str, state: int) -> Call | None:
        """Record the next message."""
        if self.calls is None:
            return None
        return self.calls.begin(kind, self.channel.shape, self.channel.dtype, state)

    def current(self) -> tuple[int, int, int]:
        """Return part, address and round of the next message."""
        depth = self.channel.depth
        slot = self.count % depth
        address = self.address + slot * self.channel.slot_bytes
        return self.first_part + slot, address, self.count // depth + 1


class Mailbox:
    """The channels that begin or end at this member. Create with :meth:`open`.

    A member that has ended or left is reported by every wait for it, as by the collectives of
    ``host_memory``. One thread at a time.
    """

    def __init__(
        self,
        window: HostWindow,
        *,
        outgoing: Mapping[Hashable, _Line],
        incoming: Mapping[Hashable, _Line],
        timeout_s: float,
    ) -> None:
        self._window = window
        self._outgoing = outgoing
        self._incoming = incoming
        self._timeout_s = timeout_s
        self._unsent: dict[Hashable, deque[tuple[Tensor, Call | None]]] = {}

    @staticmethod
    def open(channels: Mapping[Hashable, Channel], group: Group) -> Mailbox | None:
        """Create the slots of all channels of a group. Collective.

        Args:
            channels: The channels that begin at this member, by a key that is unique in the group.
            group: The members.

        Returns:
            The mailbox; ``None``, on every member, if the group does not share memory, the slots
            would take more than half of the available memory, or an allocation fails.
        """
        if group.host is None:
            return None
        group.host.barrier()  # names a member that has ended
        available = meminfo().get("MemAvailable", 0)
        everyone = all_gather_objects((dict(channels), available), group)
        totals = [sum(_bytes_of(c) for c in theirs.values()) for theirs, _ in everyone]
        num_parts = sum(c.depth for theirs, _ in everyone for c in theirs.values())
        if 2 * len(totals) * max(totals) > min(free for _, free in everyone) or num_parts == 0:
            return None
        window = group.host.make_window(max(totals), num_parts=num_parts)
        if window is None:
            return None
        outgoing: dict[Hashable, _Line] = {}
        incoming: dict[Hashable, _Line] = {}
        part = 0
        for sender, (theirs, _) in enumerate(everyone):
            offset = 0
            for key, channel in theirs.items():
                if group.position in (sender, channel.receiver):
                    mine = sender == group.position
                    (outgoing if mine else incoming)[key] = _Line(
                        peer=channel.receiver if mine else sender,
                        channel=channel,
                        address=window.data_of(sender) + offset,
                        first_part=part,
                        calls=group.calls and group.calls.messages(sender, channel.receiver, key),
                    )
                part += channel.depth
                offset += _bytes_of(channel)
        return Mailbox(window, outgoing=outgoing, incoming=incoming, timeout_s=group.host.timeout_s)

    def send(self, key: Hashable, message: Tensor) -> None:
        """Send a contiguous message, without waiting for its receiver.

        If all slots are in use, the message is kept, and sent during a later call.
        """
        waiting = self._unsent.get(key)
        call = self._outgoing[key].begin("send", ENQUEUED)
        if waiting or not self._put(key, message, call):
            self._unsent.setdefault(key, deque()).append((message, call))
            self._flush()

    def receive(self, key: Hashable) -> Tensor:
        """Return a copy of the next message of a channel.

        Raises:
            RuntimeError: If the sender has ended, or sends nothing before the timeout.

        Sync:
            Waits for the message.
        """
        line = self._incoming[key]
        part, address, round_number = line.current()
        with line.begin("receive", STARTED) or nullcontext():
            self._wait_for_offer(line.peer, part, round_number)
        message = torch.empty(line.channel.shape, dtype=line.channel.dtype)
        ctypes.memmove(message.data_ptr(), address, message.nbytes)
        self._window.take_from(line.peer, part=part, round=round_number)
        line.count += 1
        return message

    def _wait_for_offer(self, peer: int, part: int, round_number: int) -> None:
        start = time.monotonic()
        while True:
            self._flush()
            # Without messages of its own to send, this member has nothing to do until then.
            gives_up = not self._unsent or time.monotonic() - start > self._timeout_s
            limit_s = math.inf if gives_up else _RETRY_S
            if self._window.wait_for_offer_of(peer, part=part, round=round_number, limit_s=limit_s):
                return

    def flush(self) -> None:
        """Wait until every message is in a slot.

        Raises:
            RuntimeError: If a receiver has ended, or takes nothing before the timeout.
        """
        while self._unsent:
            key = next(iter(self._unsent))
            _, call = self._unsent[key][0]
            if call is not None:
                call.move_to(STARTED)
            part, _, _ = self._outgoing[key].current()
            self._window.wait_for_take_by(self._outgoing[key].peer, part=part, limit_s=math.inf)
            self._flush()

    def _flush(self) -> None:
        for key in list(self._unsent):
            waiting = self._unsent[key]
            while waiting and self._put(key, *waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._unsent[key]

    def _put(self, key: Hashable, message: Tensor, call: Call | None) -> bool:
        """Copy a message into the next slot of its channel, if that is free."""
        line = self._outgoing[key]
        part, address, _ = line.current()
        if not self._window.wait_for_take_by(line.peer, part=part, limit_s=0.0):
            return False
        ctypes.memmove(address, message.data_ptr(), message.nbytes)
        self._window.offer(part)
        line.count += 1
        if call is not None:
            call.move_to(DONE)
        return True


def _bytes_of(channel: Channel) -> int:
    return channel.depth * channel.slot_bytes
