"""Programs run on a model of each transport, apart from the proof in C++.

On a rank, the transfers of one queue happen one after the other; a transfer needs the heads of the
queues at both its ends. Which transfers share a queue is what transports differ in.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest

from megacore.pipeline import (
    Action,
    ActionKind,
    Program,
    Schedule,
    build_schedule,
    schedule_catalog,
)

# Of the queues on a rank: one per group and direction where torch has bound NCCL's groups to a
# device, one per pair and direction with a group for each, one per message without any limit.
Transport = Literal["rank", "direction", "pair", "message"]
Message = tuple[bool, int, int]  # forward or not, reading stage, microbatch

SENDS = {ActionKind.SEND_FORWARD: True, ActionKind.SEND_BACKWARD: False}
RECEIVES = {ActionKind.RECV_FORWARD: True, ActionKind.RECV_BACKWARD: False}
SECONDS = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.BACKWARD_INPUT: 1.0,
    ActionKind.BACKWARD_WEIGHT: 1.0,
}


@dataclass
class Queue:
    waiting: deque[tuple[Message, float]] = field(default_factory=deque)
    free_at: float = 0.0


class Run:
    """All ranks of a pipeline; ``seconds`` of the step, or ``None`` if they hang."""

    def __init__(self, programs: Sequence[Program], transport: Transport, transfer_s: float = 0.0):
        self.programs, self.transport, self.transfer_s = programs, transport, transfer_s
        self.position = [0] * len(programs)
        self.clock = [0.0] * len(programs)
        self.actions = [program.actions for program in programs]
        self.queues: list[dict[Hashable, Queue]] = [defaultdict(Queue) for _ in programs]
        self.ends: dict[Message, tuple[int, int]] = {}
        self.arrived: dict[Message, float] = {}
        for rank, program in enumerate(programs):
            for action, peer in zip(program.actions, program.peers, strict=True):
                if action.kind in SENDS:
                    self.ends[message_of(action)] = rank, peer

    def seconds(self) -> float | None:
        active = list(range(len(self.programs)))
        while active:
            rank = active.pop()
            self._advance(rank)
            active += self._transfer(rank)
        is_done = all(p == len(q) for p, q in zip(self.position, self.programs, strict=True))
        return max(self.clock) if is_done and len(self.arrived) == len(self.ends) else None

    def _advance(self, rank: int) -> None:
        """Go on to the first action whose message is missing."""
        actions = self.actions[rank]
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            if action.kind in SENDS or action.kind in RECEIVES:
                message = message_of(action)
                self._queue(rank, message).waiting.append((message, self.clock[rank]))
            else:
                read = action.kind == ActionKind.FORWARD, action.stage, action.microbatch
                if read in self.ends and action.kind != ActionKind.BACKWARD_WEIGHT:
                    if read not in self.arrived:
                        return
                    self.clock[rank] = max(self.clock[rank], self.arrived[read])
                self.clock[rank] += SECONDS[action.kind]
            self.position[rank] += 1

    def _transfer(self, rank: int) -> set[int]:
        """Do the transfers that are at the heads of queues of a rank; return their ends."""
        ends = set()
        for queue in self.queues[rank].values():
            while queue.waiting:
                message, posted = queue.waiting[0]
                sender, receiver = self.ends[message]
                other = self._queue(sender + receiver - rank, message)
                if not other.waiting or other.waiting[0][0] != message:
                    break
                start = max(posted, other.waiting[0][1], queue.free_at, other.free_at)
                queue.free_at = other.free_at = start + self.transfer_s
                self.arrived[message] = start + self.transfer_s
                queue.waiting.popleft()
                other.waiting.popleft()
                ends |= {sender, receiver}
        return ends

    def _queue(self, rank: int, message: Message) -> Queue:
        sender, receiver = self.ends[message]
        key: dict[Transport, Hashable] = {
            "rank": 0,
            "direction": sender < receiver,
            "pair": (sender, receiver),
            "message": message,
        }
        return self.queues[rank][key[self.transport]]


def message_of(action: Action) -> Message:
    if action.kind in RECEIVES:
        return RECEIVES[action.kind], action.stage, action.microbatch
    forward = SENDS[action.kind]
    return forward, action.stage + (1 if forward else -1), action.microbatch


def schedules(num_ranks: int) -> list[Schedule]:
    """Return all schedules of the catalog at some numbers of microbatches."""
    found = []
    for info in schedule_catalog():
        for num_microbatches in (num_ranks, 2 * num_ranks, 2 * num_ranks + 1):
            try:
                schedule = build_schedule(
                    info.name, num_ranks=num_ranks, num_microbatches=num_microbatches
                )
            except ValueError:  # not at this size
                continue
            if schedule.num_ranks == num_ranks:
                found.append(schedule)
    return found


def programs_of(schedule: Schedule, receives: Literal["ahead", "in_order"]) -> list[Program]:
    return [schedule.program(rank, receives=receives) for rank in range(schedule.num_ranks)]


@pytest.mark.parametrize("num_ranks", range(2, 17))
def test_every_schedule_ends_on_the_transports_that_its_program_is_for(num_ranks: int) -> None:
    found = schedules(num_ranks)
    assert len({schedule.name for schedule in found}) > 8
    for schedule in found:
        assert Run(programs_of(schedule, "ahead"), "pair").seconds() is not None, schedule
        in_order = programs_of(schedule, "in_order")
        for transport in ("rank", "direction", "pair"):
            assert Run(in_order, transport).seconds() is not None, (schedule, transport)


def test_a_group_per_direction_is_not_enough_for_receives_ahead() -> None:
    schedule = build_schedule("interleaved_1f1b", num_ranks=3, num_chunks=2, num_microbatches=9)
    hang = [
        name
        for name in ("interleaved_1f1b", "interleaved_zb")
        for num in (6, 9, 12)
        if Run(
            programs_of(
                build_schedule(name, num_ranks=3, num_chunks=2, num_microbatches=num), "ahead"
            ),
            "direction",
        ).seconds()
        is None
    ]
    assert hang, schedule


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("transfer_s", [0.02, 0.1])
def test_queues_of_pairs_take_as_long_as_separate_ones(
    name: str, num_ranks: int, transfer_s: float
) -> None:
    num_chunks = 2 if name == "interleaved_1f1b" else None
    schedule = build_schedule(
        name, num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=4 * num_ranks
    )
    ahead, in_order = programs_of(schedule, "ahead"), programs_of(schedule, "in_order")
    separate = Run(ahead, "message", transfer_s).seconds()
    pairs = Run(ahead, "pair", transfer_s).seconds()
    ordered = Run(in_order, "rank", transfer_s).seconds()
    assert separate is not None
    assert pairs is not None
    assert ordered is not None
    assert pairs <= 1.01 * separate
    assert ordered > pairs


def shuffled(program: Program, rng: random.Random) -> list[Action]:
    """Return the actions of a program, some sends and receives elsewhere."""
    actions = list(program.actions)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(actions))
        if actions[at].kind in SENDS or actions[at].kind in RECEIVES:
            action = actions.pop(at)
            actions.insert(min(len(actions), max(0, at + rng.randint(-3, 3))), action)
    return actions


def test_random_programs_are_accepted_only_if_they_end() -> None:
    rng = random.Random(0)
    accepted = refused = 0
    for _ in range(10_000):
        num_ranks = rng.choice([2, 3, 4])
        name = rng.choice(["1f1b", "interleaved_1f1b", "zb_h1"])
        schedule = build_schedule(
            name,
            num_ranks=num_ranks,
            num_microbatches=rng.choice([1, 2]) * num_ranks,
            num_chunks=2 if name == "interleaved_1f1b" else None,
        )
        rows = [shuffled(program, rng) for program in programs_of(schedule, "ahead")]
        try:
            programs = schedule.programs_from(rows)
        except ValueError as error:
            refused += "deadlock" in str(error)
            continue
        accepted += 1
        assert Run(programs, "pair").seconds() is not None, rows
    assert accepted > 1000
    assert refused > 10
