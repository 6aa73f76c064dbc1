"""Optimizer over gradient buffers, learning rate schedule, and gradient norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import lazy_names

if TYPE_CHECKING:
    from megacore.optim.distributed_optimizer import DistributedOptimizer
    from megacore.optim.frozen import FrozenParams, split_frozen
    from megacore.optim.lr import learning_rate
    from megacore.optim.matrix_rule import MatrixRule
    from megacore.optim.memory import MemoryRow, memory_row, memory_table
    from megacore.optim.options import OptimizerOptions, RateOptions
    from megacore.optim.param_group import ParamGroup
    from megacore.optim.rounded_weights import RoundedWeights
    from megacore.optim.rules.adam import Adam
    from megacore.optim.rules.adamw import AdamW
    from megacore.optim.rules.adamw_8bit import AdamW8bit
    from megacore.optim.rules.lion import Lion
    from megacore.optim.rules.muon import Muon
    from megacore.optim.rules.sgd import SGD
    from megacore.optim.rules.torch_optimizer import TorchOptimizer
    from megacore.optim.shard import ParamPiece
    from megacore.optim.step_result import StepResult
    from megacore.optim.update_piece import Rates, UpdatePiece
    from megacore.optim.update_rule import StateTensor, UpdateRule
    from megacore.optim.weight_average import WeightAverage

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "DistributedOptimizer",
    "FrozenParams",
    "Lion",
    "MatrixRule",
    "MemoryRow",
    "Muon",
    "OptimizerOptions",
    "ParamGroup",
    "ParamPiece",
    "RateOptions",
    "Rates",
    "RoundedWeights",
    "StateTensor",
    "StepResult",
    "TorchOptimizer",
    "UpdatePiece",
    "UpdateRule",
    "WeightAverage",
    "learning_rate",
    "memory_row",
    "memory_table",
    "split_frozen",
]

# Module of each name: predictions count bytes of the state without torch.
_HOMES = {
    "Adam": "rules.adam",
    "AdamW": "rules.adamw",
    "AdamW8bit": "rules.adamw_8bit",
    "DistributedOptimizer": "distributed_optimizer",
    "FrozenParams": "frozen",
    "Lion": "rules.lion",
    "MatrixRule": "matrix_rule",
    "MemoryRow": "memory",
    "Muon": "rules.muon",
    "OptimizerOptions": "options",
    "ParamGroup": "param_group",
    "ParamPiece": "shard",
    "RateOptions": "options",
    "Rates": "update_piece",
    "RoundedWeights": "rounded_weights",
    "SGD": "rules.sgd",
    "StateTensor": "update_rule",
    "StepResult": "step_result",
    "TorchOptimizer": "rules.torch_optimizer",
    "UpdatePiece": "update_piece",
    "UpdateRule": "update_rule",
    "WeightAverage": "weight_average",
    "learning_rate": "lr",
    "memory_row": "memory",
    "memory_table": "memory",
    "split_frozen": "frozen",
}

__getattr__ = lazy_names(__name__, _HOMES)
