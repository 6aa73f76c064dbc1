"""Diagnosis of a run that does not respond, from the calls that its ranks have recorded.

A rank waits in a call until all members of the call's group have made it too. Followed from rank to
rank, the waits end at the cause: a rank that has ended, that is stopped, that still computes, or
that is in another call than its group.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from megacore.calls.processes import is_dead, local_state
from megacore.calls.records import (
    DONE,
    ENDED,
    FAILED,
    ON_DEVICE,
    STARTED,
    CallRecord,
    RankCalls,
    Stream,
    last_serial,
    read_rings,
    select,
)
from megacore.errors import printable
from megatrain.hang.flight import dump_prefix, read_dumps

STOPPED = "its process is stopped by a signal"
LEFT_OUT = "left a call out or makes its calls in another order"

_CONTEXT = 32  # calls before a call by which its earlier occurrences are found
_LOOK_BACK = 64  # last calls of a rank among which a deviation is searched
_LAST = 2  # calls among which a failed one ended the rank
_SHOWN = 8
_SHOWN_WAITS = 12

T = TypeVar("T")

Cause = Literal["shape", "order", "ended", "stopped", "slow", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause of a hang.

    Attributes:
        cause: ``shape`` or dtype differs; ``order``: a call left out, or made in another order;
            ``ended``: the process is gone; ``stopped`` by a signal; ``slow``: it computes, and has
            not come to the call yet; ``unknown``: it recorded nothing that can be read here.
        ranks: The ranks that cause it.
        text: One sentence.
    """

    cause: Cause
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A call that a rank has not completed.

    Attributes:
        rank: The rank that waits.
        call: Its call.
        missing: Members that have not made the call, of those whose calls can be read.
    """

    rank: int
    call: CallRecord
    missing: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Causes of a hang, and which ranks wait.

    Attributes:
        findings: The causes; empty if no rank waits for another.
        waits: All waits.
        num_read: Ranks whose calls could be read.
        world_size: Ranks of the run.
    """

    findings: tuple[Finding, ...]
    waits: tuple[Wait, ...]
    num_read: int
    world_size: int

    def __str__(self) -> str:
        lines = [finding.text for finding in _few(self.findings)]
        if len(self.findings) > _SHOWN:
            lines.append(f"and {len(self.findings) - _SHOWN} other ranks")
        streams = _Streams()
        by_call: dict[Any, list[Wait]] = defaultdict(list)
        for wait in self.waits:
            whom = len(wait.missing), wait.missing[:_SHOWN]
            by_call[streams.key(wait.call), wait.call.what, whom].append(wait)
        for same in list(by_call.values())[:_SHOWN_WAITS]:
            call, missing, ranks = same[0].call, same[0].missing, [wait.rank for wait in same]
            for_whom = f" for {_ranks(missing)}" if missing else ""
            since = time.strftime("%H:%M:%S", time.localtime(call.time_s))
            lines.append(f"{_ranks(ranks)} waited since {since} in {call}{for_whom}")
        if len(by_call) > _SHOWN_WAITS:
            lines.append(f"and {len(by_call) - _SHOWN_WAITS} other calls")
        if self.num_read < self.world_size:
            lines.append(f"the calls of {self.num_read} of {self.world_size} ranks could be read")
        return printable("\n".join(lines))


def diagnose(rings: Sequence[RankCalls]) -> Diagnosis:
    """Compare the calls of ranks."""
    return _Comparison(rings).diagnose()


def diagnosis_of_run(run_dir: Path, *, dumps: Path | None = None) -> Diagnosis | None:
    """Read and compare the calls of a run's ranks; ``None`` if none can be read.

    If the rings show no cause, dumps of torch's flight recorder are compared, which see the end of
    NCCL's collectives, and those that the rings lack.

    Args:
        run_dir: Folder of the run.
        dumps: Path of the dumps without the ranks at their ends; default: in the run's folder.
    """
    rings = read_rings(run_dir)
    found = diagnose(rings) if rings else None
    if found is None or not found.findings:
        by_torch = diagnose(read_dumps(dumps or dump_prefix(run_dir), rings))
        if found is None:
            return by_torch if by_torch.num_read else None
        # Dumps of fewer ranks than there are rings know less, but for a cause that they show.
        is_known = any(finding.cause != "unknown" for finding in by_torch.findings)
        if is_known or (by_torch.findings and by_torch.num_read >= found.num_read):
            return by_torch
    return found


class _Streams:
    """Numbers of streams: a stream holds all ranks of its group, and hashing these takes long."""

    def __init__(self) -> None:
        self._numbers: dict[Stream, int] = {}
        self._of_objects: dict[int, tuple[int, Stream]] = {}  # held, so that no id is used again

    def number(self, stream: Stream) -> int:
        found = self._of_objects.get(id(stream))
        if found is None:
            found = self._numbers.setdefault(stream, len(self._numbers)), stream
            self._of_objects[id(stream)] = found
        return found[0]

    def key(self, call: CallRecord) -> tuple[int, int]:
        """Return what is equal for one call of all its members."""
        return self.number(call.stream), call.number

    def identity(self, call: CallRecord) -> tuple[int, str, str]:
        """Return what is equal for the same call of different steps."""
        return self.number(call.stream), call.kind, call.site


class _Comparison:
    """The calls of all ranks, by rank and by stream."""

    def __init__(self, rings: Sequence[RankCalls]) -> None:
        self._rings = {calls.identity.rank: calls for calls in rings}
        self._world_size = max((calls.world_size for calls in rings), default=0)
        self._streams = streams = _Streams()
        # The records of all ranks would fill the memory. They are read twice: for the calls that
        # ranks may wait in, and for the same calls of the other members.
        self._unfinished = {
            rank: select(calls.records, _is_unfinished) for rank, calls in self._rings.items()
        }
        wanted = {streams.key(record) for found in self._unfinished.values() for record in found}
        self._records = {
            (rank, streams.key(record)): record
            for rank, calls in self._rings.items()
            for record in select(
                calls.records,
                lambda stream, number, _: (streams.number(stream), number) in wanted,
            )
            if record.kind != "reuse"
        }
        self._counts = {
            rank: {streams.number(stream): count for stream, count in calls.counts.items()}
            for rank, calls in self._rings.items()
        }
        self._missing_members: dict[tuple[tuple[int, int], bool], tuple[int, ...]] = {}
        # Each question about the past of a rank decodes its file once.
        self._records_of = lru_cache(maxsize=2)(self._read_records)
        self._history = lru_cache(maxsize=64)(self._read_history)
        self._deviations: dict[tuple[tuple[int, ...], int | None], int | None] = {}

    def diagnose(self) -> Diagnosis:
        waits = [wait for rank in self._rings for wait in self._waits_of(rank)]
        one_per_call = self._one_per_call(waits)
        findings = self._mismatches(one_per_call) or self._roots(waits, one_per_call)
        return Diagnosis(
            findings=tuple(findings),
            waits=tuple(waits),
            num_read=len(self._rings),
            world_size=self._world_size,
        )

    def _one_per_call(self, waits: Sequence[Wait]) -> list[Wait]:
        """Keep the first wait of each call: all wait for the same members, except in a reuse."""
        found: dict[Any, Wait] = {}
        for wait in waits:
            rank = wait.rank if wait.call.kind == "reuse" else None
            found.setdefault((self._streams.key(wait.call), rank), wait)
        return list(found.values())

    def _waits_of(self, rank: int) -> list[Wait]:
        waits = []
        for record in self._unfinished[rank]:
            started = record.state == STARTED or (
                record.state == FAILED
                and last_serial(self._rings[rank].records) - record.serial < _LAST
            )
            if not started and record.state != ON_DEVICE:
                continue
            missing = self._missing(rank, record)
            if started or missing:
                waits.append(Wait(rank=rank, call=record, missing=missing))
        # Of the calls that wait on the device, the first one blocks the others.
        return [wait for wait in waits if wait.call.state != ON_DEVICE] or waits[:1]

    def _missing(self, rank: int, call: CallRecord) -> tuple[int, ...]:
        """List the members that have not made a call, or have not finished it if it is a reuse."""
        is_reuse = call.kind == "reuse"
        key = self._streams.key(call), is_reuse
        if key not in self._missing_members:
            self._missing_members[key] = tuple(
                member for member in call.members if self._lacks(member, key[0], is_reuse=is_reuse)
            )
        missing = self._missing_members[key]
        return tuple(member for member in missing if member != rank) if is_reuse else missing

    def _lacks(self, member: int, call: tuple[int, int], *, is_reuse: bool) -> bool:
        if member not in self._rings:
            return False
        theirs = self._records.get((member, call)) if is_reuse else None
        unfinished = theirs is not None and theirs.state != DONE
        return self._counts[member].get(call[0], 0) < call[1] or unfinished

    # ---- members in different calls --------------------------------------------------------------

    def _mismatches(self, waits: Sequence[Wait]) -> list[Finding]:
        findings = []
        for wait in sorted(waits, key=lambda wait: wait.call.number):
            if wait.call.kind == "reuse":
                continue
            key = self._streams.key(wait.call)
            calls = {
                member: record
                for member in wait.call.members
                if (record := self._records.get((member, key))) is not None
            }
            if not wait.call.kind.startswith(("send", "receive")):
                findings += self._compare(calls)
            elif len({(call.dtype, call.shape) for call in calls.values()}) > 1:
                findings.append(_shape_finding(calls, tuple(calls)))
        return findings

    def _compare(self, calls: dict[int, CallRecord]) -> list[Finding]:
        """Compare the calls that the members of a group made under the same number."""
        if len({call.what for call in calls.values()}) < 2:
            return []
        odd = self._odd_ones(calls)
        kinds = {(call.kind, call.group) for call in calls.values()}
        by_site = {(call.kind, call.group, call.site) for call in calls.values()}
        if len(kinds) == 1 and (len(by_site) == 1 or not self._deviates_any(calls)):
            return [_shape_finding(calls, odd)]
        return [self._order_finding(calls, odd)]

    def _deviates_any(self, calls: dict[int, CallRecord]) -> bool:
        others = {self._streams.identity(call): call for call in calls.values()}.values()
        return any(
            self._left_out(rank, other) is not None
            for rank, call in calls.items()
            for other in others
            if other.site != call.site
        )

    def _odd_ones(self, calls: dict[int, CallRecord]) -> tuple[int, ...]:
        """Select the ranks whose call deviates from the group's; all of them if it is unclear."""
        identity = self._streams.identity
        distinct = {identity(call): call for call in calls.values()}
        deviating = tuple(
            rank
            for rank, call in calls.items()
            if any(
                self._left_out(rank, other) is not None
                for theirs, other in distinct.items()
                if theirs != identity(call)
            )
        )
        if 0 < len(deviating) < len(calls):
            return deviating
        votes = Counter((call.what, call.site) for call in calls.values())
        if len(votes) > 1 and votes.most_common(2)[0][1] == votes.most_common(2)[1][1]:
            # A tie: the other groups of the same name, such as the other tensor-parallel groups.
            call = next(iter(calls.values()))
            votes = Counter(
                (record.what, record.site)
                for calls_of_rank in self._rings.values()
                for record in select(
                    calls_of_rank.records,
                    lambda stream, number, _: (stream[0], number) == (call.stream[0], call.number),
                )
                if record.kind != "reuse"
            )
        (usual, most), *others = votes.most_common()
        if others and others[0][1] == most:
            return tuple(self._unlike_before(calls)) or tuple(calls)
        return tuple(rank for rank, call in calls.items() if (call.what, call.site) != usual)

    def _unlike_before(self, calls: dict[int, CallRecord]) -> Iterable[int]:
        """List the ranks that made the same call with another shape in the past."""
        identity = self._streams.identity
        for rank, call in calls.items():
            own = identity(call)
            before = [
                record
                for record in self._records_of(rank)
                if record.serial < call.serial and identity(record) == own
            ]
            if before and all(record.what != call.what for record in before):
                yield rank

    def _left_out(self, rank: int, expected: CallRecord) -> CallRecord | None:
        """Find the call that a rank made where it made the expected one in earlier steps."""
        if rank not in self._rings:
            return None
        names, numbers = self._history(rank)
        # Most ranks have made the same calls as others, each in its own groups.
        key = names, numbers.get(self._streams.identity(expected))
        if key not in self._deviations:
            self._deviations[key] = _deviation(*key)
        at = self._deviations[key]
        return None if at is None else self._records_of(rank)[at]

    def _read_records(self, rank: int) -> list[CallRecord]:
        return list(self._rings[rank].records)

    def _read_history(self, rank: int) -> tuple[tuple[int, ...], dict[object, int]]:
        """Number the calls of a rank by their identities, in the order in which they appear."""
        numbers: dict[object, int] = {}
        identities = map(self._streams.identity, self._records_of(rank))
        names = tuple(numbers.setdefault(identity, len(numbers)) for identity in identities)
        return names, numbers

    def _order_finding(self, calls: dict[int, CallRecord], odd: tuple[int, ...]) -> Finding:
        if len(odd) == len(calls):
            made = "; ".join(f"rank {rank} made {call}" for rank, call in _few(calls.items()))
            text = f"the ranks of a group are in different calls: {made}"
        else:
            usual = next(call for rank, call in calls.items() if rank not in odd)
            made = "; ".join(f"{self._who(rank)} made {calls[rank]}" for rank in _few(odd))
            text = f"{made}, where its group made {usual}: it {LEFT_OUT}"
        return Finding(cause="order", ranks=odd, text=text)

    # ---- ranks that did not come -----------------------------------------------------------------

    def _roots(self, waits: Sequence[Wait], one_per_call: Sequence[Wait]) -> list[Finding]:
        """Follow the waits to ranks that do not wait, or that wait for each other."""
        waiting = {wait.rank for wait in waits}
        findings: dict[int, Finding] = {}
        for wait in one_per_call:
            for rank in wait.missing:
                if rank not in findings and (found := self._absent(rank, wait, waiting)):
                    findings[rank] = found
        if findings:
            # A rank that left a call out explains those that then wait for it elsewhere.
            gone = [each for each in findings.values() if each.cause in ("ended", "stopped")]
            order = [each for each in findings.values() if each.cause == "order"]
            return gone or order or list(findings.values())
        return (
            self._halted(one_per_call)
            or self._circles(waits, one_per_call)
            or self._unread(one_per_call)
        )

    def _halted(self, waits: Sequence[Wait]) -> list[Finding]:
        """List the ranks that have ended or are stopped inside a call that others wait in."""
        findings = []
        for rank in dict.fromkeys(rank for wait in waits for rank in wait.call.members):
            calls = self._rings.get(rank)
            if calls is None:
                continue
            end, stopped = self._end(calls), _is_stopped(calls)
            if end or stopped:
                text = f"{self._who(rank)}, {self._last_call(rank)}: {end or STOPPED}"
                cause: Cause = "ended" if end else "stopped"
                findings.append(Finding(cause=cause, ranks=(rank,), text=text))
        return findings

    def _absent(self, rank: int, wait: Wait, waiting: set[int]) -> Finding | None:
        """Explain why a rank has not made a call; ``None`` if it waits elsewhere itself."""
        calls = self._rings[rank]
        who, last = self._who(rank), self._last_call(rank)
        end = self._end(calls)
        if end:
            text = f"{who} did not come to {wait.call}: {end}; {last}"
            return Finding(cause="ended", ranks=(rank,), text=text)
        if _is_stopped(calls):
            text = f"{who} did not come to {wait.call}: {STOPPED}; {last}"
            return Finding(cause="stopped", ranks=(rank,), text=text)
        other = self._left_out(rank, wait.call)
        if other is not None:
            text = (
                f"{who} made {other} where it made {wait.call.kind} over {wait.call.group} "
                f"({wait.call.site}) before: it {LEFT_OUT}"
            )
            return Finding(cause="order", ranks=(rank,), text=text)
        if rank in waiting:
            return None
        where = f" at {calls.position}" if calls.position else ""
        text = (
            f"{who} did not come to {wait.call}: it computes or waits outside of calls{where}; "
            f"{last}"
        )
        return Finding(cause="slow", ranks=(rank,), text=text)

    def _unread(self, waits: Sequence[Wait]) -> list[Finding]:
        """Name the members of calls whose own calls are on another machine."""
        unread = {rank for wait in waits for rank in wait.call.members if rank not in self._rings}
        if not unread:
            return []
        ranks = tuple(sorted(unread))
        text = f"the cause is with {_ranks(ranks)}, whose calls cannot be read here"
        return [Finding(cause="unknown", ranks=ranks, text=text)]

    def _circles(self, waits: Sequence[Wait], one_per_call: Sequence[Wait]) -> list[Finding]:
        """Describe ranks that wait for each other in calls of different groups."""
        blamed = {rank for wait in one_per_call for rank in wait.missing}
        circle = [wait for wait in waits if wait.rank in blamed and wait.missing]
        if not circle:
            return []
        ranks = tuple(sorted({wait.rank for wait in circle}))
        parts = [
            f"rank {wait.rank} in {wait.call} for {_ranks(wait.missing)}" for wait in _few(circle)
        ]
        text = (
            f"{_ranks(ranks)} wait for each other, because one of them {LEFT_OUT}: "
            f"{'; '.join(parts)}"
        )
        return [Finding(cause="order", ranks=ranks, text=text)]

    def _end(self, calls: RankCalls) -> str:
        """Describe the end of a rank; empty if it runs or has ended because of the hang."""
        if not calls.is_copy and not calls.status and is_dead(calls.identity):
            return ENDED
        return calls.status

    def _last_call(self, rank: int) -> str:
        records = self._records_of(rank)
        return f"its last call: {records[-1]}" if records else "it has made no call"

    def _who(self, rank: int) -> str:
        calls = self._rings.get(rank)
        return str(calls.identity) if calls is not None else f"rank {rank}"


def _is_unfinished(_stream: Stream, _number: int, state: int) -> bool:
    return state in (STARTED, FAILED, ON_DEVICE)


def _deviation(names: Sequence[int], wanted: int | None) -> int | None:
    """Find the index of the call that was made where a wanted one was made before."""
    for k in range(len(names) - 1, max(0, len(names) - _LOOK_BACK), -1):
        if wanted is None or names[k] == wanted:
            return None
        before = _followers(names, k)
        if wanted in before and names[k] not in before:
            return k
    return None


def _followers(names: Sequence[int], k: int) -> set[int]:
    """Return the calls that followed the longest run of calls that also precedes call ``k``."""
    followers: set[int] = set()
    longest = 1
    for j in range(k - 1, 0, -1):
        same = 0
        while same < min(_CONTEXT, j) and names[j - 1 - same] == names[k - 1 - same]:
            same += 1
        if same > longest:
            followers, longest = set(), same
        if same == longest:
            followers.add(names[j])
    return followers


def _shape_finding(calls: dict[int, CallRecord], odd: tuple[int, ...]) -> Finding:
    shapes: dict[tuple[tuple[int, ...], str], list[int]] = defaultdict(list)
    for rank, call in calls.items():
        shapes[call.shape, call.dtype].append(rank)
    shown = "; ".join(
        f"{_ranks(ranks)} {list(shape)} {dtype}" for (shape, dtype), ranks in _few(shapes.items())
    )
    call = calls[odd[0]]
    sites = ", ".join(_few(sorted({each.site for each in calls.values()})))
    blame = f"; the exception is {_ranks(odd)}" if len(odd) < len(calls) else ""
    text = (
        f"the tensors of {call.kind} over {call.group}, number {call.number}, differ: {shown}"
        f"{blame} ({sites})"
    )
    return Finding(cause="shape", ranks=odd, text=text)


def _is_stopped(calls: RankCalls) -> bool:
    state = None if calls.is_copy else local_state(calls.identity)
    return state is not None and state.code in "Tt"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _few(items: Iterable[T]) -> list[T]:
    return list(items)[:_SHOWN]
