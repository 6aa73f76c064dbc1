"""Pipeline schedules as data: built, proved, simulated, and run by one executor.

A ``Schedule`` says what every pipeline rank computes and in which order; ``Schedule.program`` adds
the sends and receives of one rank; ``PipelineExecutor`` runs that program.

Example:
    >>> from megacore.pipeline import build_schedule
    >>> schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=3)
    >>> print(schedule.to_text(grid=True))
    time    0   1   2   3   4   5   6   7   8   9   10  11
    rank 0  0F0 0F1         0B0---- 0F2 0B1----     0B2----
    rank 1      1F0 1B0---- 1F1 1B1---- 1F2 1B2----
    >>> schedule.simulate().bubble_fraction
    0.25
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore._core import (
    Action,
    ActionKind,
    LowerBound,
    Program,
    ScheduleInfo,
    StateMachine,
    validate_programs,
)
from megacore.lazy import lazy_names
from megacore.pipeline.auto import Certificate
from megacore.pipeline.build import (
    SCHEDULE_NAMES,
    best_group_size,
    build_schedule,
    num_warmup_forwards,
    schedule_catalog,
    schedule_table,
)
from megacore.pipeline.lowering import Lowering, Recompute
from megacore.pipeline.partition import partition_layers
from megacore.pipeline.recorder import ActionRecorder, TimedAction
from megacore.pipeline.schedule import Schedule
from megacore.pipeline.timeline import Costs, Event, Timeline

if TYPE_CHECKING:
    from megacore.pipeline.activation import ActivationSpec, receives_for
    from megacore.pipeline.executor import PipelineExecutor, StepLosses, forward_backward
    from megacore.pipeline.megatron_api import get_forward_backward_func

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "ActionKind",
    "ActionRecorder",
    "ActivationSpec",
    "Certificate",
    "Costs",
    "Event",
    "LowerBound",
    "Lowering",
    "PipelineExecutor",
    "Program",
    "Recompute",
    "Schedule",
    "ScheduleInfo",
    "StateMachine",
    "StepLosses",
    "TimedAction",
    "Timeline",
    "best_group_size",
    "build_schedule",
    "forward_backward",
    "get_forward_backward_func",
    "num_warmup_forwards",
    "partition_layers",
    "receives_for",
    "schedule_catalog",
    "schedule_table",
    "validate_programs",
]


# Schedules are pure values; torch is imported only when one is to be run.
__getattr__ = lazy_names(
    __name__,
    {
        "ActivationSpec": "activation",
        "PipelineExecutor": "executor",
        "StepLosses": "executor",
        "forward_backward": "executor",
        "get_forward_backward_func": "megatron_api",
        "receives_for": "activation",
    },
)
