"""Collective actions that succeed on all ranks or fail on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from megacore.errors import CheckpointError, MegacoreError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.group_timeout import longer_timeout
from megacore.parallel.process_groups import ProcessGroups

T = TypeVar("T")
# Long enough for slow disks; lost ranks are detected by the failure monitor.
PATIENCE = timedelta(hours=1)


def gather_results(action: Callable[[], T], groups: ProcessGroups) -> list[T]:
    """Run ``action`` on every rank and return the results of all ranks, by rank. Collective.

    Ranks wait for one another as long as a slow disk may take, not for ``run.timeout`` only.

    Raises:
        MegacoreError: On every rank, with the type and message of the first rank on which
            ``action`` failed. An ``OSError`` becomes a :class:`CheckpointError`; any other error is
            a bug and is re-raised unchanged on the rank where it occurred.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # any error, because the other ranks must not wait for this one
        failure = error
    kind = type(failure) if isinstance(failure, MegacoreError) else CheckpointError
    with longer_timeout(groups.world, PATIENCE):
        outcomes = all_gather_objects((kind, _describe(failure), result), groups.world)
    if failure is not None and not isinstance(failure, MegacoreError | OSError):
        raise failure
    for rank, (kind, message, _) in enumerate(outcomes):
        if message is not None:
            prefix = f"rank {rank}: " if rank > 0 else ""
            raise kind(prefix + message) from failure
    return [value for _, _, value in outcomes]


def on_every_rank(action: Callable[[], T], groups: ProcessGroups) -> T:
    """Run ``action`` on every rank and return this rank's result; errors as `gather_results`."""
    results: list[T] = []
    gather_results(lambda: results.append(action()), groups)
    return results[0]


def on_rank_0(action: Callable[[], T], groups: ProcessGroups) -> T:
    """Run ``action`` on rank 0 and return its result everywhere; errors as `gather_results`."""

    def act() -> list[T]:
        return [action()] if groups.rank == 0 else []

    return gather_results(act, groups)[0][0]


def _describe(failure: Exception | None) -> str | None:
    if failure is None:
        return None
    if isinstance(failure, OSError) and failure.strerror:
        where = "" if failure.filename is None else f": {failure.filename}"
        return f"{failure.strerror}{where}"
    if isinstance(failure, MegacoreError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"
