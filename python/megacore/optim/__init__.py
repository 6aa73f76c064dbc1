"""Optimizer over gradient buffers, learning rate schedule, and gradient norm."""

from __future__ import annotations

from megacore.optim.distributed_optimizer import DistributedOptimizer, StepResult
from megacore.optim.lr import learning_rate
from megacore.optim.memory import MemoryRow, memory_row, memory_table
from megacore.optim.param_group import ParamGroup
from megacore.optim.shard import ParamPiece

__all__ = [
    "DistributedOptimizer",
    "MemoryRow",
    "ParamGroup",
    "ParamPiece",
    "StepResult",
    "learning_rate",
    "memory_row",
    "memory_table",
]
