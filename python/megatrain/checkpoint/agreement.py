"""Collective actions that succeed on all ranks or fail on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

from megacore.errors import CheckpointError, MegacoreError
from megacore.parallel.collectives import broadcast_object, gather_objects
from megacore.parallel.group_timeout import longer_timeout
from megacore.parallel.process_groups import ProcessGroups

T = TypeVar("T")
# Long enough for slow disks; lost ranks are detected by the failure monitor.
PATIENCE = timedelta(hours=1)


def gather_results(action: Callable[[], T], groups: ProcessGroups) -> list[T]:
    """Run ``action`` on every rank; return the results by rank on rank 0, ``[]`` on others.

    Collective. Only rank 0 receives something from each rank. Ranks wait for one another as long as
    a slow disk may take, not for ``run.timeout`` only.

    Raises:
        MegacoreError: On every rank, with the type and message of the first rank on which
            ``action`` failed. An ``OSError`` becomes a :class:`CheckpointError`; any other error is
            a bug and is re-raised unchanged on the rank where it occurred.
    """
    outcome = _run(action)
    with longer_timeout(groups.world, PATIENCE):
        told = gather_objects((outcome.kind, outcome.message, outcome.result), groups.world)
        first = None
        for rank, (kind, message, _) in enumerate(told):
            if message is not None:
                first = kind, f"rank {rank}: {message}" if rank > 0 else message
                break
        first = broadcast_object(first, groups.world)
    _raise(first, outcome.failure)
    return [result for _, _, result in told]


def on_every_rank(action: Callable[[], T], groups: ProcessGroups) -> T:
    """Run ``action`` on every rank and return this rank's result; errors as `gather_results`."""
    results: list[T] = []
    gather_results(lambda: results.append(action()), groups)
    return results[0]


def on_rank_0(action: Callable[[], T], groups: ProcessGroups) -> T:
    """Run ``action`` on rank 0 and return its result everywhere; errors as `gather_results`."""
    outcome = _run(action) if groups.rank == 0 else _Outcome()
    with longer_timeout(groups.world, PATIENCE):
        failed = outcome.message is not None
        first, result = broadcast_object(
            ((outcome.kind, outcome.message) if failed else None, outcome.result), groups.world
        )
    _raise(first, outcome.failure)
    return cast(T, result)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Result of an action on this rank, or its failure with the type and message for others."""

    result: Any = None
    failure: Exception | None = None
    kind: type[MegacoreError] = CheckpointError
    message: str | None = None


def _run(action: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(result=action())
    except Exception as error:  # any error, because the other ranks must not wait for this one
        kind = type(error) if isinstance(error, MegacoreError) else CheckpointError
        return _Outcome(failure=error, kind=kind, message=_describe(error))


def _raise(first: tuple[type[MegacoreError], str] | None, own: Exception | None) -> None:
    """Raise the error of the first rank that failed, or an own bug."""
    if own is not None and not isinstance(own, MegacoreError | OSError):
        raise own
    if first is not None:
        kind, message = first
        raise kind(message) from own


def _describe(failure: Exception) -> str:
    if isinstance(failure, OSError) and failure.strerror:
        where = "" if failure.filename is None else f": {failure.filename}"
        return f"{failure.strerror}{where}"
    if isinstance(failure, MegacoreError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"
