"""Trace of a pipeline step for Perfetto (ui.perfetto.dev) or chrome://tracing.

Every rank is a process with a row per stream (compute, send, receive). Every message is an arrow
from its sender's row to its receiver's row. A counter shows the activations held by a rank.

Source: the Trace Event Format of Chrome.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megacore._core import Action, ActionKind
from megacore.pipeline import Costs, Event, Schedule

_DEFAULT_COSTS = Costs()
_SHORTEST_US = 1.0  # of a message; viewers tie no arrow to a slice without length
_STREAMS = ("compute", "send", "receive")
_LANES = 1000  # thread numbers per stream, for messages of one stream that overlap in time
_CATEGORIES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward input",
    ActionKind.BACKWARD_WEIGHT: "backward weight",
}
_SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
_RECEIVES = (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD)
# Colour names of the format, so that kinds are distinguishable without a legend.
_COLOURS = {
    ActionKind.FORWARD: "thread_state_running",
    ActionKind.BACKWARD: "thread_state_iowait",
    ActionKind.BACKWARD_INPUT: "thread_state_iowait",
    ActionKind.BACKWARD_WEIGHT: "good",
}


class TracedMessage(NamedTuple):
    """Message between two ranks, in microseconds."""

    sender: int
    receiver: int
    sent: Action
    received: Action
    start_us: float
    end_us: float


def trace_document(
    actions: Iterable[Event],
    messages: Iterable[TracedMessage],
    *,
    waits: Iterable[Event] = (),
    about: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a trace as a JSON object in the Trace Event Format.

    Args:
        actions: Compute actions of all ranks, in microseconds. Actions that overlap in time, such
            as interleaved pairs, get separate rows, as do messages of one stream.
        messages: Messages between the actions.
        waits: Receives that blocked a rank; shown in the rank's compute row.
        about: Metadata stored in the file.
    """
    trace = _Trace()
    by_rank: defaultdict[int, list[Event]] = defaultdict(list)
    for action in (*actions, *waits):
        by_rank[action.rank].append(action)
    for rank, mine in by_rank.items():
        mine.sort(key=lambda action: action.start)
        trace.name_rank(rank)
        for action in mine:
            trace.add_compute(action)
        trace.add_memory(rank, [one for one in mine if one.action.kind in _CATEGORIES])
    for number, message in enumerate(sorted(messages, key=lambda message: message.start_us)):
        trace.add_message(number, message)
    trace.events.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": trace.names + trace.events,
        "displayTimeUnit": "ms",
        "otherData": dict(about or {}),
    }


@dataclass
class _Trace:
    """Builder of the events of a trace."""

    names: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    # (rank, stream) -> end of the last slice of each row.
    row_ends: defaultdict[tuple[int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def name_rank(self, rank: int) -> None:
        self._name("process_name", rank, 0, {"name": f"rank {rank}"})
        self._name("process_sort_index", rank, 0, {"sort_index": rank})
        self._row(rank, _STREAMS.index("compute"), 0.0, 0.0)

    def add_compute(self, traced: Event) -> None:
        """Add an action, or the wait for a message."""
        rank, action, start, end = traced
        tid = self._row(rank, _STREAMS.index("compute"), start, end)
        at = {"pid": rank, "tid": tid, "ts": start, "dur": end - start}
        if action.kind in _CATEGORIES:
            args = {"stage": action.stage, "microbatch": action.microbatch}
            about = {"cat": _CATEGORIES[action.kind], "cname": _COLOURS[action.kind], "args": args}
            self.events.append({"ph": "X", "name": str(action), **about, **at})
        else:
            about = {"cat": "wait", "cname": "grey", "args": {}}
            self.events.append({"ph": "X", "name": f"wait for {action}", **about, **at})

    def add_memory(self, rank: int, actions: Sequence[Event]) -> None:
        """Add a counter of held activations: from a forward until its B, or W if there is one."""
        freed = {
            (action.action.stage, action.action.microbatch)
            for action in actions
            if action.action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        }
        changes: defaultdict[float, int] = defaultdict(int)
        for action in actions:
            kind = action.action.kind
            if kind is ActionKind.FORWARD:
                changes[action.start] += 1
                if (action.action.stage, action.action.microbatch) not in freed:
                    changes[action.end] -= 1
            elif kind is not ActionKind.BACKWARD_INPUT:
                changes[action.end] -= 1
        held = 0
        for time_us, change in sorted(changes.items()):
            held += change
            counter = {"ph": "C", "name": "activations held", "pid": rank, "tid": 0}
            self.events.append({**counter, "ts": time_us, "args": {"activations": held}})

    def add_message(self, number: int, message: TracedMessage) -> None:
        start, length = message.start_us, message.end_us - message.start_us
        shown = max(length, _SHORTEST_US)
        args = {"from": message.sender, "to": message.receiver, "us": length}
        ends = (
            ("s", "send", message.sender, message.sent),
            ("f", "receive", message.receiver, message.received),
        )
        for phase, stream, rank, action in ends:
            tid = self._row(rank, _STREAMS.index(stream), start, start + shown)
            at = {"pid": rank, "tid": tid, "ts": start, "cat": "message"}
            self.events.append({"ph": "X", "name": str(action), **at, "dur": shown, "args": args})
            arrow = {"ph": phase, "name": "message", "id": number, **at}
            self.events.append({**arrow, "bp": "e"} if phase == "f" else arrow)

    def _row(self, rank: int, stream: int, start: float, end: float) -> int:
        """Find the first row of a stream that is free from ``start`` on, as a thread number."""
        ends = self.row_ends[rank, stream]
        lane = next((lane for lane, taken in enumerate(ends) if taken <= start), len(ends))
        tid = stream * _LANES + lane
        if lane == len(ends):
            ends.append(end)
            name = _STREAMS[stream] + (f" {lane + 1}" if lane else "")
            self._name("thread_name", rank, tid, {"name": name})
            self._name("thread_sort_index", rank, tid, {"sort_index": tid})
        ends[lane] = end
        return tid

    def _name(self, what: str, rank: int, tid: int, args: dict[str, Any]) -> None:
        self.names.append({"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args})


# ---- where actions and messages come from --------------------------------------------------------


def simulated_trace(
    schedule: Schedule, *, costs: Costs = _DEFAULT_COSTS, unit_us: float = 1000.0
) -> dict[str, Any]:
    """Return the trace of a simulated schedule.

    Args:
        schedule: The schedule.
        costs: Times of the actions.
        unit_us: Microseconds per unit of cost.

    Example:
        >>> from megacore.pipeline import build_schedule
        >>> schedule = build_schedule("gpipe", num_ranks=1, num_microbatches=1)
        >>> events = simulated_trace(schedule)["traceEvents"]
        >>> [(event["name"], event["dur"]) for event in events if event["ph"] == "X"]
        [('0F0', 1000.0), ('0B0', 2000.0)]
    """
    actions = [
        Event(rank, action, start * unit_us, end * unit_us)
        for rank, action, start, end in schedule.simulate(costs).events
    ]
    made_us = {(action.rank, action.action): action.end for action in actions}
    for rank in range(schedule.num_ranks):
        order = schedule.actions(rank)
        for first in schedule.overlaps(rank):  # a pair gives both its outputs at its end
            made_us[rank, order[first]] = made_us[rank, order[first + 1]]
    messages = []
    for sender, receiver, sent, received in _channels(schedule):
        start_us = made_us[sender, _compute_of(sent, made_us, sender)]
        end_us = start_us + costs.send * unit_us
        messages.append(TracedMessage(sender, receiver, sent, received, start_us, end_us))
    return trace_document(actions, messages, about={"schedule": schedule.name, "kind": "simulated"})


def measured_trace(
    schedule: Schedule, events: Iterable[Any], *, pipelines: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the trace of a measured step.

    A message lasts from the end of the action that produced it to the start of the action that
    reads it. Waiting for a message is shown in the compute row.

    Args:
        schedule: The schedule that ran.
        events: Recorded events of all ranks: ``rank``, ``action`` (text), ``start_us``, ``end_us``.
        pipelines: The ranks of each pipeline, in pipeline order.
    """
    spans: dict[tuple[int, Action], tuple[float, float]] = {}
    for event in events:
        spans[event.rank, Action.parse(event.action)] = (event.start_us, event.end_us)
    origin = min((start for start, _ in spans.values()), default=0.0)
    actions, waits = [], []
    for (rank, action), (start, end) in spans.items():
        traced = Event(rank, action, start - origin, end - origin)
        if action.kind in _CATEGORIES:
            actions.append(traced)
        elif action.kind in _RECEIVES:
            waits.append(traced)
    done = {(action.rank, action.action): action for action in actions}
    messages = []
    for ranks in pipelines:
        for sender, receiver, sent, received in _channels(schedule):
            maker = done.get((ranks[sender], _compute_of(sent, done, ranks[sender])))
            reader = done.get((ranks[receiver], _compute_of(received, done, ranks[receiver])))
            if maker is not None and reader is not None:
                start_us, end_us = maker.end, max(reader.start, maker.end)
                message = (ranks[sender], ranks[receiver], sent, received, start_us, end_us)
                messages.append(TracedMessage(*message))
    about = {"schedule": schedule.name, "kind": "measured"}
    return trace_document(actions, messages, waits=waits, about=about)


def _channels(schedule: Schedule) -> list[tuple[int, int, Action, Action]]:
    """List every message: sender, receiver, and the action on both sides.

    The messages of a channel are received in the order of their sends.
    """
    sends: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank in range(schedule.num_ranks):
        program = schedule.program(rank)
        for action, peer in zip(program.actions, program.peers, strict=True):
            if action.kind in _SENDS:
                sends[rank, peer].append(action)
            elif action.kind in _RECEIVES:
                receives[peer, rank].append(action)
    return [
        (sender, receiver, sent, received)
        for (sender, receiver), channel in sends.items()
        for sent, received in zip(channel, receives[sender, receiver], strict=True)
    ]


def _compute_of(message: Action, done: Mapping[tuple[int, Action], Any], rank: int) -> Action:
    """Find the action that makes what is sent or reads what is received: F, or the B or I that ran.

    Args:
        message: A send or receive.
        done: Actions that ran, by rank and action.
        rank: Rank of the message.
    """
    if message.kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD):
        return Action(message.stage, ActionKind.FORWARD, message.microbatch)
    kinds = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    whole, half = (Action(message.stage, kind, message.microbatch) for kind in kinds)
    return whole if (rank, whole) in done else half
