"""The optimizer over gradient buffers, its learning rate, and gradient norms."""

from __future__ import annotations

from megacore.optim.distributed_optimizer import DistributedOptimizer, StepResult
from megacore.optim.lr import learning_rate
from megacore.optim.shard import ParamPiece

__all__ = ["DistributedOptimizer", "ParamPiece", "StepResult", "learning_rate"]
