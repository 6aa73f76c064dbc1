"""Diagnosis of recorded calls of many ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megacore.calls.processes import Identity
from megacore.calls.records import DONE, STARTED, CallRecord, RankCalls, Stream
from megatrain.hang.diagnosis import diagnose

STEPS = 3


class CountedRanks(tuple[int, ...]):
    """Members of a group that count how many of them were hashed."""

    hashed = 0

    def __hash__(self) -> int:
        CountedRanks.hashed += len(self)
        return super().__hash__()


def rings(num_ranks: int, *, absent: int | None, odd: int | None) -> Iterator[RankCalls]:
    """Three steps of three calls over tp and one over the world, in which all wait at the end."""
    world: Stream = "world", CountedRanks(range(num_ranks))
    for first in range(0, num_ranks, 8):
        tp: Stream = "tp", CountedRanks(range(first, first + 8))
        for rank in tp[1]:
            counts: dict[Stream, int] = {tp: 0, world: 0}
            records = []
            for number in range(4 * STEPS - (rank == absent)):
                stream = world if number % 4 == 3 else tp
                counts[stream] += 1
                is_last = number == 4 * STEPS - 1
                records.append(
                    CallRecord(
                        serial=number + 1,
                        time_s=1e9,
                        stream=stream,
                        number=counts[stream],
                        kind="broadcast" if is_last and rank == odd else "all_reduce_",
                        group=stream[0],
                        dtype="float32",
                        shape=(4,),
                        site=f"step.py:{number % 4 if not (is_last and rank == odd) else 99}",
                        state=STARTED if is_last else DONE,
                    )
                )
            yield RankCalls(
                identity=Identity(rank=rank, host="other", space="", pid=rank, start=1),
                world_size=num_ranks,
                run="a",
                since=1.0,
                counts=counts,
                records=records,
                is_copy=True,
            )


@pytest.mark.parametrize(("absent", "odd", "cause"), [(9, None, "slow"), (None, 9, "order")])
def test_work_grows_with_ranks_and_not_with_their_square(
    absent: int | None, odd: int | None, cause: str
) -> None:
    work = {}
    for num_ranks in (256, 1024):
        found = list(rings(num_ranks, absent=absent, odd=odd))
        CountedRanks.hashed = 0
        diagnosis = diagnose(found)
        text = str(diagnosis)
        work[num_ranks] = CountedRanks.hashed
        [finding] = diagnosis.findings
        assert (finding.cause, finding.ranks) == (cause, (9,))
        assert len(diagnosis.waits) == num_ranks - (absent is not None)
        assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... waited" in text
    assert work[1024] < 100 * 1024
    assert work[1024] < 5 * work[256]
