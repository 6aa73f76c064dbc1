"""Contiguous storage for parameters and gradients, and its layout plan.

Names are imported on first use; options and plans do not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.buffers.options import BufferOptions
from megacore.lazy import lazy_names

if TYPE_CHECKING:
    from megacore.buffers.assign import buffer_kind, make_buffers
    from megacore.buffers.bucket_plan import Bucket, BufferPlan, ShardPiece, plan_buckets
    from megacore.buffers.grad_reducer import GradReducer
    from megacore.buffers.param_gatherer import ParamGatherer, StaleWeightsError
    from megacore.buffers.param_grad_buffer import ParamGradBuffer

__all__ = [
    "Bucket",
    "BufferOptions",
    "BufferPlan",
    "GradReducer",
    "ParamGatherer",
    "ParamGradBuffer",
    "ShardPiece",
    "StaleWeightsError",
    "buffer_kind",
    "make_buffers",
    "plan_buckets",
]

_MODULES = {
    **dict.fromkeys(("Bucket", "BufferPlan", "ShardPiece", "plan_buckets"), "bucket_plan"),
    "GradReducer": "grad_reducer",
    "ParamGatherer": "param_gatherer",
    "ParamGradBuffer": "param_grad_buffer",
    "StaleWeightsError": "param_gatherer",
    "buffer_kind": "assign",
    "make_buffers": "assign",
}

__getattr__ = lazy_names(__name__, _MODULES)
