"""Contiguous storage for parameters and gradients, and its layout plan."""

from __future__ import annotations

from megacore.buffers.bucket_plan import Bucket, BufferPlan, ShardPiece, plan_buckets
from megacore.buffers.grad_reducer import GradReducer
from megacore.buffers.make_buffers import buffer_kind, make_buffers
from megacore.buffers.param_gatherer import ParamGatherer, StaleWeightsError
from megacore.buffers.param_grad_buffer import ParamGradBuffer

__all__ = [
    "Bucket",
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
