"""Optimizer over gradient buffers, learning rate schedule, and gradient norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import lazy_names

if TYPE_CHECKING:
    from megacore.optim.distributed_optimizer import DistributedOptimizer, StepResult
    from megacore.optim.lr import learning_rate
    from megacore.optim.memory import MemoryRow, memory_row, memory_table
    from megacore.optim.options import OptimizerOptions, RateOptions
    from megacore.optim.param_group import ParamGroup
    from megacore.optim.shard import ParamPiece

__all__ = [
    "DistributedOptimizer",
    "MemoryRow",
    "OptimizerOptions",
    "ParamGroup",
    "ParamPiece",
    "RateOptions",
    "StepResult",
    "learning_rate",
    "memory_row",
    "memory_table",
]

# Module of each name: predictions count bytes of the state without torch.
_HOMES = {
    "DistributedOptimizer": "distributed_optimizer",
    "MemoryRow": "memory",
    "OptimizerOptions": "options",
    "ParamGroup": "param_group",
    "ParamPiece": "shard",
    "RateOptions": "options",
    "StepResult": "distributed_optimizer",
    "learning_rate": "lr",
    "memory_row": "memory",
    "memory_table": "memory",
}

__getattr__ = lazy_names(__name__, _HOMES)
