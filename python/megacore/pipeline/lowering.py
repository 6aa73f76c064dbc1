"""Options of the lowering of a schedule to programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

Receives = Literal["ahead", "in_order"]


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Recompute policy: microbatches that keep their activations, and those that recompute them.

    Of every ``window`` forwards of a rank, in its order, the first ``keep`` keep their activations.

    Attributes:
        keep: Number of forwards that keep their activations; 0 recomputes all.
        window: Default: the number of microbatches that the rank holds at once, so that memory for
            ``keep`` full activations is used all the time.

    Source: ``num_microbatches_with_partial_activation_checkpoints`` of Megatron-LM.
    """

    keep: int = 0
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """Options of the programs that ``Schedule.lower`` makes of a schedule.

    Attributes:
        receives: ``"ahead"`` or ``"in_order"``; see ``Schedule.program``.
        ahead: With ``"ahead"``, how many compute actions before its reader a receive is posted, at
            the least. More hides longer transfers and needs more receive buffers.
        recompute: Adds RECOMPUTE for the activations that are not kept.
    """

    receives: Receives = "ahead"
    ahead: int = 1
    recompute: Recompute | None = None


class _Options(TypedDict):
    in_order: bool
    ahead: int
    recompute: tuple[int, int] | None


def native_options(lowering: Lowering) -> _Options:
    """Return the arguments of the native core's ``lower`` and ``lower_rank``.

    Raises:
        ValueError: If an option is out of range.
    """
    if lowering.receives not in ("ahead", "in_order"):
        raise ValueError(f"receives must be 'ahead' or 'in_order', got {lowering.receives!r}")
    recompute = lowering.recompute
    if recompute is not None and recompute.window == 0:
        raise ValueError(
            "window must be at least 1, or None for all that the rank holds at once, got 0"
        )
    return {
        "in_order": lowering.receives == "in_order",
        "ahead": lowering.ahead,
        "recompute": None if recompute is None else (recompute.keep, recompute.window or 0),
    }
