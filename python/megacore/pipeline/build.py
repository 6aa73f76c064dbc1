"""Pipeline schedules by name: those with a generator, and the search ``auto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsIndex

from megacore import _core
from megacore._core import ScheduleInfo
from megacore.pipeline.auto import AUTO, build_auto
from megacore.pipeline.schedule import Schedule
from megacore.pipeline.timeline import Costs
from megacore.suggest import closest_matches

SCHEDULE_NAMES = tuple(info.name for info in _core.schedule_catalog())
KNOWN = (*SCHEDULE_NAMES, AUTO)


def schedule_catalog() -> list[ScheduleInfo]:
    """Return the properties of every named schedule, in display order.

    Each has ``name``, ``summary``, ``source``, ``constraints`` on the sizes, ``placement``
    (``"loop"``, ``"v"`` or ``"bidirectional"``), ``num_chunks`` per rank (0: any number),
    ``splits_backward``, ``takes_group_size``, ``takes_warmup_multiplier`` and ``takes_pairs``.

    Example:
        >>> [info.name for info in schedule_catalog() if info.placement == "v"]
        ['zb_v', 'v_half', 'v_min', '1f1b_v', 'dualpipe_v']
    """
    return _core.schedule_catalog()


def build_schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    group_size: int | None = None,
    warmup_multiplier: int | None = None,
    pairs: Literal["whole", "split"] | None = None,
    forward_only: bool = False,
    placement: Literal["loop", "v"] | None = None,
    memory_limit: int | Sequence[int] | None = None,
    activation_size: int | Sequence[int] | None = None,
    split_backward: bool | None = None,
    costs: Costs | None = None,
    effort: Literal["fast", "thorough"] | None = None,
) -> Schedule:
    """Build a schedule by name, or search for one with the name ``"auto"``, and validate it.

    Args:
        name: One of ``SCHEDULE_NAMES``, which ``schedule_catalog`` describes, or ``"auto"``.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches per optimizer step.
        num_chunks: Model chunks per rank. By default what the schedule has; 1 for those that can
            have any number.
        group_size: For the interleaved schedules, the microbatches one chunk runs before the next
            takes over. By default the smallest that reaches the smallest makespan, so any number
            of microbatches works well; see ``best_group_size``. For ``"group_interleaved"`` by
            default the smallest that runs, which holds the fewest activations.
        warmup_multiplier: For ``"interleaved_1f1b"``, the forwards more that a rank runs first per
            rank behind it: 2 hides messages (the default), 1 holds fewer activations.
        pairs: For ``"1f1b"`` and ``"interleaved_1f1b"``: after the warmup, which is longer for it,
            let every forward run together with the backward of an older microbatch, a whole one or
            its I, with W behind the pair; see ``Schedule.overlaps``. By default one after another.
        forward_only: Leave the backward actions out, for evaluation.
        placement: For ``"auto"``, as all that follow: ``"loop"`` (the default) puts stage s on rank
            s mod p; ``"v"`` puts stages r and 2p-1-r on rank r.
        memory_limit: What a rank may hold from F until B or W, one number for all ranks or one per
            rank; counted in stage activations unless ``activation_size`` is given. By default as
            much as it takes.
        activation_size: Size of one activation in the unit of ``memory_limit``, one number for all
            stages or one per stage.
        split_backward: Whether a backward may run as I and W (the default) or only in one piece.
        costs: Times of the actions; by default F = I = W = 1 and free messages. ``overlap`` must
            be 0.
        effort: ``"fast"`` takes less than a second for 64 ranks and 1024 microbatches,
            ``"thorough"`` up to some seconds. By default thorough for small problems; those of more
            than 4096 stages or 2^24 actions are refused.

    Returns:
        The schedule of all ranks. Of ``"auto"`` it has a ``certificate``.

    Raises:
        ValueError: If the name is unknown, an option is not for this schedule, or the sizes cannot
            work. The message names the nearest legal values.

    Example:
        >>> schedule = build_schedule(
        ...     "interleaved_1f1b", num_ranks=2, num_chunks=2, num_microbatches=4
        ... )
        >>> schedule.order(1)
        [1, 1, 2, -2, 2, -2, 1, -1, 1, -1, 2, -2, 2, -2, -1, -1]
    """
    own = {"group_size": group_size, "warmup_multiplier": warmup_multiplier, "pairs": pairs}
    search = {
        "placement": placement,
        "memory_limit": memory_limit,
        "activation_size": activation_size,
        "split_backward": split_backward,
        "costs": costs,
        "effort": effort,
    }
    sizes = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_chunks": num_chunks,
    }
    for size, value in sizes.items():
        if value is not None and not isinstance(value, SupportsIndex):
            raise ValueError(f"{size} must be a whole number, got {value!r}")
    _check_options(name, own, search)
    certificate = None
    if name == AUTO:
        native, certificate = build_auto(**sizes, **search)  # type: ignore[arg-type]
    else:
        native = _core.build_schedule(name, **sizes, **own)  # type: ignore[arg-type]
    schedule = Schedule(native, certificate)
    return schedule.forward_only() if forward_only else schedule


def _check_options(name: str, own: Mapping[str, Any], search: Mapping[str, Any]) -> None:
    """Raise an error for options that the schedule or the search lacks, then for unknown names."""
    for option, value in (own if name == AUTO else search).items():
        if value is not None and name == AUTO:
            raise ValueError(f"{option} is {value}, but 'auto' finds its own; leave it out")
        if value is not None:
            raise ValueError(f"{option} is for schedule 'auto' only; leave it out with {name!r}")
    require_schedule_name(name)


def require_schedule_name(name: str) -> None:
    """Raise an error if a name is not that of a schedule.

    Raises:
        ValueError: If it is none of ``SCHEDULE_NAMES`` and not ``"auto"``; names the nearest one.

    Example:
        >>> require_schedule_name("zb_v")
    """
    if name in KNOWN:
        return
    close = closest_matches(name, KNOWN, count=1)
    hint = f"did you mean {close[0]!r}? There are" if close else "choose one of"
    raise ValueError(f"unknown schedule {name!r}; {hint} {', '.join(KNOWN)}")


def best_group_size(*, num_ranks: int, num_chunks: int, num_microbatches: int) -> int:
    """Return the smallest group size with which interleaving reaches its smallest makespan.

    Smaller groups hold fewer activations, so this is the default of the interleaved schedule.

    Example:
        >>> best_group_size(num_ranks=4, num_chunks=2, num_microbatches=8)
        4
        >>> best_group_size(num_ranks=4, num_chunks=2, num_microbatches=9)
        5
    """
    return _core.best_group_size(
        num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=num_microbatches
    )


def num_warmup_forwards(
    rank: int,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    warmup_multiplier: int = 2,
    pairs: bool = False,
) -> int:
    """Return the forwards of a rank before its first forward that a backward follows.

    Of ``"interleaved_1f1b"``, and of ``"1f1b"`` with one chunk: the warmup microbatches of
    Megatron-LM, counted once per chunk.

    Args:
        rank: Pipeline rank.
        num_ranks: Number of pipeline ranks.
        num_microbatches: Microbatches of a step.
        num_chunks: Model chunks per rank.
        group_size: As of :func:`build_schedule`. Default: :func:`best_group_size`.
        warmup_multiplier: As of :func:`build_schedule`.
        pairs: For the schedule with pairs.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> sizes = {"num_ranks": 4, "num_microbatches": 8}
        >>> [num_warmup_forwards(rank, **sizes) for rank in range(4)]
        [3, 2, 1, 0]
        >>> [num_warmup_forwards(rank, num_chunks=2, **sizes) for rank in range(4)]
        [10, 8, 6, 4]
    """
    return _core.interleaved_warmup(
        rank,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        group_size=group_size,
        warmup_multiplier=warmup_multiplier,
        pairs=pairs,
    )


def schedule_table(
    num_microbatches: int, num_chunks: int, group_size: int
) -> list[tuple[int, int]]:
    """Return the (microbatch, chunk) pairs in the order in which interleaving runs them.

    The k-th forward is entry k; the k-th backward is entry k with chunk ``num_chunks - 1 - chunk``.

    Example:
        >>> schedule_table(3, 2, 2)
        [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """
    return _core.schedule_table(num_microbatches, num_chunks, group_size)
