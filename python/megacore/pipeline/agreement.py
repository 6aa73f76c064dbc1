"""Check that all ranks of a pipeline have the same schedule."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from megacore import host_values
from megacore.errors import ConfigError
from megacore.parallel.collectives import all_gather
from megacore.parallel.process_groups import Group
from megacore.pipeline.schedule import Schedule

_NAME_WORDS = 4
_WORD_BYTES = 8


class _Fingerprint(NamedTuple):
    """A schedule in a few numbers; all but the name are compared."""

    name: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    digest: int

    @classmethod
    def of(cls, schedule: Schedule) -> _Fingerprint:
        return cls(
            name=schedule.name,
            num_ranks=schedule.num_ranks,
            num_chunks=schedule.num_chunks,
            num_microbatches=schedule.num_microbatches,
            digest=schedule.digest(),
        )

    def to_words(self) -> list[int]:
        num_bytes = _NAME_WORDS * _WORD_BYTES
        name = self.name.encode()[:num_bytes].ljust(num_bytes, b"\0")
        starts = range(0, num_bytes, _WORD_BYTES)
        return [*self[1:], *(_number(name[start : start + _WORD_BYTES]) for start in starts)]

    @classmethod
    def from_words(cls, words: list[int]) -> _Fingerprint:
        numbers = words[:-_NAME_WORDS]
        name = b"".join(
            word.to_bytes(_WORD_BYTES, "little", signed=True) for word in words[-_NAME_WORDS:]
        )
        return cls(name.rstrip(b"\0").decode(errors="ignore"), *numbers)

    def describe(self) -> str:
        chunks = "1 chunk" if self.num_chunks == 1 else f"{self.num_chunks} chunks"
        many = "" if self.num_microbatches == 1 else "es"
        return (
            f"{self.name} with {self.num_ranks} ranks, {chunks}, "
            f"{self.num_microbatches} microbatch{many}"
        )


def require_same_schedule(schedule: Schedule, group: Group, *, device: torch.device) -> None:
    """Compare the schedules of all ranks of a pipeline, by one small all-gather.

    Args:
        schedule: This rank's.
        group: The pipeline's ranks.
        device: Where the group's messages live.

    Raises:
        ConfigError: On every rank, if they differ.

    Sync:
        Waits for all ranks.
    """
    if group.size == 1:
        return
    words = _Fingerprint.of(schedule).to_words()
    mine = torch.tensor(words, dtype=torch.int64, device=device)
    of_all = mine.new_empty(group.size * mine.numel())
    try:
        all_gather(of_all, mine, group)
        rows = host_values.read(
            of_all.view(group.size, -1),
            "schedules of a pipeline",
            assumed=lambda: [words] * group.size,
        )
    except Exception as error:
        error.add_note("while comparing the schedules of the ranks of the pipeline")
        raise
    ranks_of: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, row in zip(group.ranks, rows, strict=True):
        ranks_of[tuple(row[:-_NAME_WORDS])].append(rank)
    if len(ranks_of) > 1:
        by_rank = dict(zip(group.ranks, map(_Fingerprint.from_words, rows), strict=True))
        raise ConfigError(_difference(group, [(by_rank[r[0]], r) for r in ranks_of.values()]))


def _difference(group: Group, found: list[tuple[_Fingerprint, list[int]]]) -> str:
    texts = [one.describe() for one, _ in found]
    parts = []
    for (one, ranks), text in zip(found, texts, strict=True):
        # The same sizes: then the order of the actions differs, or the placement.
        order = f" (order {one.digest & 0xFFFFFFFF:08x})" if texts.count(text) > 1 else ""
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        parts.append(f"{text}{order} on rank{'s' if len(ranks) > 1 else ''} {shown}")
    return (
        f"group {group.name}: the ranks of a pipeline have different schedules: "
        f"{'; '.join(parts)}. Give all of them the same settings, and make their executors in one "
        "order"
    )


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)
